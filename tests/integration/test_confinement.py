"""A program that looks around as far as it can, in a job of a service that runs as root: it trains, and finds nothing.

The supervisor, the probe, a host, its zygote and ranks, and Redis are real; Ray alone is its in-memory twin.
"""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deploy.owner import own_token
from orchestrator.adapters import ray_environment
from orchestrator.adapters.embedded_redis import EmbeddedRedis
from orchestrator.adapters.secret_folder import SecretFolder
from orchestrator.domain.events import CancelRequested
from orchestrator.domain.failure import Cause
from orchestrator.domain.faults import FaultKind, FaultRequested
from orchestrator.domain.spec import CheckpointSpec, ParallelSpec
from orchestrator.domain.state import Cancelled
from tests.jobs import ENDLESS, a_job, largest_gap
from tests.rig import JOB, a_rig
from worker.confinement import may_show_views

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(os.geteuid() != 0 or not may_show_views(), reason="only root can do this"),
]
PROGRAM = """
import json, os, resource, socket, tempfile
from worker.programs.causal_lm import CausalLM

WANTED, HOST, REDIS = json.loads(os.environ["LOOKS_FOR"])

def tried(work):
    try:
        return work() or "done"
    except OSError as error:
        return type(error).__name__

def look(where):
    status = dict(line.split(":\\t", 1) for line in open("/proc/self/status").read().splitlines() if ":\\t" in line)
    print("FOUND", json.dumps({
        "where": where,
        "ids": [*os.getresuid(), *os.getresgid(), *os.getgroups()],
        "rights": int(status["CapEff"], 16) | int(status["CapPrm"], 16),
        "no_new": status["NoNewPrivs"],
        "core": resource.getrlimit(resource.RLIMIT_CORE)[1],
        "files": {path: tried(lambda: open(path, "rb").read(1) and "read") for path in WANTED},
        "written": {path: tried(lambda: open(path, "ab").close()) for path in WANTED},
        "kill": tried(lambda: os.kill(HOST, 0)),
        "redis": redis(),
        "tmp": [tempfile.gettempdir(), os.stat(tempfile.gettempdir()).st_mode & 0o777],
        "environment": sorted(os.environ),
    }), flush=True)

def redis():
    with socket.create_connection(("127.0.0.1", REDIS), timeout=5) as connection:
        connection.sendall(b"KEYS *\\r\\n")
        return connection.recv(100).decode()

look("import")

class Looks(CausalLM):
    def build(self, spec, first, last, tp, leaves):
        look("build")
        return super().build(spec, first, last, tp, leaves)

PROGRAM = Looks()
"""


def test_a_program_run_by_root_is_nobody_reaches_nothing_and_trains_recovers_and_restores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "looks_around.py").write_text(PROGRAM)
    monkeypatch.syspath_prepend(str(tmp_path / "code"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "code"), prepend=":")
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    wanted = hidden_in(state)
    redis = EmbeddedRedis(state)
    address = redis.start()
    wanted += [str(path) for path in (state / "redis").rglob("*") if path.is_file()]
    monkeypatch.setenv("LOOKS_FOR", json.dumps([wanted, os.getpid(), address.port]))

    spec = replace(
        a_job(steps=ENDLESS, micro_batches=4, micro_batch_size=1, emulated_layer_s=0.005),
        program="looks_around:PROGRAM",
        parallel=ParallelSpec(tp=1, pp=1, dp=1),
        checkpoint=CheckpointSpec(every=8),
    )
    spec = replace(spec, recovery=replace(spec.recovery, mirrors=0))

    async def scenario() -> None:
        async with a_rig(state, num_nodes=1, num_devices=1) as rig:
            kill = FaultRequested(fault=FaultKind.KILL, job=JOB, rank=0, beyond_mirrors=True)
            asked: list[FaultRequested] = []

            async def disturb(step: int) -> None:
                record = await rig.store.get(JOB)
                if "checkpoint_proven" in [entry.type for entry in rig.history]:
                    await rig.store.command(CancelRequested(job=JOB))
                elif record.checkpoint and not asked:  # the only rank: all it held is lost with it
                    asked.append(kill)
                    await rig.store.command(kill)

            job = await rig.run(spec, disturb)
            assert isinstance(job.state, Cancelled), job.state
            assert [incident.fault.cause for incident in job.incidents] == [Cause.RANK_LOST]
            assert job.checkpoint is not None and Path(job.checkpoint.path).stat().st_uid == 0
            assert largest_gap(rig.losses, replace(spec, program="causal_lm"), len(rig.losses)) <= 1e-5

    try:
        asyncio.run(scenario())
    finally:
        redis.stop()
    logs = state / "jobs" / JOB / "logs"
    found = [one for log in logs.glob("*.log") for one in findings(log)]
    assert {one["where"] for one in found} == {"import", "build"}
    (ids,) = {tuple(one["ids"]) for one in found}
    assert len(ids) == 6 and len(set(ids)) == 1 and ids[0] > 0, "one user and its group, and no other"
    for one in found:
        assert (one["rights"], one["no_new"], one["core"]) == (0, "1", 0)
        assert set(one["files"]) == set(wanted) and len(wanted) > 6
        assert {*one["files"].values(), *one["written"].values()} <= {"FileNotFoundError", "PermissionError"}, one
        assert one["kill"] == "PermissionError" and one["redis"].startswith("-NOAUTH")
        assert one["tmp"][1] == 0o700 and not Path(one["tmp"][0]).exists(), "its own, and gone with it"
        assert not [name for name in one["environment"] if name.startswith(("RAY_", "EVERSTEP_TOKEN", "EVERSTEP_REDIS"))]


def hidden_in(state: Path) -> list[str]:
    """What the service keeps to itself, and what is another job's."""
    own_token(state)
    SecretFolder(state / "secrets").put("other", "hf", "another-project's")
    environment = ray_environment.for_state_dir(state)
    ray_environment.prepare(environment)
    other = state / "jobs" / "job-other" / "logs"
    other.mkdir(parents=True)
    (other / "n0-0.log").write_text("another job's words\n")
    found = [state / "admin.token", state / "secrets" / "other" / "hf", environment.token_file, other / "n0-0.log"]
    assert all(path.is_file() for path in found)
    return [*map(str, found), f"/proc/{os.getpid()}/environ", f"/proc/{os.getpid()}/mem", "/etc/shadow"]


def findings(log: Path) -> list[dict[str, Any]]:
    said = [line.partition("FOUND ")[2] for line in log.read_text(errors="replace").splitlines() if "FOUND " in line]
    return [json.loads(line) for line in said]
