"""Jobs that a fault has broken and that lack what nobody has: who gives its devices up for another, and who never would."""

from __future__ import annotations

from dataclasses import replace

from orchestrator.domain import codec
from orchestrator.domain.events import (
    CordonRequested,
    DeadlinePassed,
    HostClosed,
    InstantCame,
    PauseRequested,
    ProgramProbed,
)
from orchestrator.domain.ids import JobId
from orchestrator.domain.job import JobRecord
from orchestrator.domain.requests import CloseHost
from orchestrator.domain.state import Failed, Paused, Queued, Reforming, Running, Starting, Stopping
from orchestrator.supervisor.deadlines import deadlines
from tests.builders import JOB, Bench, a_profile, a_spec
from tests.recovering import holding
from tests.unit.test_kernel_queue import HIGH, broken, goes_on, other, planned, running, submit

TWIN = JobId("twin")


def a_pair(**changes: object) -> Bench:
    """Two jobs of four devices, which have lost a node of two each and hold two each; nothing is free."""
    bench = broken(running(dp=4).saved(3).checkpoint(3))
    text = codec.dumps(replace(bench.record, outbox={}))
    for mine, its in ((b'"n0', b'"n2'), (b'"n1', b'"n3')):
        text = text.replace(mine, its)
    twin = codec.loads(JobRecord, text).changed({"id": TWIN, "created_at": bench.record.created_at + 1, **changes})
    bench.kernel = replace(bench.kernel, jobs={**bench.kernel.jobs, TWIN: twin}, arbitrated=None)
    bench.add_node(3)
    assert all(isinstance(job.state, Reforming) and job.state.waiting for job in bench.kernel.jobs.values())
    return bench


def waited(bench: Bench, *jobs: JobId) -> Bench:
    for job in jobs:
        (key,) = [key for key in deadlines(bench.kernel.jobs[job]) if key.startswith("stuck")]
        bench.tell(DeadlinePassed(job=job, key=key))
    return bench


def test_of_two_broken_jobs_that_lack_devices_the_later_gives_its_own_up_and_goes_on_once_there_are_some() -> None:
    bench = waited(a_pair(), JOB)
    assert "stood_aside" not in bench.said_to_people() and isinstance(other(bench, TWIN).state, Reforming), "not yet"
    waited(bench, TWIN)
    assert isinstance(other(bench, TWIN).state, Stopping) and "stood_aside" in bench.said_to_people()
    assert isinstance(bench.state, Reforming) and bench.state.forming is None, "its hosts are still there"
    bench.tell(HostClosed(job=TWIN, node=next(iter(other(bench, TWIN).hosts))))
    assert goes_on(bench)
    twin = other(bench, TWIN)
    assert isinstance(twin.state, Queued) and twin.turn.is_preempted and twin.incidents[-1].pause_s is not None
    bench.add_node(4).add_node(5)
    assert isinstance(planned(bench, TWIN).kernel.jobs[TWIN].state, Starting)


def test_steps_that_were_in_memory_only_are_said_to_be_run_again() -> None:
    bench = a_pair(committed=9)
    waited(bench, JOB, TWIN)
    (said,) = [entry.message for entry in bench.history if entry.type == "stood_aside"]
    assert "from its checkpoint of step 3; the 6 steps after it are run again" in said


def test_priority_goes_before_age() -> None:
    bench = a_pair()
    bench.kernel = replace(
        bench.kernel,
        jobs={JOB: bench.record, TWIN: replace(other(bench, TWIN), turn=replace(bench.record.turn, priority=1))},
    )
    waited(bench, JOB, TWIN)
    assert isinstance(bench.state, Stopping) and isinstance(other(bench, TWIN).state, Reforming)


def test_one_that_the_whole_cluster_is_too_small_for_gives_way_to_one_behind_it() -> None:
    bench = a_pair()
    bench.kernel = replace(bench.kernel, jobs={**bench.kernel.jobs, JOB: replace(bench.record, spec=a_spec(dp=5))})
    waited(bench, JOB, TWIN)
    assert isinstance(bench.state, Stopping), "five are not there, four are"
    assert isinstance(other(bench, TWIN).state, Reforming)


def test_nobody_gives_up_what_is_of_no_use_to_the_other() -> None:
    bench = a_pair()
    specs = {JOB: a_spec(dp=5), TWIN: a_spec(dp=6)}
    bench.kernel = replace(
        bench.kernel, jobs={job: replace(record, spec=specs[job]) for job, record in bench.kernel.jobs.items()}
    )
    waited(bench, JOB, TWIN)
    assert all(isinstance(job.state, Reforming) and job.state.is_stuck for job in bench.kernel.jobs.values())


def test_a_stuck_job_makes_room_for_one_of_higher_priority_in_the_queue_and_for_no_other() -> None:
    for priority in (0, 5):
        bench = submit(broken(running(dp=4)), 2, priority=priority)
        assert isinstance(bench.state, Reforming)
        waited(bench, JOB)
        assert isinstance(bench.state, Stopping if priority else Reforming)
    for node, _ in bench.calls(CloseHost):
        bench.tell(HostClosed(job=JOB, node=node))
    assert isinstance(planned(bench).kernel.jobs[HIGH].state, Starting) and isinstance(bench.state, Queued)


def test_its_owner_s_pause_is_kept() -> None:
    bench = a_pair().tell(PauseRequested(job=TWIN))
    waited(bench, JOB, TWIN)
    bench.tell(HostClosed(job=TWIN, node=next(iter(other(bench, TWIN).hosts))))
    assert isinstance(other(bench, TWIN).state, Paused)


def test_a_broken_job_that_nothing_fits_ends_when_it_has_had_its_time() -> None:
    bench = Bench(nodes=2, spec=replace(a_spec(dp=4), max_runtime_s=600.0)).running().passed(1, 2, 3)
    broken(bench)
    assert isinstance(bench.state, Reforming) and bench.state.waiting
    bench.now += 601
    bench.tell(InstantCame(key="end"))
    for node, _ in bench.calls(CloseHost):
        bench.tell(HostClosed(job=JOB, node=node))
    ended = bench.ended
    assert ended is not None and isinstance(ended.state, Failed) and ended.state.verdict == "out_of_time"
    assert "not_saved" in bench.said_to_people()


def test_one_that_has_had_its_time_and_is_being_saved_ends_where_it_breaks_before_that() -> None:
    bench = Bench(nodes=2, spec=replace(a_spec(dp=4), max_runtime_s=600.0)).running().passed(1, 2, 3)
    bench.now += 601
    bench.tell(InstantCame(key="end"))
    assert isinstance(bench.state, Running)
    broken(bench)
    assert isinstance(bench.state, Stopping)


def test_of_a_cordoned_node_a_broken_job_keeps_what_it_had() -> None:
    """It needs four devices and has lost a node of two: two more are enough, whoever else would have them."""
    bench = running(nodes=2, devices=2, dp=4)
    gone, stays = bench.plan.nodes
    bench.tell(CordonRequested(node=stays))
    bench.lose_node(gone).host_gone(gone).all_report(holding(3))
    assert isinstance(planned(bench, JOB).state, Reforming)
    submit(bench, 2, priority=0).add_node(2, devices=2)
    state = planned(bench, JOB).state
    assert isinstance(state, Reforming) and state.forming is not None and set(state.forming.plan.nodes) == {stays, "n2"}


def test_a_cordoned_node_on_which_every_rank_of_a_job_has_ended_is_still_one_it_is_on() -> None:
    bench = Bench(nodes=3, devices=1, spec=a_spec(dp=3)).running().passed(1, 2, 3)
    (gone, stays, *_), plan = bench.plan.nodes, bench.plan
    bench.tell(CordonRequested(node=stays))
    bench.lose_node(gone).host_gone(gone)
    (device,) = (device for device in plan.devices if device.node == stays)
    bench.exited(device).all_report(holding(3))
    assert isinstance(planned(bench, JOB).state, Reforming) and device not in bench.record.pids
    bench.add_node(3, devices=1)
    state = planned(bench, JOB).state
    assert isinstance(state, Reforming) and state.forming is not None and stays in state.forming.plan.nodes


def large(columns: int, max_runtime_s: float = 0.0) -> Bench:
    """A job of any number of devices that trains on two nodes of two; its size decides on how few it fits."""
    lines = tuple(replace(line, shape=(8192, columns)) if line.split else line for line in a_profile().lines)
    bench = Bench(nodes=2, spec=replace(a_spec(), max_runtime_s=max_runtime_s)).submitted()
    bench.tell(ProgramProbed(job=JOB, profile=replace(a_profile(), lines=lines)))
    return bench.planned().opened().prepared().ready().passed(1, 2, 3)


def test_what_a_stuck_job_does_not_hold_and_cannot_use_is_another_s_until_more_is_there() -> None:
    """Three devices are left, and its memory needs four: the third is of no use to it."""
    bench = large(columns=14400).add_node(2, devices=1)
    broken(planned(bench, JOB))
    assert isinstance(bench.state, Reforming) and "needs" in (bench.state.waiting or "")
    submit(bench, 1, priority=0)
    assert isinstance(other(bench).state, Queued), "it may still go on"
    waited(bench, JOB)
    assert isinstance(planned(bench).kernel.jobs[HIGH].state, Starting)
    assert goes_on(bench.add_node(5))


def test_one_that_has_had_its_time_does_not_end_while_a_plan_on_colder_nodes_is_looked_for() -> None:
    """What is warm has too little memory, which is asked about first; a free node is there."""
    bench = large(columns=9600, max_runtime_s=600.0)
    bench.now += 601
    bench.tell(InstantCame(key="end"))
    broken(bench.add_node(2))
    assert "waiting" in bench.said_to_people() and "not_saved" not in bench.said_to_people()
    assert isinstance(bench.state, Reforming) and bench.state.forming is not None
