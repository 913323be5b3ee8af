"""What a supervisor that begins makes of its store and of what hosts remember."""

from __future__ import annotations

from dataclasses import replace

from orchestrator.domain.ids import Device, Generation, JobId, NodeId, Step, Term
from orchestrator.domain.job import JobRecord
from orchestrator.domain.memo import Kept, Memo, Reign, is_forgotten
from orchestrator.domain.state import Probing
from orchestrator.supervisor.recalling import Recalled, recalled
from tests.builders import a_spec

A, B = JobId("job-a"), JobId("job-b")
N0, N1, N2 = NodeId("n0"), NodeId("n1"), NodeId("n2")
FIRST = Reign(term=Term(1), by="first", commits=0, at=100.0)
NEW = Reign(term=Term(2), by="new", commits=50, at=900.0)


def a_record(job: JobId = A, generation: int = 3, committed: int = 7, **changes: object) -> JobRecord:
    known = JobRecord(id=job, spec=a_spec(), state=Probing(), created_at=1.0)
    return known.changed({"generation": Generation(generation), "committed": Step(committed), **changes})


def kept(node: NodeId, commits: int, record: JobRecord, *reigns: Reign, at_work: int = 0, heard: int = 0) -> Kept:
    memo = Memo(reigns=reigns or (FIRST,), commits=commits, record=record)
    return Kept(
        job=record.id,
        node=node,
        term=memo.reigns[-1].term,
        heard=Generation(heard),
        at_work=Generation(at_work),
        memo=memo,
    )


def asked(*hosts: Kept, stored: tuple[JobRecord, ...] = (), over: frozenset[JobId] = frozenset()) -> Recalled | None:
    """By a supervisor whose store had fifty commits when it began."""
    return recalled({one.id: one for one in stored}, over, hosts, (FIRST, NEW), 50)


def test_hosts_that_remember_no_more_than_the_store_change_nothing() -> None:
    old = a_record(committed=3)
    assert asked(kept(N0, 50, old), kept(N1, 12, old), stored=(a_record(),)) is None


def test_newest_of_what_hosts_remember_is_the_jobs_truth() -> None:
    older, newest = a_record(generation=3), a_record(generation=4, committed=20, next_effect=9)
    found = asked(kept(N0, 60, older, heard=5), kept(N1, 70, newest, at_work=4), stored=(a_record(generation=1),))
    assert found is not None and found.commits == 70 and not found.strays
    job = found.jobs[A]
    assert (job.generation, job.committed) == (4, 20)
    assert job.reserved == 5, "a host has heard of a generation that the record does not know"
    assert job.next_effect > 1_000_000, "no effect is taken for one that was asked for by whom the store forgot"


def test_job_that_no_record_knows_is_taken_up_and_one_that_is_over_is_not() -> None:
    found = asked(kept(N0, 60, a_record(B)), kept(N1, 61, a_record(A)), over=frozenset({A}))
    assert found is not None and set(found.jobs) == {B}
    assert found.strays == {(A, N1)}, "it serves a job that has ended"


def test_terms_that_the_store_has_forgotten_are_overtaken() -> None:
    found = asked(Kept(job=A, node=N0, term=Term(9)), stored=(a_record(),))
    assert found is not None and found.above == 9 and found.jobs == {A: a_record()}


def test_host_of_a_branch_that_came_to_nothing_ends() -> None:
    """Two supervisors that did not know of each other: what ranks train on is the truth."""
    forgotten = Reign(term=Term(2), by="forgotten", commits=40, at=500.0)
    blind = Reign(term=Term(2), by="blind", commits=45, at=600.0)
    found = asked(
        kept(N0, 80, a_record(generation=5), FIRST, forgotten, at_work=5),
        kept(N2, 60, a_record(generation=3), FIRST, blind),
        stored=(a_record(generation=1),),
    )
    assert found is not None and found.jobs[A].generation == 5
    assert found.strays == {(A, N2)}
    assert [one.by for one in found.reigns] == ["first", "forgotten"]


def test_what_led_to_a_later_supervisor_is_not_forgotten_by_it() -> None:
    later = Reign(term=Term(3), by="later", commits=45, at=600.0)
    memo = Memo(reigns=(FIRST,), commits=44, record=a_record())
    assert not is_forgotten(memo, (FIRST, later))
    assert is_forgotten(replace(memo, commits=46), (FIRST, later))
    assert is_forgotten(replace(memo, reigns=(later,)), (FIRST,))


def test_of_two_jobs_with_one_device_the_one_that_was_recorded_first_has_lost_it() -> None:
    device = Device(N0, 0)
    first = a_record(A, pids={device: 11}, hosts=frozenset({N0}))
    then = a_record(B, pids={device: 12}, hosts=frozenset({N0}))
    found = asked(kept(N0, 60, then, at_work=3), kept(N0, 55, first))
    assert found is not None and found.strays == {(A, N0)} and found.used == {device}
