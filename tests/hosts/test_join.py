"""A machine that joins by itself: it is checked, trains along, is emptied before it leaves, and is lost when killed."""

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

JOB = {"train": {"steps": 1_000_000, "micro_batches": 40, "micro_batch_size": 1, "sequence": 32}}
"""Ten devices make a shorter step than eight."""
HOST = 1
"""It has a node of the cluster's own, and is a machine for another one, too."""


@contextmanager
def joined(machines: Machines, folder: Path, name: str) -> Iterator[subprocess.Popen[bytes]]:
    nodes = LocalNodes(machines.cluster.state_dir)
    command = [
        *(*machines.rig.prefix(HOST), sys.executable, "-m", "deploy.join", nodes.registry().address),
        *("--token-file", str(nodes.environment.token_file), "--kind", "A100", "--devices", "2"),
        *("--name", name, "--state-dir", str(folder)),
    ]
    process = subprocess.Popen(command)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        LocalNodes(folder).stop()


@pytest.mark.timeout(240)
def test_a_machine_joins_trains_and_leaves_without_a_step_lost(
    machines: Machines, cluster: LocalCluster, job: TinyJob, tmp_path: Path
) -> None:
    machines.all_train()
    with joined(machines, tmp_path / "one", "guest-1") as process:
        job.trains_where(lambda nodes: "guest-1" in nodes, within_s=90)
        view = next(node for node in job.client.nodes() if node.id == "guest-1")
        assert (view.kind, view.num_devices, view.address) == ("A100", 2, machines.rig.address(HOST))
        assert view.admission == "admitted" and "a sum of" in view.checked
        process.send_signal(signal.SIGTERM)
        assert process.wait(90) == 0
        job.trains_where(lambda nodes: "guest-1" not in nodes, within_s=30)
    with joined(machines, tmp_path / "two", "guest-2") as process:
        job.trains_where(lambda nodes: "guest-2" in nodes, within_s=90)
        os.kill(process.pid, signal.SIGKILL)
        machines.until_status("guest-2", "LOST")
        job.trains_where(lambda nodes: "guest-2" not in nodes, within_s=60)
