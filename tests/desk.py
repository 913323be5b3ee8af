"""The in-memory store with a test in the supervisor's chair: the API asks, and the test says what happens to a job.

The store lives on the server's event loop once it is attached; a test calls from its own thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from orchestrator.adapters.memory import MemoryStore
from orchestrator.domain.cluster import Node
from orchestrator.domain.events import Command, HistoryEntry, JobSubmitted, StepRecord
from orchestrator.domain.generation import Answer
from orchestrator.domain.ids import Device, Generation, JobId, NodeId, Step
from orchestrator.domain.job import JobRecord
from orchestrator.domain.plan import Pipeline, Plan, Stage
from orchestrator.domain.spec import DataSpec, JobSpec, TrainSpec
from orchestrator.domain.state import JobState, Probing
from orchestrator.domain.status import status_of
from orchestrator.ports import Commit, Gap, Page, Sort

NOW = 1_790_000_000.0
T = TypeVar("T")


class PlayedDesk(MemoryStore):
    """A MemoryStore; checks and broken stand in for a store in trouble."""

    def __init__(self, **caps: int) -> None:
        super().__init__(time.time, **caps)
        self.loop: asyncio.AbstractEventLoop | None = None
        self.checks = {"store": "ok"}
        self.broken: Exception | None = None
        self.readers = 0
        term = self.now(self.acquire("test", 3600))
        assert term is not None
        self._test_term = term

    def now(self, call: Coroutine[Any, Any, T]) -> T:
        """Do it where the store lives, and wait."""
        if self.loop is None or not self.loop.is_running():
            return asyncio.run(call)
        return asyncio.run_coroutine_threadsafe(call, self.loop).result(30)

    # --- what a test says --------------------------------------------------------------------------------------------

    def write(self, **commit: Any) -> None:
        self.now(self.commit(self._test_term, Commit(**commit)))

    def set_nodes(self, *nodes: Node) -> None:
        self.write(nodes=nodes)

    def add(self, job: str = "job-1", **changes: Any) -> None:
        record = JobRecord(id=JobId(job), spec=a_spec(), state=Probing(), created_at=NOW)
        self.change(record, **changes)

    def record(self, job: str) -> JobRecord:
        return self.now(MemoryStore.get(self, JobId(job)))

    def change(self, record: JobRecord, **changes: Any) -> None:
        self.write(jobs={record.id: replace(record, **changes)})

    def become(self, job: str, state: JobState, type: str, message: str, **changes: Any) -> None:
        """A new state and its entry in the history, at once."""
        record = replace(self.record(job), state=state, **changes)
        self.write(jobs={record.id: record}, history=(_entry(record, type, message),))

    def tell(self, job: str, type: str, message: str, **data: object) -> None:
        self.write(history=(replace(_entry(self.record(job), type, message), data=data),))

    def step(
        self, job: str, loss: float, seconds: float = 0.2, at: float = NOW, busy: Mapping[Device, float] | None = None
    ) -> None:
        """The next step is committed."""
        record = self.record(job)
        answer = Answer(step=Step(record.committed + 1), norm=1.5, losses=(loss, loss))
        known = {"answer": answer, "tokens": 1024, "seconds": seconds, "busy": busy or {}}
        taken = StepRecord(job=record.id, generation=record.generation, at=at, **known)  # type: ignore[arg-type]
        known = replace(record, committed=answer.step, last_answer=answer, typical_step_s=seconds)
        self.write(jobs={record.id: known}, steps=(taken,))

    def take_up(self) -> None:
        """All that was asked is answered; what it changes a test says."""
        self.write(cursor=self.now(self.commands("0", 0))[-1][0])

    @property
    def asked(self) -> Sequence[Command]:
        """Commands so far, submissions apart."""
        return [command for _, command in self.now(self.commands("0", 0)) if not isinstance(command, JobSubmitted)]

    @property
    def job_ids(self) -> list[str]:
        return [record.id for record in self.now(MemoryStore.list(self, 1000, None)).jobs]

    # --- a desk in trouble, and how many read it ------------------------------------------------------------------------

    async def get(self, job: JobId) -> JobRecord:
        self._check()
        return await super().get(job)

    async def list(self, limit: int, cursor: str | None, sort: Sort = Sort.NEWEST) -> Page:
        self._check()
        return await super().list(limit, cursor, sort)

    async def health(self) -> dict[str, str]:
        return self.checks

    async def follow(self, job: JobId, after: str) -> AsyncIterator[tuple[str, HistoryEntry | StepRecord | Gap]]:
        self.readers += 1
        try:
            async for item in super().follow(job, after):
                yield item
        finally:
            self.readers -= 1

    def _check(self) -> None:
        if self.broken is not None:
            raise self.broken


def _entry(record: JobRecord, type: str, message: str) -> HistoryEntry:
    return HistoryEntry(
        job=record.id,
        at=NOW,
        type=type,
        message=message,
        status=status_of(record.state).value,
        generation=record.generation,
        step=record.committed,
    )


def a_spec(name: str = "byte-gpt", steps: int = 100) -> JobSpec:
    train = TrainSpec(steps=steps, micro_batches=4, micro_batch_size=2, sequence=64)
    return JobSpec(name=name, program="causal_lm", data=DataSpec(files=("{stdlib}",)), train=train, model={"kind": "tiny"})


def a_plan(nodes: Sequence[str] = ("node-1", "node-2", "node-3", "node-4")) -> Plan:
    """tp2 x pp2, one pipeline per two nodes of two devices."""
    per = [tuple(Device(NodeId(name), index) for index in range(2)) for name in nodes]
    pipelines = tuple(
        Pipeline(
            stages=(Stage(first=0, last=3, devices=per[i]), Stage(first=3, last=6, devices=per[i + 1])),
            micro_batches=tuple(range(i // 2, 4, len(nodes) // 2)),
        )
        for i in range(0, len(nodes), 2)
    )
    return Plan(pipelines=pipelines, reason="all four nodes are used")


def first_generation(plan: Plan) -> dict[str, object]:
    """What a record carries once generation 1 runs on `plan`."""
    pids = {device: 4000 + index for index, device in enumerate(plan.devices)}
    return {"generation": Generation(1), "plans": {Generation(1): plan}, "pids": pids, "started_at": NOW + 1}
