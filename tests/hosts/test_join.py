"""A machine of its own that joins with `everstep join`: it is checked, trains along, is emptied before it leaves, and is
lost when killed. A second one cannot come under its name.

One of the cluster's own nodes makes room for it: on that machine there is nothing of the cluster then but what joins.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from deploy.local import LocalCluster
from orchestrator.adapters.local_nodes import LocalNodes
from tests.tiny_job import TinyJob

from .machines import Machines

pytestmark = pytest.mark.timeout(400)
JOB = {"train": {"steps": 1_000_000, "micro_batches": 8, "micro_batch_size": 1, "sequence": 32, "emulated_layer_s": 0.02}}
"""Two H100s and a few A100s make a shorter step than six A100s, and than all of them together."""


def test_a_machine_joins_trains_and_leaves_or_dies_without_a_step_lost(
    machines: Machines, cluster: LocalCluster, job: TinyJob, tmp_path: Path
) -> None:
    machines.all_train()
    node = sorted(job.nodes())[-1]
    host, other = machines.host_of(node), machines.host_of(sorted(job.nodes())[0])
    with vacated(machines, node):
        job.trains_where(lambda nodes: node not in nodes)
        with joined(machines, host, tmp_path / "first") as guest:
            trains_along(job, "guest")
            view = next(one for one in job.client.nodes() if one.id == "guest")
            assert (view.kind, view.num_devices, view.address) == ("H100", 2, machines.rig.address(host))
            assert view.admission == "admitted" and "a sum of" in view.checked
            before = job.pids()
            with joined(machines, other, tmp_path / "namesake", stderr=subprocess.PIPE, text=True) as namesake:
                _, said = namesake.communicate(timeout=120)
                assert namesake.returncode == 1
                assert f"has a node guest already, at {machines.rig.address(host)}:" in said and "another --name" in said
            assert job.pids() == before, "nobody noticed"
            guest.send_signal(signal.SIGTERM)
            assert guest.wait(120) == 0
            job.trains_where(lambda nodes: "guest" not in nodes)

        # Again under its name, at once: Ray takes the life before for living still.
        with joined(machines, host, tmp_path / "second") as guest:
            trains_along(job, "guest")
            os.kill(guest.pid, signal.SIGKILL)
            machines.until_status("guest", "LOST")
            job.trains_where(lambda nodes: "guest" not in nodes)
    machines.all_train()


@contextmanager
def vacated(machines: Machines, node: str) -> Iterator[None]:
    """Whatever becomes of the guest, the cluster has all of its own machines again for the tests that follow."""
    host = machines.host_of(node)
    machines.kill(node)
    try:
        yield
    finally:
        machines.start(host)


def trains_along(job: TinyJob, node: str) -> None:
    """Devices of the node are among those that make steps."""
    job.trains_where(lambda nodes: node in nodes)
    job.trains_on(3)


@contextmanager
def joined(
    machines: Machines, host: int, folder: Path, *, stderr: int | None = None, text: bool = False
) -> Iterator[subprocess.Popen[str]]:
    """`everstep join` as its user starts it on that machine, with what `everstep up` says and a copy of the token."""
    nodes = LocalNodes(machines.cluster.state_dir)
    command = [
        *(*machines.rig.prefix(host), sys.executable, "-m", "api.cli", "join", nodes.registry().address),
        *("--token-file", str(nodes.environment.token_file), "--kind", "H100", "--devices", "2"),
        *("--name", "guest", "--state-dir", str(folder)),
    ]
    process = subprocess.Popen(command, stderr=stderr, text=text or None)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        LocalNodes(folder).stop()
