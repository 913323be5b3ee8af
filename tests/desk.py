"""A desk in memory that a test plays: it keeps what the API asks, and the test says what happens to a job.

The smallest thing that honours ports.Desk; the store the supervisor shares is orchestrator/adapters.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace

from orchestrator.domain.cluster import Node
from orchestrator.domain.errors import Conflict, NotFound
from orchestrator.domain.events import Command, HistoryEntry, StepRecord
from orchestrator.domain.generation import Answer
from orchestrator.domain.ids import Device, Generation, JobId, NodeId, Step
from orchestrator.domain.job import JobRecord, JobState, Probing
from orchestrator.domain.plan import Pipeline, Plan, Stage
from orchestrator.domain.spec import DataSpec, JobSpec, TrainSpec
from orchestrator.jobs.status import status_of
from orchestrator.ports import Gap, Page

NOW = 1_790_000_000.0
Item = HistoryEntry | StepRecord | Gap


@dataclass
class PlayedDesk:
    """jobs in order of submission; every job's stream is one list whose ids are 1, 2, ..."""

    jobs: dict[JobId, JobRecord] = field(default_factory=dict)
    streams: dict[JobId, list[Item]] = field(default_factory=dict)
    commands: list[Command] = field(default_factory=list)
    keys: dict[str, tuple[JobId, str]] = field(default_factory=dict)
    known_nodes: tuple[Node, ...] = ()
    checks: dict[str, str] = field(default_factory=lambda: {"store": "ok"})
    broken: Exception | None = None
    """Raised by every call, once set."""
    readers: int = 0

    # --- what a test says --------------------------------------------------------------------------------------------

    def add(self, job: str = "job-1", **changes: object) -> JobRecord:
        record = JobRecord(id=JobId(job), spec=a_spec(), state=Probing(), created_at=NOW)
        self.jobs[record.id] = replace(record, **changes)  # type: ignore[arg-type]
        self.streams[record.id] = []
        return self.jobs[record.id]

    def become(self, job: str, state: JobState, type: str, message: str, **changes: object) -> None:
        """A new state and its entry in the history, at once."""
        record = replace(self.jobs[JobId(job)], state=state, **changes)  # type: ignore[arg-type]
        self.jobs[record.id] = record
        self.tell(job, type, message)

    def tell(self, job: str, type: str, message: str) -> None:
        record = self.jobs[JobId(job)]
        entry = HistoryEntry(
            job=record.id,
            at=NOW + len(self.streams[record.id]),
            type=type,
            message=message,
            status=status_of(record.state).value,
            generation=record.generation,
            step=record.committed,
        )
        self.streams[record.id].append(entry)

    def step(self, job: str, loss: float, seconds: float = 0.2, at: float | None = None) -> None:
        """The next step is committed."""
        record = self.jobs[JobId(job)]
        answer = Answer(step=Step(record.committed + 1), norm=1.5, losses=(loss, loss))
        self.jobs[record.id] = replace(record, committed=answer.step, last_answer=answer, typical_step_s=seconds)
        instant = NOW + answer.step if at is None else at
        taken = StepRecord(
            job=record.id, generation=record.generation, at=instant, answer=answer, tokens=1024, seconds=seconds
        )
        self.streams[record.id].append(taken)

    def forget(self, job: str, count: int) -> None:
        """The stream's cap has passed its first entries: a reader from before them is told of a gap."""
        stream = self.streams[JobId(job)]
        stream[:count] = [Gap(resumes_at=str(count + 1))] * count

    # --- ports.Desk --------------------------------------------------------------------------------------------------

    async def submit(self, job: JobId, spec: JobSpec, at: float, key: str | None, body_hash: str) -> tuple[JobId, bool]:
        self._check()
        if key is not None and key in self.keys:
            known, known_hash = self.keys[key]
            if known_hash != body_hash:
                raise Conflict(f"key {key!r} belongs to {known}")
            return known, False
        self.add(job, spec=spec, created_at=at)
        if key is not None:
            self.keys[key] = (job, body_hash)
        return job, True

    async def command(self, command: Command) -> str:
        self._check()
        self.commands.append(command)
        return str(len(self.commands))

    async def get(self, job: JobId) -> JobRecord:
        self._check()
        if job not in self.jobs:
            raise NotFound(f"job {job} does not exist")
        return self.jobs[job]

    async def list(self, limit: int, cursor: str | None) -> Page:
        self._check()
        newest = [*reversed(self.jobs.values())]
        start = int(cursor or 0)
        more = start + limit < len(newest)
        return Page(jobs=tuple(newest[start : start + limit]), next_cursor=str(start + limit) if more else None)

    async def nodes(self) -> tuple[Node, ...]:
        self._check()
        return self.known_nodes

    async def history(self, job: JobId, after: str, limit: int) -> Sequence[tuple[str, HistoryEntry | Gap]]:
        self._check()
        found = [(id, item) for id, item in self._after(job, after) if not isinstance(item, StepRecord)]
        return found[:limit]

    async def follow(self, job: JobId, after: str) -> AsyncIterator[tuple[str, Item]]:
        self.readers += 1
        try:
            while True:
                self._check()
                for id, item in self._after(job, after):
                    yield id, item
                    after = id
                await asyncio.sleep(0.01)
        finally:
            self.readers -= 1

    async def steps(self, job: JobId, after: str, limit: int) -> Sequence[tuple[str, StepRecord]]:
        self._check()
        found = [(id, item) for id, item in self._after(job, after) if isinstance(item, StepRecord)]
        return found[:limit]

    async def health(self) -> dict[str, str]:
        self._check()
        return self.checks

    def _after(self, job: JobId, after: str) -> list[tuple[str, Item]]:
        items = self.streams.get(job, [])[int(after) :]
        numbered = [(str(int(after) + index), item) for index, item in enumerate(items, start=1)]
        lost = [id for id, item in numbered if isinstance(item, Gap)]
        # However many entries are gone, the reader is told once.
        return [(id, item) for id, item in numbered if not isinstance(item, Gap) or id == lost[-1]]

    def _check(self) -> None:
        if self.broken is not None:
            raise self.broken


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
