"""The supervisor looks for finished jobs that are old enough for the archive; their logs go with them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from orchestrator.adapters.checkpoints import FolderCheckpoints
from orchestrator.adapters.local_hosts import LocalHosts
from orchestrator.adapters.memory import MemoryStore
from orchestrator.adapters.plan_thread import ThreadPlanner
from orchestrator.adapters.probe_process import SubprocessProber
from orchestrator.domain.attic import Retention, Retired
from orchestrator.domain.errors import Unavailable
from orchestrator.domain.ids import JobId, Term
from orchestrator.domain.job import JobRecord
from orchestrator.domain.state import Cancelled
from orchestrator.ports import Commit
from orchestrator.supervisor import run
from orchestrator.supervisor.acting import World
from orchestrator.supervisor.run import LeaseLost, Supervisor
from tests.builders import a_spec

OLD, NEW = JobId("job-old"), JobId("job-new")
KEPT = Retention(kept_s=100.0, kept_jobs=10, archived_s=1000.0)


class Clock:
    now = 10_000.0

    def __call__(self) -> float:
        return self.now


class Store(MemoryStore):
    """Out of reach the first time that it is asked. answers: what it said each time after that; an answer that is there has
    been acted on once the next one is."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.asked = 0
        self.answers: asyncio.Queue[Retired] = asyncio.Queue()

    async def retire(self, term: Term, now: float, retention: Retention) -> Retired:
        self.asked += 1
        if self.asked == 1:
            raise Unavailable("no answer")
        answer = await super().retire(term, now, retention)
        self.answers.put_nowait(answer)
        return answer

    async def retired(self) -> list[Retired]:
        """What it said until it had nothing more to say."""
        said = []
        async with asyncio.timeout(60.0):
            while (one := await self.answers.get()) != Retired():
                said.append(one)
        return said


async def two_that_have_ended(store: MemoryStore) -> Term:
    term = await store.acquire("before", 60.0)
    assert term is not None
    for job, at in ((OLD, 9_800.0), (NEW, 9_950.0)):
        await store.submit(job, a_spec(), 9_000.0, None, "")
        record = JobRecord(id=job, spec=a_spec(), state=Cancelled(at=at), created_at=9_000.0)
        ((cursor, _), *_) = reversed(await store.commands("0", 0.0))
        await store.commit(term, Commit(jobs={job: record}, cursor=cursor))
    return term


def a_supervisor(store: MemoryStore, root: Path, clock: Clock) -> Supervisor:
    cluster = LocalHosts(())
    world = World(
        store=store,
        cluster=cluster,
        provider=cluster,
        prober=SubprocessProber(),
        planner=ThreadPlanner(),
        checkpoints=FolderCheckpoints(str(root)),
    )
    return Supervisor(world=world, root=str(root), holder="this", clock=clock, retention=KEPT)


async def later(store: Store, wanted: Retired) -> None:
    """Once the clock has been moved."""
    while not (said := await store.retired()):
        pass
    assert said == [wanted]


def test_old_jobs_are_archived_with_their_logs_and_later_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "RETIRE_S", 0.02)
    monkeypatch.setattr(run, "RETRY_COMMIT_S", 0.02)
    logs = {job: tmp_path / "jobs" / job / "logs" for job in (OLD, NEW)}
    for folder in logs.values():
        folder.mkdir(parents=True)
        (folder / "rank-0.log").write_text("a line")

    async def both() -> None:
        clock = Clock()
        store = Store(clock)
        term = await two_that_have_ended(store)
        await store.release("before", term)
        serving = asyncio.create_task(a_supervisor(store, tmp_path, clock).serve())
        try:
            assert await store.retired() == [Retired(archived=(OLD,))] and store.asked > 1, "after no answer it asks again"
            assert not logs[OLD].exists() and logs[NEW].exists()
            assert (await store.get(OLD)).archived_at == clock.now and (await store.get(NEW)).archived_at is None
            clock.now += 60.0
            await later(store, Retired(archived=(NEW,)))
            assert not logs[NEW].exists()
            clock.now += 2000.0
            await later(store, Retired(forgotten=(OLD, NEW)))
            assert not (await store.list(10, None)).jobs
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)

    asyncio.run(both())


def test_one_that_holds_the_lease_no_longer_archives_nothing_and_stops(tmp_path: Path) -> None:
    async def both() -> None:
        store = MemoryStore(Clock())
        term = await two_that_have_ended(store)
        await store.release("before", term)
        supervisor = a_supervisor(store, tmp_path, Clock())
        supervisor._term = term
        assert await store.acquire("another", 60.0) is not None
        with pytest.raises(LeaseLost):
            await supervisor._retire_old()
        assert (await store.get(OLD)).archived_at is None

    asyncio.run(both())
