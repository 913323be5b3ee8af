"""What a store promises, on each of its kinds: in memory, on the redis-server in PATH, on the one inside the wheel."""

from __future__ import annotations

import asyncio
import random
import shutil
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar

import pytest

from orchestrator.adapters.embedded_redis import EmbeddedRedis, bundled_server
from orchestrator.adapters.memory import MemoryStore
from orchestrator.adapters.redis_desk import RedisDesk
from orchestrator.adapters.redis_store import RedisStore
from orchestrator.domain.access import Submitter
from orchestrator.domain.attic import Retention, Retired
from orchestrator.domain.cluster import Node
from orchestrator.domain.cordon import Cordon
from orchestrator.domain.errors import Conflict, NotFound, Outdated, Refused, StaleTerm, Unavailable, WentBack
from orchestrator.domain.events import CancelRequested, HistoryEntry, JobSubmitted, ResizeRequested, StepRecord
from orchestrator.domain.generation import Answer
from orchestrator.domain.ids import Device, Generation, JobId, NodeId, Step, Term
from orchestrator.domain.job import JobRecord
from orchestrator.domain.memo import MAX_REIGNS, Reign
from orchestrator.domain.quarantine import Quarantine, Standing
from orchestrator.domain.queue import Project, Waiting, WaitReason
from orchestrator.domain.size import Size
from orchestrator.domain.spec import DataSpec, JobSpec, TrainSpec
from orchestrator.domain.state import Probing, Queued, Succeeded
from orchestrator.ports import Commit, Desk, Gap, Sort, StateStore
from tests.admitted import ADMISSIONS

pytestmark = pytest.mark.timeout(120)
T = TypeVar("T")
CAP = 100
SPEC = JobSpec(
    name="tiny",
    program="causal_lm",
    data=DataSpec(files=("{stdlib}",)),
    train=TrainSpec(steps=5, micro_batches=4, micro_batch_size=1, sequence=16),
)
A, B, C = JobId("job-a"), JobId("job-b"), JobId("job-c")


@dataclass
class Kind:
    """A kind of store, and its clock, which only goes when it is told to (Redis has its own)."""

    redis: EmbeddedRedis | None
    memory: MemoryStore | None = None
    now: float = 1000.0
    opened: list[RedisStore | RedisDesk] = field(default_factory=list)

    def open(self, timeout_s: float = 20.0) -> tuple[StateStore, Desk]:
        if self.redis is None:
            self.memory = self.memory or MemoryStore(lambda: self.now, history_cap=CAP, steps_cap=CAP)
            return self.memory, self.memory
        store = RedisStore(self.redis.address, timeout_s=timeout_s, history_cap=CAP, steps_cap=CAP)
        desk = RedisDesk(self.redis.address, timeout_s=timeout_s, history_cap=CAP)
        self.opened += [store, desk]
        return store, desk

    async def let_pass(self, seconds: float) -> None:
        if self.redis is None:
            self.now += seconds
        else:
            await asyncio.sleep(seconds)

    async def close(self) -> None:
        for one in self.opened:
            await one.close()
        self.opened.clear()


def servers() -> dict[str, str]:
    found = {"path": shutil.which("redis-server"), "bundled": bundled_server()}
    return {name: binary for name, binary in found.items() if binary}


@pytest.fixture(scope="module", params=["memory", "path", "bundled"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis | None]:
    if request.param == "memory":
        yield None
        return
    if request.param not in servers():
        pytest.skip(f"no redis-server of kind {request.param} here")
    redis = EmbeddedRedis(tmp_path_factory.mktemp(request.param), servers()[request.param])
    redis.start()
    yield redis
    redis.stop()


@pytest.fixture
def kind(server: EmbeddedRedis | None) -> Kind:
    return Kind(server)


@pytest.fixture
def durable(kind: Kind) -> Kind:
    if kind.redis is None:
        pytest.skip("the memory store keeps nothing")
    return kind


def running(test: Callable[[Kind], Awaitable[None]]) -> Callable[[Kind], None]:
    """Each test on a loop of its own and an empty store."""

    def run(kind: Kind) -> None:
        async def whole() -> None:
            await empty(kind)
            try:
                await test(kind)
            finally:
                await kind.close()

        asyncio.run(whole())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


async def empty(kind: Kind) -> None:
    if kind.redis is not None:
        store = RedisStore(kind.redis.address)
        await store._clients.writes.flushall()
        await store.close()


def a_job(id: JobId = A, **changes: object) -> JobRecord:
    return replace(JobRecord(id=id, spec=SPEC, state=Queued(reason="waits"), created_at=1.0), **changes)  # type: ignore[arg-type]


def entry(at: float, type: str = "note", job: JobId = A) -> HistoryEntry:
    return HistoryEntry(job=job, at=at, type=type, message=f"at {at:g}", status="RUNNING", data={"at": at})


def passed(step: int, at: float, job: JobId = A) -> StepRecord:
    answer = Answer(step=Step(step), norm=0.1, losses=(1.5, 1.25))
    return StepRecord(job=job, generation=Generation(1), at=at, answer=answer, tokens=64)


async def take(desk: Desk, job: JobId, after: str, count: int, within_s: float = 60.0) -> list[tuple[str, object]]:
    found: list[tuple[str, object]] = []
    async with asyncio.timeout(within_s), aclosing(desk.follow(job, after)) as items:  # type: ignore[type-var]
        async for item in items:
            found.append(item)
            if len(found) == count:
                break
    return found


async def held(store: StateStore, holder: str = "one") -> Term:
    term = await store.acquire(holder, 30)
    assert term is not None
    return term


# --- lease ----------------------------------------------------------------------------------------------------------------


@running
async def test_lease_is_held_by_one_and_its_terms_grow(kind: Kind) -> None:
    store, _ = kind.open()
    first = await store.acquire("one", 30)
    assert first is not None
    assert await store.acquire("two", 30) is None
    assert await store.renew("one", first, 0.2)
    await kind.let_pass(0.4)
    second = await store.acquire("two", 30)
    assert second is not None and second > first
    assert not await store.renew("one", first, 30)
    await store.release("one", first)  # of no effect: it is another's
    assert await store.acquire("three", 30) is None
    await store.release("two", second)
    third = await store.acquire("three", 30)
    assert third is not None and third > second


@running
async def test_same_holder_takes_its_lease_again_with_a_higher_term(kind: Kind) -> None:
    store, _ = kind.open()
    first, second = await store.acquire("one", 30), await store.acquire("one", 30)
    assert first is not None and second is not None and second > first


@running
async def test_lease_that_ran_out_unclaimed_can_be_renewed(kind: Kind) -> None:
    store, _ = kind.open()
    term = await store.acquire("one", 0.2)
    assert term is not None
    await kind.let_pass(0.4)
    assert await store.renew("one", term, 30)
    assert await store.acquire("two", 30) is None


@running
async def test_who_holds_the_lease_may_raise_its_term_above_what_hosts_have_heard(kind: Kind) -> None:
    store, _ = kind.open()
    term = await held(store)
    assert await store.commit(term, Commit(jobs={A: a_job()})) == 1
    assert await store.overtake("two", term, Term(40), 30) is None, "another holds it"
    assert await store.overtake("one", Term(term - 1), Term(40), 30) is None, "that term was replaced"
    raised = await store.overtake("one", term, Term(40), 30)
    assert raised is not None and raised > 40
    assert (await store.load()).commits == 1
    with pytest.raises(StaleTerm):
        await store.commit(term, Commit(jobs={A: a_job(committed=Step(1))}))
    assert await store.commit(raised, Commit(jobs={A: a_job(committed=Step(2))})) == 2
    again = await store.overtake("one", raised, Term(3), 30)
    assert again is not None and again > raised, "terms grow, whatever hosts have heard"


@running
async def test_store_remembers_whose_reign_began_after_which_commit(kind: Kind) -> None:
    store, _ = kind.open()
    first = await store.acquire("one", 30, by="one a", at=1.5)
    assert first is not None
    await store.commit(first, Commit(jobs={A: a_job()}))
    second = await store.acquire("one", 30, by="one b", at=2.25)
    assert second is not None
    begun = (
        Reign(term=first, by="one a", commits=0, at=1.5),
        Reign(term=second, by="one b", commits=1, at=2.25),
    )
    assert (await store.load()).reigns == begun
    forgotten = Reign(term=Term(30), by="one of which the store knows nothing", commits=70, at=2.0)
    raised = await store.overtake("one", second, Term(40), 30)
    assert raised is not None and (await store.load()).reigns == begun, "until what led there is written too"
    led = (*begun, forgotten, Reign(term=raised, by="one c", commits=90, at=3.0))
    assert await store.commit(raised, Commit(jobs={A: a_job(committed=Step(5))}, reigns=led)) == 91
    loaded = await store.load()
    assert (loaded.reigns, loaded.commits) == (led, 91)
    for number in range(2 * MAX_REIGNS):
        await store.acquire("one", 30, by=f"{number}")
    reigns = (await store.load()).reigns
    assert [one.by for one in reigns] == [str(number) for number in range(MAX_REIGNS, 2 * MAX_REIGNS)]


@running
async def test_store_says_which_jobs_are_over(kind: Kind) -> None:
    store, _ = kind.open()
    term = await held(store)
    await store.commit(term, Commit(jobs={A: a_job(), B: replace(a_job(), id=B, state=Succeeded(at=2.0))}))
    assert await store.over([A, B, JobId("unheard-of")]) == {B}
    assert await store.over([]) == frozenset()


# --- commits --------------------------------------------------------------------------------------------------------------


@running
async def test_admissions_are_kept_until_others_are_committed(kind: Kind) -> None:
    store, desk = kind.open()
    term = await held(store)
    assert (await desk.admissions(), (await store.load()).admissions) == ((), ())
    await store.commit(term, Commit(admissions=ADMISSIONS))
    await store.commit(term, Commit(jobs={A: a_job()}))
    assert await desk.admissions() == (await store.load()).admissions == ADMISSIONS
    await store.commit(term, Commit(admissions=()))
    assert await desk.admissions() == ()


@running
async def test_cordons_are_kept_until_others_are_committed(kind: Kind) -> None:
    store, desk = kind.open()
    term = await held(store)
    assert (await desk.cordons(), (await store.load()).cordons) == ((), ())
    found = (Cordon(node=NodeId("n-1"), since=2.0), Cordon(node=NodeId("n-2"), since=3.0, drains=True, deadline=9.0))
    await store.commit(term, Commit(cordons=found))
    await store.commit(term, Commit(jobs={A: a_job()}))
    assert await desk.cordons() == (await store.load()).cordons == found
    await store.commit(term, Commit(cordons=()))
    assert await desk.cordons() == ()


@running
async def test_quotas_and_the_queue_are_kept_until_others_are_committed(kind: Kind) -> None:
    store, desk = kind.open()
    term = await held(store)
    assert (await desk.projects(), (await store.load()).projects, await desk.queue()) == ((), (), ())
    quotas = (Project(name="vision", max_devices=8), Project(name="speech"))
    line = (Waiting(job=A, position=1, reason=WaitReason.BUSY, message="waits for 2 more A100", least=4, since=2.0),)
    await store.commit(term, Commit(projects=quotas, queue=line))
    await store.commit(term, Commit(jobs={A: a_job()}))
    assert await desk.projects() == (await store.load()).projects == quotas and await desk.queue() == line
    await store.commit(term, Commit(queue=()))
    assert await desk.queue() == () and await desk.projects() == quotas


@running
async def test_finished_jobs_are_archived_then_forgotten_and_no_others(kind: Kind) -> None:
    store, desk = kind.open()
    term = await held(store)
    over = {JobId(f"job-{n}"): replace(a_job(), id=JobId(f"job-{n}"), state=Succeeded(at=100.0 * n)) for n in (1, 2, 3)}
    await store.commit(term, Commit(jobs={A: a_job(), **over}, history=tuple(replace(entry(1), job=job) for job in over)))
    kept = Retention(kept_s=150.0, kept_jobs=2, archived_s=1000.0)
    retired = await store.retire(term, 301.0, kept)
    assert retired == Retired(archived=(JobId("job-1"),)), "the oldest of three, where two are kept"
    one, two = await desk.get(JobId("job-1")), await desk.get(JobId("job-2"))
    assert one.archived_at == 301.0 and one.state == Succeeded(at=100.0) and two.archived_at is None
    assert not await desk.history(one.id, "0", 10) and len(await desk.history(two.id, "0", 10)) == 1
    assert [record.id for record in (await desk.list(10, None)).jobs].count(one.id) == 1, "a listing has it still"
    assert await store.retire(term, 301.0, kept) == Retired(), "once"
    assert await store.retire(term, 360.0, kept) == Retired(archived=(JobId("job-2"),)), "its time has passed"
    assert (await store.retire(term, 1150.0, replace(kept, kept_s=5000.0))).forgotten == (JobId("job-1"),)
    with pytest.raises(NotFound):
        await desk.get(JobId("job-1"))
    assert {record.id for record in (await desk.list(10, None)).jobs} == {A, JobId("job-2"), JobId("job-3")}
    assert A in (await store.load()).jobs
    with pytest.raises(StaleTerm):
        await store.retire(Term(term - 1), 1150.0, kept)


@running
async def test_quarantine_is_kept_until_another_one_is_committed(kind: Kind) -> None:
    store, desk = kind.open()
    term = await held(store)
    assert (await desk.quarantine(), (await store.load()).quarantine) == ((), ())
    first = Quarantine(device=Device(NodeId("n-1"), 0), reason="differs", since=2.0, job=A, tester=A)
    second = replace(first, device=Device(NodeId("n-2"), 1), strikes=2, standing=Standing.HELD)
    await store.commit(term, Commit(history=(entry(1),), quarantine=(first, second)))
    await store.commit(term, Commit(jobs={A: a_job()}, history=(entry(2), entry(3))))
    assert await desk.quarantine() == (first, second)
    assert (await store.load()).quarantine == (first, second)
    await store.commit(term, Commit(quarantine=()))
    assert await desk.quarantine() == ()
    assert [item.at for _, item in await desk.history(A, "0", 10) if isinstance(item, HistoryEntry)] == [1, 2, 3]


@running
async def test_commit_is_loaded_and_read_back_equal(kind: Kind) -> None:
    store, desk = kind.open()
    term = await held(store)
    nodes = (Node(id=NodeId("n-1"), kind="H100", num_devices=2),)
    record = a_job()
    await store.commit(term, Commit(jobs={A: record}, history=(entry(2),), steps=(passed(1, 3),), nodes=nodes, cursor="7"))
    loaded = await store.load()
    assert loaded.jobs == {A: record} and loaded.cursor == "7"
    assert await desk.get(A) == record
    assert await desk.nodes() == nodes
    assert await desk.history(A, "0", 10) == [("1", entry(2))]
    assert await desk.steps(A, "0", 10) == [("2", passed(1, 3))]


@running
async def test_stale_term_is_refused_whole(kind: Kind) -> None:
    store, desk = kind.open()
    old = await held(store)
    await store.commit(old, Commit(jobs={A: a_job()}))
    await store.release("one", old)
    await held(store, "two")
    late = Commit(jobs={A: a_job(committed=Step(9)), B: a_job(B)}, history=(entry(5),), cursor="9", nodes=())
    with pytest.raises(StaleTerm):
        await store.commit(old, late)
    assert await desk.get(A) == a_job()
    assert await desk.history(A, "0", 10) == []
    assert (await store.load()).cursor != "9"
    with pytest.raises(NotFound):
        await desk.get(B)


@running
async def test_terminal_is_final_and_the_commit_is_refused_whole(kind: Kind) -> None:
    store, desk = kind.open()
    term = await held(store)
    over = a_job(state=Succeeded(at=5.0))
    await store.commit(term, Commit(jobs={A: over, B: a_job(B)}))
    assert set((await store.load()).jobs) == {B}
    with pytest.raises(Conflict):
        await store.commit(term, Commit(jobs={B: a_job(B, committed=Step(3)), A: a_job()}, history=(entry(6, job=B),)))
    assert await desk.get(A) == over
    assert await desk.get(B) == a_job(B)
    assert await desk.history(B, "0", 10) == []
    await store.commit(term, Commit(jobs={B: a_job(B, committed=Step(4))}))
    assert (await desk.get(B)).committed == 4


@running
async def test_equal_commits_one_after_another_both_count(kind: Kind) -> None:
    store, desk = kind.open()
    term = await held(store)
    for _ in range(3):
        await store.commit(term, Commit(history=(entry(1),)))
    assert len(await desk.history(A, "0", 10)) == 3


# --- submissions and commands ---------------------------------------------------------------------------------------------


@running
async def test_submission_is_a_record_a_command_and_a_line_of_history(kind: Kind) -> None:
    store, desk = kind.open()
    assert await desk.submit(A, SPEC, 10.0, None, "body") == (A, True)
    assert (await desk.get(A)).state == Probing()
    (_, first), *rest = await desk.history(A, "0", 10)
    assert isinstance(first, HistoryEntry) and first.type == "submitted" and rest == []
    ((id, command),) = await store.commands("0", 1.0)
    assert command == JobSubmitted(job=A, spec=SPEC, at=10.0)
    assert (await store.load()).jobs == {}, "it comes by its command, and only by that"
    term = await held(store)
    await store.commit(term, Commit(jobs={A: a_job()}, cursor=id))
    assert set((await store.load()).jobs) == {A}
    assert await store.commands((await store.load()).cursor, 0) == []


@running
async def test_idempotency_key_answers_with_the_first_job(kind: Kind) -> None:
    store, desk = kind.open()
    assert await desk.submit(A, SPEC, 10.0, "key", "body") == (A, True)
    assert await desk.submit(B, SPEC, 11.0, "key", "body") == (A, False)
    with pytest.raises(Conflict):
        await desk.submit(C, SPEC, 12.0, "key", "another body")
    assert await desk.submit(C, SPEC, 13.0, "another key", "body") == (C, True)
    assert [job.id for job in (await desk.list(10, None)).jobs] == [C, A]
    assert len(await store.commands("0", 0)) == 2
    for beside in (":ids", ":history"):
        with pytest.raises(NotFound):
            await desk.get(JobId(f"{A}{beside}"))


@running
async def test_a_revision_counts_what_is_asked_and_what_is_decided_on_and_no_steps(kind: Kind) -> None:
    store, desk = kind.open()
    assert await desk.revision(A) == 0
    await desk.submit(A, SPEC, 10.0, None, "body")
    term = await held(store)
    await store.commit(term, Commit(jobs={A: a_job()}))
    begun = await desk.revision(A)
    assert begun > 0
    await store.commit(term, Commit(jobs={A: a_job(committed=Step(3))}))
    assert await desk.revision(A) == begun, "a step is nothing that anybody decides on"
    await store.commit(term, Commit(jobs={A: a_job(size=Size(target=2))}))
    await desk.command(CancelRequested(job=B))
    assert await desk.revision(A) == begun + 1
    await desk.command(CancelRequested(job=A), begun + 1)
    assert await desk.revision(A) == begun + 1, "nobody has answered yet, and the record looks as before"
    with pytest.raises(Outdated):
        await desk.command(CancelRequested(job=A), begun + 1)
    await store.commit(term, Commit(cursor=(await store.commands("0", 0))[-1][0]))
    assert await desk.revision(A) == begun + 2
    await desk.command(CancelRequested(job=A), begun + 2)


@running
async def test_of_commands_that_rest_on_one_revision_one_is_written_and_the_others_change_nothing(kind: Kind) -> None:
    store, desk = kind.open()
    await desk.submit(A, SPEC, 10.0, None, "body")
    seen, cursor = await desk.revision(A), (await store.commands("0", 0))[-1][0]
    wanted = [ResizeRequested(job=A, size=Size(target=number)) for number in range(1, 21)]
    answers = await asyncio.gather(*(desk.command(one, seen) for one in wanted), return_exceptions=True)
    assert sorted(isinstance(one, Outdated) for one in answers) == [False] + [True] * 19
    refusal = next(one for one in answers if isinstance(one, Outdated))
    assert str(refusal).startswith(f"job-a is at revision {seen + 1} and this was asked for revision {seen}")
    ((asked, written),) = await store.commands(cursor, 0)
    assert written == wanted[[isinstance(one, str) for one in answers].index(True)]
    await store.commit(await held(store), Commit(cursor=asked))
    assert await desk.revision(A) == seen + 1


@running
async def test_commands_come_in_order_and_wake_whoever_waits(kind: Kind) -> None:
    store, desk = kind.open()
    assert await store.commands("0", 0) == []
    waiting = asyncio.create_task(store.commands("0", 60.0))
    await asyncio.sleep(0.1)
    first = await desk.command(CancelRequested(job=A))
    assert await waiting == [(first, CancelRequested(job=A))]
    second = await desk.command(CancelRequested(job=B))
    assert [id for id, _ in await store.commands("0", 0)] == [first, second]
    assert [id for id, _ in await store.commands(first, 0)] == [second]
    before = time.monotonic()
    assert await store.commands(second, 0.3) == []
    assert time.monotonic() - before > 0.25


@running
async def test_list_is_newest_first_and_pages_hold_still_while_jobs_arrive(kind: Kind) -> None:
    _, desk = kind.open()
    ids = [JobId(f"job-{n}") for n in range(5)]
    for n, id in enumerate(ids):
        await desk.submit(id, SPEC, float(n), None, "body")
    first = await desk.list(2, None)
    assert [job.id for job in first.jobs] == [ids[4], ids[3]]
    await desk.submit(A, SPEC, 9.0, None, "body")
    second = await desk.list(2, first.next_cursor)
    third = await desk.list(2, second.next_cursor)
    assert [job.id for job in second.jobs + third.jobs] == [ids[2], ids[1], ids[0]]
    assert third.next_cursor is None
    assert [job.id for job in (await desk.list(3, None, Sort.OLDEST)).jobs] == ids[:3]
    oldest = await desk.list(3, None, Sort.OLDEST)
    assert [job.id for job in (await desk.list(3, oldest.next_cursor, Sort.OLDEST)).jobs] == [*ids[3:], A]
    assert await desk.count() == 6
    for sort in Sort:
        with pytest.raises(Refused):
            await desk.list(2, "no such place", sort)


@running
async def test_list_by_end_holds_still_while_jobs_end_and_are_archived_also_those_of_one_instant(kind: Kind) -> None:
    store, desk = kind.open()
    term = await held(store)
    ends = {JobId(f"job-{n}"): 100.0 + n // 3 for n in range(9)}  # three at each of three instants
    jobs = {job: replace(a_job(), id=job, state=Succeeded(at=at)) for job, at in ends.items()}
    await store.commit(term, Commit(jobs={A: a_job(), **jobs}))
    wanted = sorted(ends, key=lambda job: (ends[job], job))
    for sort, order in ((Sort.FIRST_FINISHED, wanted), (Sort.LAST_FINISHED, wanted[::-1])):
        for limit in (1, 2, 4, 9, 20):
            found: list[JobId] = []
            cursor = None
            while True:
                page = await desk.list(limit, cursor, sort)
                found += [job.id for job in page.jobs]
                cursor = page.next_cursor
                if cursor is None:
                    break
            assert found == order, f"{sort} in pages of {limit}"
    first = await desk.list(4, None, Sort.LAST_FINISHED)
    late = JobId("job-late")
    await store.commit(term, Commit(jobs={late: replace(a_job(), id=late, state=Succeeded(at=200.0))}))
    await store.retire(term, 300.0, Retention(kept_s=199.5, kept_jobs=100, archived_s=1000.0))
    rest = await desk.list(20, first.next_cursor, Sort.LAST_FINISHED)
    assert [job.id for job in first.jobs + rest.jobs] == wanted[::-1] and rest.next_cursor is None
    assert {job.archived_at for job in rest.jobs} == {None, 300.0}


@running
async def test_a_job_keeps_who_submitted_it_also_in_the_archive(kind: Kind) -> None:
    store, desk = kind.open()
    term, by = await held(store), Submitter(id="tok-1", name="ci")
    await desk.submit(A, SPEC, 10.0, None, "body", by)
    ((id, command),) = await store.commands("0", 1.0)
    assert command == JobSubmitted(job=A, spec=SPEC, at=10.0, by=by) and (await desk.get(A)).by == by
    await store.commit(term, Commit(jobs={A: replace(a_job(), by=by, state=Succeeded(at=1.0))}, cursor=id))
    await store.retire(term, 300.0, Retention(kept_s=1.0))
    archived = await desk.get(A)
    assert archived.archived_at == 300.0 and archived.by == by


@running
async def test_calls_that_are_given_up_at_any_moment_leave_no_answer_to_another(kind: Kind) -> None:
    store, desk = kind.open()
    term = await held(store)
    names = [f"whose-{number}" for number in range(8)]
    jobs = {JobId(name): replace(a_job(JobId(name)), spec=replace(SPEC, name=name)) for name in names}
    await store.commit(term, Commit(jobs=jobs))
    chance, got = random.Random(7), 0

    async def ask(job: JobId) -> None:
        nonlocal got
        assert (await desk.get(job)).spec.name == job
        got += 1

    for _ in range(100):
        asking = [asyncio.ensure_future(ask(chance.choice(list(jobs)))) for _ in range(10)]
        for _ in range(chance.randrange(4)):
            await asyncio.sleep(0)
        for one in chance.sample(asking, 5):
            one.cancel()
        answers = await asyncio.gather(*asking, return_exceptions=True)
        assert [one for one in answers if isinstance(one, AssertionError)] == []
    assert got >= 500


# --- streams --------------------------------------------------------------------------------------------------------------


@running
async def test_follow_gives_history_and_steps_in_one_order_and_resumes_anywhere(kind: Kind) -> None:
    store, desk = kind.open()
    term = await held(store)
    await store.commit(term, Commit(jobs={A: a_job()}, history=(entry(2), entry(6)), steps=(passed(1, 1), passed(2, 4))))
    whole = await take(desk, A, "0", 4)
    assert [value for _, value in whole] == [passed(1, 1), entry(2), passed(2, 4), entry(6)]
    for place, (id, _) in enumerate(whole):
        assert await take(desk, A, id, 3 - place) == whole[place + 1 :] if place < 3 else True
    following = asyncio.create_task(take(desk, A, whole[-1][0], 3))
    await asyncio.sleep(0.2)
    await store.commit(term, Commit(history=(entry(8),), steps=(passed(3, 7), passed(4, 9))))
    assert [value for _, value in await following] == [passed(3, 7), entry(8), passed(4, 9)]


@running
async def test_follower_misses_nothing_of_many_small_commits(kind: Kind) -> None:
    store, desk = kind.open()
    term = await held(store)
    await store.commit(term, Commit(jobs={A: a_job()}))
    following = asyncio.create_task(take(desk, A, "0", 60))
    for n in range(30):
        await store.commit(term, Commit(history=(entry(2 * n),), steps=(passed(n, 2 * n + 1),)))
        if n % 7 == 0:
            await asyncio.sleep(0.005)
    found = await following
    assert [int(id) for id, _ in found] == list(range(1, 61))


@running
async def test_reader_that_fell_behind_is_told_the_gap(kind: Kind) -> None:
    store, desk = kind.open()
    term = await held(store)
    await store.commit(term, Commit(jobs={A: a_job()}, history=(entry(0, "first"),)))
    for chunk in range(8):
        steps = tuple(passed(50 * chunk + n, 50 * chunk + n + 1) for n in range(50))
        await store.commit(term, Commit(steps=steps))
    (_, first), (gap_id, gap), (after_id, after) = await take(desk, A, "0", 3)
    assert first == entry(0, "first"), "the other stream lost nothing"
    assert isinstance(gap, Gap) and gap.resumes_at == after_id and isinstance(after, StepRecord)
    assert int(after_id) > 2
    assert await take(desk, A, gap_id, 1) == [(after_id, after)]
    kept = await desk.steps(A, "0", 10_000)
    assert CAP <= len(kept) < 400 and kept[-1][1] == passed(399, 400)


@running
async def test_unknown_job_and_unknown_place_are_refused(kind: Kind) -> None:
    _, desk = kind.open()
    with pytest.raises(NotFound):
        await desk.get(A)
    with pytest.raises(NotFound):
        await take(desk, A, "0", 1)
    with pytest.raises(Refused):
        await desk.history(A, "yesterday", 10)


@running
async def test_health_says_whether_a_supervisor_is_there(kind: Kind) -> None:
    store, desk = kind.open()
    before = await desk.health()
    assert before["supervisor"] != "ok"
    await held(store)
    assert (await desk.health())["supervisor"] == "ok"
    if kind.redis is not None:
        assert set((await desk.health()).values()) == {"ok"}


# --- Redis dies, stalls, and is not as it should be -----------------------------------------------------------------------


def test_store_that_has_forgotten_what_it_confirmed_is_not_written(durable: Kind) -> None:
    @running
    async def test(kind: Kind) -> None:
        store, desk = kind.open()
        assert isinstance(store, RedisStore)
        term = await held(store)
        redis = store._clients.writes
        await store.commit(term, Commit(jobs={A: a_job()}, history=(entry(1),)))
        backup = {key: await redis.dump(key) for key in await redis.keys("*")}
        await store.commit(term, Commit(jobs={A: a_job(committed=Step(7))}, history=(entry(2),)))
        await redis.flushall()
        for key, value in backup.items():
            await redis.restore(key, 0, value)
        with pytest.raises(WentBack):
            await store.commit(term, Commit(jobs={A: a_job(committed=Step(8))}, history=(entry(3),)))
        assert await desk.get(A) == a_job() and len(await desk.history(A, "0", 10)) == 1, "as it was restored"
        raised = await store.overtake("one", term, term, 30)
        assert raised is not None and raised > term
        with pytest.raises(WentBack):
            await store.commit(raised, Commit(jobs={A: a_job(committed=Step(8))}))
        reigns = (Reign(term=raised, by="one", commits=2, at=5.0),)
        assert await store.commit(raised, Commit(jobs={A: a_job(committed=Step(8))}, reigns=reigns)) == 3
        assert (await store.load()).reigns == reigns
        await redis.set("everstep:term", term - 1)
        with pytest.raises(WentBack):  # from before this supervisor
            await store.commit(raised, Commit(jobs={A: a_job(committed=Step(9))}))
        again = await store.overtake("one", raised, raised, 30)
        assert again is not None and again > raised

    test(durable)


def test_killed_server_comes_back_with_everything(durable: Kind) -> None:
    @running
    async def test(kind: Kind) -> None:
        assert kind.redis is not None
        store, desk = kind.open()
        term = await held(store)
        acknowledged = 0
        server = kind.redis.process
        assert server is not None

        async def kill() -> None:
            await asyncio.sleep(0.15)
            server.send(signal.SIGKILL)

        killing = asyncio.create_task(kill())
        with pytest.raises(Unavailable):
            while True:
                step = acknowledged + 1
                commit = Commit(jobs={A: a_job(committed=Step(step))}, history=(entry(step),))
                await store.commit(term, commit)
                acknowledged = step
        await killing
        await asyncio.to_thread(kind.redis.start)
        # The commit whose answer was lost is repeated: it counts once, whether or not it had been written.
        await store.commit(term, commit)
        assert (await desk.get(A)).committed == step
        kept = await desk.history(A, "0", 100_000)
        assert [value.at for _, value in kept if isinstance(value, HistoryEntry)][-1] == step
        assert int(kept[-1][0]) == step
        assert await store.renew("one", term, 30)

    test(durable)


def test_stalled_server_writes_nothing_twice(durable: Kind) -> None:
    @running
    async def test(kind: Kind) -> None:
        assert kind.redis is not None and kind.redis.process is not None
        patient, _ = kind.open()
        term = await held(patient)
        store, desk = kind.open(timeout_s=0.4)
        await until(lambda: store.commit(term, Commit(jobs={A: a_job()})))
        commit = Commit(jobs={A: a_job(committed=Step(1))}, history=(entry(1),), steps=(passed(1, 1),))
        async with stopped(kind.redis, 3.0):
            for _ in range(4):
                with pytest.raises(Unavailable):
                    await store.commit(term, commit)
            with pytest.raises(Unavailable):
                await desk.submit(B, SPEC, 1.0, "key", "body")
            with pytest.raises(Unavailable):
                await desk.get(A)
        await until(lambda: store.commit(term, commit))
        assert await until(lambda: desk.submit(B, SPEC, 1.0, "key", "body")) == (B, True)
        store, desk = kind.open()  # with more patience
        assert len(await desk.history(A, "0", 10)) == len(await desk.steps(A, "0", 10)) == 1
        assert len(await store.commands("0", 0)) == 1
        assert len(await desk.history(B, "0", 10)) == 1

    test(durable)


def test_health_names_what_is_not_durable(durable: Kind) -> None:
    @running
    async def test(kind: Kind) -> None:
        store, desk = kind.open()
        assert isinstance(store, RedisStore)
        await held(store)
        writes = store._clients.writes
        try:
            await writes.config_set("appendfsync", "everysec")
            assert "appendfsync" in (await desk.health())["durability"]
        finally:
            await writes.config_set("appendfsync", "always")
        assert (await desk.health())["durability"] == "ok"

    test(durable)


@asynccontextmanager
async def stopped(redis: EmbeddedRedis, at_least_s: float) -> AsyncIterator[None]:
    process, began = redis.process, time.monotonic()
    assert process is not None
    process.send(signal.SIGSTOP)
    try:
        yield
        await asyncio.sleep(max(0.0, at_least_s - (time.monotonic() - began)))
    finally:
        process.send(signal.SIGCONT)


async def until(work: Callable[[], Awaitable[T]]) -> T:
    """What it returns once the server answers."""
    async with asyncio.timeout(60):
        while True:
            try:
                return await work()
            except Unavailable:
                await asyncio.sleep(0.05)
