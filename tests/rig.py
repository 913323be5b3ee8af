"""A control plane in this process with real hosts and ranks below it; Ray and Redis are their in-memory twins."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from orchestrator.adapters.checkpoints import FolderCheckpoints
from orchestrator.adapters.local_hosts import LocalHosts
from orchestrator.adapters.memory import MemoryStore
from orchestrator.adapters.plan_thread import ThreadPlanner
from orchestrator.adapters.probe_process import SubprocessProber
from orchestrator.domain import codec
from orchestrator.domain.cluster import Node
from orchestrator.domain.events import HistoryEntry, StepRecord
from orchestrator.domain.faults import FaultKind, FaultRequested
from orchestrator.domain.ids import JobId, NodeId
from orchestrator.domain.job import JobRecord
from orchestrator.domain.spec import JobSpec
from orchestrator.ports import Probed
from orchestrator.supervisor.acting import World
from orchestrator.supervisor.run import Supervisor

JOB = JobId("job-1")
_probed: dict[str, Probed] = {}


class OnceProber:
    """The real one, asked once about each job: what it says does not depend on how many steps there are."""

    async def probe(self, spec: JobSpec) -> Probed:
        if spec.checkpoint.restore_from:
            return await SubprocessProber().probe(spec)
        whose = replace(spec, train=replace(spec.train, steps=1))
        key = f"{os.environ.get('PYTHONPATH')} {codec.dumps(whose).decode()}"
        if key not in _probed:
            _probed[key] = await SubprocessProber().probe(spec)
        return _probed[key]


@dataclass
class Rig:
    """A control plane in this process and its nodes; what a user would see is gathered as it happens."""

    root: Path
    num_nodes: int
    num_devices: int
    kinds: tuple[str, ...] = ("A100",)
    """Of the nodes, over and over."""
    losses: dict[int, float] = field(default_factory=dict)
    passed_at: dict[int, float] = field(default_factory=dict)
    """When each step's vote passed, by its host's wall clock."""
    history: list[HistoryEntry] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.store = MemoryStore(time.time)
        kinds = [self.kinds[i % len(self.kinds)] for i in range(self.num_nodes)]
        self.cluster = LocalHosts(
            tuple(Node(id=NodeId(f"n{i}"), kind=kind, num_devices=self.num_devices) for i, kind in enumerate(kinds))
        )
        self.supervisor: asyncio.Task[None] | None = None

    def start_supervisor(self, holder: str = "first") -> None:
        world = World(
            store=self.store,
            cluster=self.cluster,
            provider=self.cluster,
            prober=OnceProber(),
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
                self.losses[entry.answer.step], self.passed_at[entry.answer.step] = entry.answer.loss, entry.at
                if asyncio.iscoroutine(doing := on_step(entry.answer.step)):
                    await doing
            elif isinstance(entry, HistoryEntry):
                self.history.append(entry)
                print(f"{entry.at % 1000:.2f}", entry.type, entry.message)
                if entry.type == "ended":
                    break
        return await self.store.get(JOB)

    async def kill_rank(self, rank: int) -> None:
        await self.store.command(FaultRequested(fault=FaultKind.KILL, job=JOB, rank=rank))


@contextlib.asynccontextmanager
async def a_rig(
    root: Path, num_nodes: int = 2, num_devices: int = 4, kinds: tuple[str, ...] = ("A100",)
) -> AsyncIterator[Rig]:
    """Each node costs the start of a process that imports torch: as few as the test needs, and two for mirrors apart."""
    rig = Rig(root, num_nodes, num_devices, kinds)
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
