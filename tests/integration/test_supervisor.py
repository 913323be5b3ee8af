"""The supervisor's loop, the kernel and real training processes together; only Ray and Redis are their in-memory twins."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil
import pytest

from orchestrator.adapters.checkpoints import FolderCheckpoints
from orchestrator.adapters.local_hosts import LocalHosts
from orchestrator.adapters.memory import MemoryStore
from orchestrator.adapters.plan_process import ThreadPlanner
from orchestrator.adapters.probe_process import SubprocessProber
from orchestrator.domain.cluster import Node
from orchestrator.domain.events import FaultKind, FaultRequested, HistoryEntry, StepRecord
from orchestrator.domain.ids import JobId, NodeId
from orchestrator.domain.job import Cause, Failed, JobRecord, Running, Succeeded
from orchestrator.domain.spec import JobSpec
from orchestrator.supervisor.run import Supervisor, World
from tests.jobs import a_job, largest_gap

JOB = JobId("job-1")
pytestmark = pytest.mark.timeout(240)


@dataclass
class Rig:
    """A control plane in this process and its nodes; what a user would see is gathered as it happens."""

    root: Path
    num_nodes: int = 4
    losses: dict[int, float] = field(default_factory=dict)
    history: list[HistoryEntry] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.store = MemoryStore(time.time)
        self.cluster = LocalHosts(
            tuple(Node(id=NodeId(f"n{i}"), kind="A100", num_devices=2) for i in range(self.num_nodes))
        )
        self.supervisor: asyncio.Task[None] | None = None

    def start_supervisor(self, holder: str = "first") -> None:
        world = World(
            store=self.store,
            cluster=self.cluster,
            provider=self.cluster,
            prober=SubprocessProber(),
            planner=ThreadPlanner(),
            checkpoints=FolderCheckpoints(str(self.root)),
        )
        self.supervisor = asyncio.create_task(Supervisor(world=world, root=str(self.root), holder=holder).serve())

    async def stop_supervisor(self) -> None:
        assert self.supervisor is not None
        self.supervisor.cancel()
        with contextlib.suppress(asyncio.CancelledError, BaseExceptionGroup):
            await self.supervisor

    async def run(self, spec: JobSpec, on_step: Callable[[int], object] = lambda _: None) -> JobRecord:
        """Submit and follow to the end; on_step may return an awaitable."""
        await self.store.submit(JOB, spec, time.time(), None, "")
        async for _, entry in self.store.follow(JOB, "0"):
            if isinstance(entry, StepRecord):
                self.losses[entry.answer.step] = entry.answer.loss
                if asyncio.iscoroutine(doing := on_step(entry.answer.step)):
                    await doing
            elif isinstance(entry, HistoryEntry):
                self.history.append(entry)
                print(f"{entry.at % 1000:.2f}", entry.type, entry.message)
                if entry.type == "ended":
                    break
        return await self.store.get(JOB)

    async def kill_rank(self, rank: int) -> None:
        await self.store.command(FaultRequested(fault=FaultKind.KILL_RANK, job=JOB, rank=rank))


@contextlib.asynccontextmanager
async def a_rig(root: Path, num_nodes: int = 4) -> AsyncIterator[Rig]:
    rig = Rig(root, num_nodes)
    rig.start_supervisor()
    try:
        yield rig
    finally:
        await rig.stop_supervisor()
        await rig.cluster.close()
        assert not [child for child in psutil.Process().children(recursive=True) if _is_ours(child)]


def _is_ours(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return "worker.zygote" in " ".join(process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE
    return False


def test_killed_ranks_one_after_another_do_not_change_the_curve(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with a_rig(tmp_path) as rig:
            spec = a_job(steps=36)
            job = await rig.run(spec, lambda step: rig.kill_rank(step // 4 - 1) if step % 4 == 0 and step <= 32 else None)
            assert isinstance(job.state, Succeeded), job.state
            assert [incident.fault.cause for incident in job.incidents] == [Cause.RANK_LOST] * 8
            assert sum(incident.rolled_back for incident in job.incidents) == 0
            assert largest_gap(rig.losses, spec) <= 1e-5
            print("pauses", [round(incident.pause_s or 0, 3) for incident in job.incidents])

    asyncio.run(scenario())


def test_killed_node_is_planned_around_and_a_new_one_is_used(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with a_rig(tmp_path) as rig:
            spec = a_job(steps=150)

            async def disturb(step: int) -> None:
                if step == 8:
                    record = await rig.store.get(JOB)
                    assert isinstance(record.state, Running)
                    await rig.cluster.kill(record.state.plan.seats[0].device.node)
                elif step == 16:
                    await rig.cluster.add("A100", 2)

            job = await rig.run(spec, disturb)
            assert isinstance(job.state, Succeeded), job.state
            assert [incident.fault.cause for incident in job.incidents] == [Cause.NODE_LOST, Cause.GROW]
            assert sum(incident.rolled_back for incident in job.incidents) == 0
            assert largest_gap(rig.losses, spec) <= 1e-4

    asyncio.run(scenario())


def test_supervisor_that_dies_is_succeeded_and_no_rank_restarts(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with a_rig(tmp_path, num_nodes=2) as rig:
            spec = a_job(steps=60)
            pids: list[dict[object, int]] = []

            async def disturb(step: int) -> None:
                if step in (10, 30):
                    pids.append(dict((await rig.store.get(JOB)).pids))
                    await rig.stop_supervisor()
                    await asyncio.sleep(0.5)
                    rig.start_supervisor(f"after-{step}")

            job = await rig.run(spec, disturb)
            assert isinstance(job.state, Succeeded), job.state
            assert pids[0] == pids[1] and len(pids[0]) == 4
            assert job.generation == 1
            assert largest_gap(rig.losses, spec) <= 1e-5

    asyncio.run(scenario())


def test_program_that_raises_fails_the_job_with_its_words(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with a_rig(tmp_path, num_nodes=2) as rig:
            job = await rig.run(a_job(steps=20, learning_rate=1e30, clip_norm=1e30, warmup_steps=1))
            assert isinstance(job.state, Failed)
            assert "lower train.learning_rate" in job.state.message
            assert job.state.exit_code == 1
            assert job.state.device is not None
            assert job.state.log_tail

    asyncio.run(scenario())


def test_data_that_is_not_there_is_refused_before_any_device_is_held(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with a_rig(tmp_path, num_nodes=1) as rig:
            spec = a_job()
            job = await rig.run(replace(spec, data=replace(spec.data, files=(str(tmp_path / "nothing*.txt"),))))
            assert isinstance(job.state, Failed)
            assert "nothing*.txt" in job.state.message
            assert not [entry for entry in rig.history if entry.status not in ("PENDING", "FAILED")]

    asyncio.run(scenario())


@pytest.mark.parametrize(("variant", "gap"), [("gloo", 1e-5), ("bf16", 1e-2)])
def test_killed_rank_does_not_change_the_curve_on_other_settings(tmp_path: Path, variant: str, gap: float) -> None:
    """gloo instead of links; bf16 with a tied head and activation checkpointing."""
    spec = a_job(steps=24)
    if variant == "gloo":
        spec = replace(spec, recovery=replace(spec.recovery, backend="gloo"))
    else:
        train = replace(spec.train, dtype="bf16", activation_checkpointing=True)
        spec = replace(spec, train=train, model={**spec.model, "tied": True})

    async def scenario() -> None:
        async with a_rig(tmp_path) as rig:
            job = await rig.run(spec, lambda step: rig.kill_rank(5) if step == 9 else None)
            assert isinstance(job.state, Succeeded), job.state
            assert [incident.fault.cause for incident in job.incidents] == [Cause.RANK_LOST]
            assert sum(incident.rolled_back for incident in job.incidents) == 0
            assert largest_gap(rig.losses, spec) <= gap

    asyncio.run(scenario())
