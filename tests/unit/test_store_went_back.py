"""A supervisor whose store has forgotten what it confirmed: it knows better, and writes all of it again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from copy import copy
from pathlib import Path

import pytest

from orchestrator.adapters.checkpoints import FolderCheckpoints
from orchestrator.adapters.local_hosts import LocalHosts
from orchestrator.adapters.memory import MemoryStore
from orchestrator.adapters.plan_thread import ThreadPlanner
from orchestrator.domain import codec
from orchestrator.domain.events import CancelRequested, HistoryEntry, PriorityRequested
from orchestrator.domain.host_events import Envelope
from orchestrator.domain.ids import EffectId, Generation, JobId, NodeId, Term
from orchestrator.domain.job import JobRecord
from orchestrator.domain.memo import Kept, Memo, Reign
from orchestrator.domain.requests import HostMessage
from orchestrator.domain.spec import JobSpec
from orchestrator.domain.state import Cancelled, Queued
from orchestrator.ports import Commit, HostUnreachable, Probed
from orchestrator.supervisor import run
from orchestrator.supervisor.acting import World
from orchestrator.supervisor.run import LeaseLost, Supervisor
from tests.builders import a_profile, a_spec

A, B, C = JobId("job-a"), JobId("job-b"), JobId("job-c")
NODE = NodeId("n0")


class Prober:
    async def probe(self, spec: JobSpec) -> Probed:
        return Probed(profile=a_profile())


class Store(MemoryStore):
    """One that can be restored from a copy. What it has confirmed to a supervisor is the supervisor's to remember."""

    KEPT = ("_news", "_confirmed", "_commands")
    """Commands too: ids of later ones are higher in any case."""

    def copied(self) -> dict[str, object]:
        def of(value: object) -> object:
            return copy(value) if isinstance(value, dict | set | list) else value

        return {name: of(value) for name, value in self.__dict__.items() if name not in self.KEPT}

    def restore(self, copied: dict[str, object]) -> None:
        self.__dict__.update(copied)
        self._streams = {}  # whose copies share their entries; nothing here rests on them
        self._wake()


@asynccontextmanager
async def supervised(tmp_path: Path, store: Store) -> AsyncIterator[asyncio.Task[None]]:
    serving = asyncio.create_task(a_supervisor(tmp_path, store).serve())
    try:
        yield serving
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


def a_supervisor(tmp_path: Path, store: Store, cluster: LocalHosts | None = None) -> Supervisor:
    cluster = cluster or LocalHosts(())
    world = World(
        store=store,
        cluster=cluster,
        provider=cluster,
        prober=Prober(),
        planner=ThreadPlanner(),
        checkpoints=FolderCheckpoints(str(tmp_path)),
    )
    return Supervisor(world=world, root=str(tmp_path), holder="this")


async def until(store: Store, job: JobId, type: str) -> HistoryEntry:
    """The first entry of a kind in what is left of a job's history."""
    async with asyncio.timeout(20.0):
        async for _, entry in store.follow(job, "0"):
            if isinstance(entry, HistoryEntry) and entry.type == type:
                return entry
    raise AssertionError


async def asked(store: Store, job: JobId, priority: int) -> None:
    await store.command(PriorityRequested(job=job, priority=priority))
    await until(store, job, "priority_changed")


def running(scenario: Callable[[Store], Coroutine[None, None, None]]) -> None:
    asyncio.run(scenario(Store(lambda: asyncio.get_running_loop().time())))


@pytest.mark.parametrize("terms", [0, 3])
def test_all_that_is_known_is_written_again_under_a_higher_term(tmp_path: Path, terms: int) -> None:
    """terms: by which the copy is older than this supervisor."""

    async def scenario(store: Store) -> None:
        async with supervised(tmp_path, store) as serving:
            await store.submit(A, a_spec(), 1.0, None, "")
            await until(store, A, "probed")
            await store.submit(C, a_spec(), 1.0, None, "")
            await until(store, C, "probed")
            backup = store.copied()
            await store.command(CancelRequested(job=C))
            await until(store, C, "ended")
            await store.submit(B, a_spec(), 2.0, None, "")
            await asked(store, A, 7)
            await until(store, B, "probed")
            before = store._term
            store.restore(backup)
            store._term = type(before)(before - terms)
            assert (await store.get(A)).priority != 7 and B not in store._jobs
            assert not isinstance((await store.get(C)).state, Cancelled)
            await asked(store, A, 8)
            told = await until(store, A, "store_went_back")
            assert "went back" in told.message and not serving.done()
            assert (await store.get(A)).priority == 8, "what was asked before the store knew of it again"
            assert (await store.get(B)).profile is not None, "a job that was submitted since"
            assert isinstance((await store.get(C)).state, Cancelled), "one that has ended since"
            assert store._term > before
            await asked(store, B, 2)

    running(scenario)


def test_where_nothing_is_to_be_written_the_lease_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "LEASE_S", 0.3)

    async def scenario(store: Store) -> None:
        async with supervised(tmp_path, store) as serving:
            await store.submit(A, a_spec(), 1.0, None, "")
            await until(store, A, "probed")
            before = store._term
            store._term = type(before)(before - 1)
            await until(store, A, "store_went_back")
            assert store._term > before and not serving.done()

    running(scenario)


def test_one_that_was_replaced_meanwhile_writes_nothing_and_stops(tmp_path: Path) -> None:
    async def scenario(store: Store) -> None:
        async with supervised(tmp_path, store) as serving:
            await store.submit(A, a_spec(), 1.0, None, "")
            await until(store, A, "probed")
            before = store._term
            store._lease = None
            assert await store.acquire("another", 60.0) is not None
            store._term = before  # in the store that went back this is the other's
            store._commits -= 1
            record = await store.get(A)
            await store.command(PriorityRequested(job=A, priority=7))
            with pytest.raises(BaseExceptionGroup) as ended:
                async with asyncio.timeout(60.0):
                    await asyncio.shield(serving)
            assert ended.group_contains(LeaseLost)
            assert await store.get(A) == record and store._term == before

    running(scenario)


def test_one_whose_hosts_obey_a_later_supervisor_does_not_take_the_store_for_its_own(tmp_path: Path) -> None:
    """It slept, was replaced, and woke up in a store that knows of neither."""

    async def scenario(store: Store) -> None:
        term = await store.acquire("this", 60.0)
        assert term is not None
        supervisor = a_supervisor(tmp_path, store)
        supervisor._term = term
        supervisor._replaced.set()
        store._term = type(term)(term - 1)
        with pytest.raises(LeaseLost, match="later supervisor"):
            await supervisor._write(Commit(cursor="1"))
        assert store._term == term - 1 and not store._jobs

    running(scenario)


class Silent(LocalHosts):
    """One host that answers nobody at first, and remembers more of job A than the store."""

    def __init__(self) -> None:
        super().__init__(())
        self.is_silent, self.has_refused = True, asyncio.Event()
        self.asked: list[object] = []
        """Whatever the host was asked for, polls included."""

    async def hosts(self) -> tuple[tuple[JobId, NodeId], ...]:
        return ((A, NODE),)

    async def ask(self, job: JobId, node: NodeId) -> Kept:
        if self.is_silent:
            self.has_refused.set()
            raise HostUnreachable("nobody answers")
        record = JobRecord(id=A, spec=a_spec(), state=Queued(reason="test"), created_at=1.0, hosts=frozenset({NODE}))
        reign = Reign(term=Term(3), by="forgotten", commits=10, at=5.0)
        memo = Memo(reigns=(reign,), commits=40, record=record.changed({"generation": Generation(9)}))
        return Kept(job=A, node=NODE, term=Term(3), memo=memo)

    async def poll(
        self, job: JobId, node: NodeId, term: Term, after: int, acked: int, wait_s: float, memo: str = ""
    ) -> tuple[Envelope, ...]:
        self.asked.append((term, codec.loads(Memo, memo.encode()).record if memo else None))
        await asyncio.sleep(wait_s)
        return ()

    async def call(
        self, job: JobId, node: NodeId, term: Term, effect: EffectId, request: HostMessage, memo: str = ""
    ) -> None:
        self.asked.append(request)


def test_host_that_answers_late_and_remembers_more_has_its_supervisor_begin_anew(tmp_path: Path) -> None:
    async def scenario(store: Store) -> None:
        term = await store.acquire("this", 60.0)
        assert term is not None
        known = JobRecord(id=A, spec=a_spec(), state=Queued(reason="test"), created_at=1.0, hosts=frozenset({NODE}))
        await store.commit(term, Commit(jobs={A: known}))
        cluster = Silent()
        first = asyncio.create_task(a_supervisor(tmp_path, store, cluster).serve())
        await cluster.has_refused.wait()  # when the supervisor began
        cluster.is_silent = False
        with pytest.raises(BaseExceptionGroup) as ended:
            async with asyncio.timeout(60.0):
                await first
        assert ended.group_contains(LeaseLost, match="begins with them")
        assert not cluster.asked, "of a host that remembers more nothing is asked"
        second = asyncio.create_task(a_supervisor(tmp_path, store, cluster).serve())
        await until(store, A, "store_went_back")
        assert (await store.get(A)).generation == 9 and store._term > 3
        assert "forgotten" in [one.by for one in store._reigns], "what led there is known again"
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)

    running(scenario)
