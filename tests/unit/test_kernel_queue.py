"""Jobs that share a cluster, as the kernel has them give way: who becomes smaller, who is put aside, who goes on when."""

from __future__ import annotations

from dataclasses import replace

from orchestrator.domain.effects import ChoosePlan
from orchestrator.domain.events import (
    CancelRequested,
    CheckpointFailed,
    DeadlinePassed,
    HostClosed,
    InstantCame,
    JobSubmitted,
    PauseRequested,
    PlanChosen,
    PriorityRequested,
    ProgramProbed,
    QuotaRequested,
    ResumeRequested,
)
from orchestrator.domain.host_events import RankFinished
from orchestrator.domain.ids import Generation, JobId, Step
from orchestrator.domain.job import JobRecord
from orchestrator.domain.plan import Infeasible
from orchestrator.domain.queue import Waiting, WaitReason
from orchestrator.domain.requests import CloseHost, KillRank, SaveSoon
from orchestrator.domain.state import Failed, JobStatus, Paused, Queued, Reforming, Running, Starting
from orchestrator.domain.status import aside_of, status_of
from orchestrator.planner.choose import choose
from orchestrator.supervisor.deadlines import deadlines, instants
from tests.builders import JOB, Bench, a_profile, a_spec
from tests.recovering import holding
from tests.unit.test_kernel_moving import moved

HIGH = JobId("high")


def running(nodes: int = 2, devices: int = 2, **spec: int) -> Bench:
    return Bench(nodes=nodes, devices=devices, spec=a_spec(**spec)).running().passed(1, 2, 3)


def submit(bench: Bench, least: int, priority: int = 5, job: JobId = HIGH) -> Bench:
    """Another job; its plans are chosen at once."""
    spec = replace(a_spec(dp=least), priority=priority)
    bench.tell(JobSubmitted(job=job, spec=spec, at=bench.now), ProgramProbed(job=job, profile=a_profile()))
    return planned(bench, job)


def planned(bench: Bench, job: JobId = HIGH) -> Bench:
    while job in bench.kernel.jobs and bench.kernel.jobs[job].planning:
        asked = next(e for e in reversed(bench.effects.values()) if isinstance(e, ChoosePlan) and e.job == job)
        bench.tell(PlanChosen(job=job, generation=asked.generation, result=choose(asked)))
    return bench


def other(bench: Bench, job: JobId = HIGH) -> JobRecord:
    return bench.kernel.jobs[job]


def standing(bench: Bench, job: JobId = HIGH) -> Waiting:
    return next(one for one in bench.kernel.queue or () if one.job == job)


def put_aside(bench: Bench) -> Bench:
    """It has been told to rest, and does."""
    step = bench.record.committed + 1
    bench.passed(step)
    for device in bench.plan.devices:
        bench.said(device.node, RankFinished(device=device, generation=bench.record.generation, step=Step(step)))
    bench.saved(step).checkpoint(step)
    for node in sorted(bench.record.hosts):
        bench.tell(HostClosed(job=JOB, node=node))
    return bench


def test_a_running_job_becomes_smaller_for_one_of_higher_priority_and_loses_no_step() -> None:
    bench = submit(running(), 2)
    assert len(bench.record.turn.yields) == 2 and bench.record.turn.yields_to == HIGH
    assert standing(bench).reason is WaitReason.MAKING_ROOM and "yielding" in bench.said_to_people()
    moved(bench.planned())
    assert bench.plan.world_size == 2 and not bench.record.failures and bench.record.incidents[-1].rolled_back == 0
    (node,) = {node for node, _ in bench.calls(CloseHost)}
    assert isinstance(other(bench).state, Queued), "not while the host is still there"
    planned(bench.tell(HostClosed(job=JOB, node=node)))
    state = other(bench).state
    assert isinstance(state, Starting) and set(state.forming.plan.nodes) == {node} and not bench.kernel.queue
    bench.tell(CancelRequested(job=HIGH))
    for at in other(bench).hosts:
        bench.tell(HostClosed(job=HIGH, node=at))
    bench.planned()
    assert bench.record.target is not None and bench.record.target.world_size == 4, "it grows back"


def test_ranks_that_are_left_on_a_shared_node_are_ended_there_once() -> None:
    bench = moved(submit(running(nodes=1, devices=4), 2).planned())
    killed = {order.device for _, order in bench.calls(KillRank)}
    assert killed == bench.record.turn.yields and len(killed) == 2
    assert not bench.passed(bench.record.committed + 1).calls(KillRank), "told once"
    for device in sorted(killed):
        bench.exited(device, exit_code=-9)
    assert isinstance(bench.state, Running) and not bench.record.failures
    assert isinstance(planned(bench).kernel.jobs[HIGH].state, Starting)


def test_one_that_cannot_become_small_enough_is_put_aside_and_goes_on_by_itself() -> None:
    bench = submit(running(dp=4), 2)
    assert bench.record.pause is not None and "preempted" in bench.said_to_people()
    ((_, order),) = bench.calls(SaveSoon)
    assert order.rests
    put_aside(bench)
    assert isinstance(bench.state, Queued) and bench.record.pause is None and not bench.record.failures
    assert status_of(bench.state) is JobStatus.PENDING and bench.record.turn.is_preempted
    wait = standing(bench, JOB)
    assert wait.reason in (WaitReason.BUSY, WaitReason.PLANNING)
    assert isinstance(planned(bench).kernel.jobs[HIGH].state, Starting)
    wait = standing(bench.planned(), JOB)
    assert (
        wait.reason is WaitReason.BUSY and "was put aside" in wait.message and "held by high (priority 5)" in wait.message
    )
    bench.now += 50
    bench.tell(CancelRequested(job=HIGH))
    for at in other(bench).hosts:
        bench.tell(HostClosed(job=HIGH, node=at))
    bench.planned().opened().prepared().ready()
    assert isinstance(bench.state, Running) and bench.record.committed == 4
    assert 50 <= bench.record.turn.queued_s < 52 and bench.record.paused_s == 0 and not bench.record.turn.is_preempted


def test_where_it_cannot_be_saved_it_trains_on_and_is_left_alone_for_a_while() -> None:
    bench = submit(running(dp=4), 2)
    bench.passed(4)
    for device in bench.plan.devices:
        bench.said(device.node, RankFinished(device=device, generation=bench.record.generation, step=Step(4)))
    bench.tell(CheckpointFailed(job=JOB, step=Step(4), message="no space left"))
    bench.prepared().all_report(holding(4)).ready().passed(5).passed(6)
    assert isinstance(bench.state, Running) and bench.record.pause is None
    assert standing(bench).reason is WaitReason.BUSY
    (key,) = [key for key in deadlines(bench.record) if key.startswith("unsaved")]
    bench.tell(DeadlinePassed(job=JOB, key=key))
    assert bench.record.pause is not None, "tried again"


def test_its_owner_may_pause_what_is_put_aside_but_not_keep_it_from_giving_way() -> None:
    bench = submit(running(dp=4), 2).tell(ResumeRequested(job=JOB))
    assert bench.record.pause is not None and bench.record.pause.preempted
    put_aside(bench.tell(PauseRequested(job=JOB)))
    assert isinstance(bench.state, Paused) and not bench.record.turn.is_preempted


def test_nobody_gives_way_to_the_same_priority_until_that_is_raised() -> None:
    bench = submit(running(), 2, priority=0)
    assert not bench.record.turn.yields and standing(bench).reason is WaitReason.BUSY
    assert "4 of 4 are held by job (priority 0)" in standing(bench).message
    bench.tell(PriorityRequested(job=HIGH, priority=1))
    assert len(bench.record.turn.yields) == 2 and standing(bench).priority == 1


def test_one_that_nobody_needs_room_for_any_more_gives_nothing_up() -> None:
    bench = submit(running(), 2).tell(CancelRequested(job=HIGH))
    assert not bench.record.turn.yields and bench.record.target is None
    bench.passed(4).planned()
    assert isinstance(bench.state, Running) and bench.plan.world_size == 4


def test_a_job_that_found_no_smaller_plan_is_not_asked_for_it_again() -> None:
    bench = running(pp=4)
    submit(bench, 2)
    assert bench.record.pause is not None, "four stages are its least"


def test_one_whose_planner_finds_nothing_smaller_is_put_aside() -> None:
    bench = submit(running(), 2)
    assert bench.record.turn.yields and bench.record.planning
    result = Infeasible(reason="does not fit in memory")
    bench.tell(PlanChosen(job=JOB, generation=Generation(bench.record.generation + 1), result=result))
    assert bench.record.pause is not None and bench.record.pause.preempted and not bench.record.turn.yields
    planned(put_aside(bench))
    assert isinstance(other(bench).state, Starting) and isinstance(bench.state, Queued)


# --- a job that a fault has broken, among others -------------------------------------------------------------------------


def broken(bench: Bench) -> Bench:
    """One of its two nodes is gone, and with it half of what it cannot do without."""
    gone = bench.plan.nodes[0]
    bench.lose_node(gone).host_gone(gone).all_report(holding(bench.record.committed))
    return planned(bench, JOB)


def goes_on(bench: Bench) -> bool:
    state = planned(bench, JOB).state
    return isinstance(state, Reforming) and state.forming is not None and state.forming.plan.world_size == 4


def test_one_that_is_being_put_aside_is_made_whole_first_since_it_could_not_be_saved() -> None:
    bench = submit(running(dp=4).add_node(2), 4)
    assert bench.record.pause is not None and standing(bench).reason is WaitReason.MAKING_ROOM
    broken(bench)
    assert goes_on(bench), "on the node that was to be another's"
    assert bench.record.pause is not None and bench.record.pause.preempted


def test_a_broken_job_gets_what_is_kept_for_one_that_waits_for_what_it_holds() -> None:
    bench = submit(running(dp=4).add_node(2), 4, priority=0)
    older = replace(other(bench), created_at=1.0)
    bench.kernel = replace(bench.kernel, jobs={**bench.kernel.jobs, HIGH: older})
    bench.see_nodes()
    assert standing(bench).reason is WaitReason.BUSY
    assert goes_on(broken(bench))


def test_what_a_broken_job_has_lost_counts_for_no_quota() -> None:
    bench = running(dp=4).tell(QuotaRequested(project="default", max_devices=4)).add_node(2)
    assert goes_on(broken(bench))


def test_a_broken_job_that_nothing_fits_is_the_first_to_get_a_node_that_comes() -> None:
    bench = broken(running(dp=4).tell(QuotaRequested(project="default", max_devices=8)))
    assert isinstance(bench.state, Reforming) and bench.state.waiting
    submit(bench, 2, priority=0)
    assert goes_on(bench.add_node(2))


def test_a_quota_is_changed_while_jobs_wait() -> None:
    bench = running(nodes=4, tp=1, pp=2, dp=2).tell(QuotaRequested(project="default", max_devices=5))
    submit(bench, 2)
    wait = standing(bench)
    assert wait.reason is WaitReason.QUOTA and "has 4 of the 5" in wait.message and not bench.record.turn.yields
    planned(bench.tell(QuotaRequested(project="default", max_devices=6)))
    assert isinstance(other(bench).state, Starting)


def test_what_no_part_of_the_cluster_could_hold_says_why_until_it_has_grown() -> None:
    bench = Bench(nodes=1, spec=a_spec(tp=2, min_devices=4)).submitted().probed().planned()
    wait = standing(bench, JOB)
    assert wait.reason is WaitReason.INFEASIBLE and "needs 4 devices, 2 usable" in wait.message
    bench.add_node(1).planned()
    assert isinstance(bench.state, Starting)


def test_a_successor_of_the_supervisor_shows_the_same_queue() -> None:
    bench = submit(running(), 2, priority=0)
    before = bench.kernel.queue
    bench.kernel = replace(bench.kernel, arbitrated=None, queue=None)
    assert bench.see_nodes().kernel.queue == before and bench.last.queue_changed


# --- deadlines -----------------------------------------------------------------------------------------------------------


def test_a_job_that_has_not_begun_in_time_fails_and_says_why_it_waited() -> None:
    bench = Bench(nodes=1, spec=replace(a_spec(tp=2, min_devices=4), start_by_s=60.0)).submitted().probed().planned()
    bench.now += 59
    assert isinstance(bench.see_nodes().state, Queued)
    assert [round(s) for s in instants({}, bench.kernel.jobs.values(), bench.now).values()] == [1]
    bench.now += 2
    bench.tell(InstantCame(key="begin"))
    ended = bench.ended
    assert ended is not None and isinstance(ended.state, Failed) and ended.state.verdict == "not_started"
    assert "within start_by_s, 60 s: needs 4 devices" in ended.state.message
    begun = Bench(spec=replace(a_spec(), start_by_s=60.0)).running().passed(1)
    begun.now += 120
    assert isinstance(begun.passed(2).state, Running) and not instants({}, begun.kernel.jobs.values(), begun.now)


def test_a_job_that_has_had_its_time_is_saved_and_ended() -> None:
    bench = Bench(spec=replace(a_spec(), max_runtime_s=600.0)).running().passed(1, 2, 3)
    bench.now += 601
    bench.tell(InstantCame(key="end"))
    assert "out_of_time" in bench.said_to_people() and "ends as soon as its state is saved" in aside_of(bench.record)
    bench.tell(ResumeRequested(job=JOB), PauseRequested(job=JOB))
    put_aside(bench)
    ended = bench.ended
    assert ended is not None and isinstance(ended.state, Failed) and ended.state.verdict == "out_of_time"
    assert ended.checkpoint is not None and ended.checkpoint.step == 4 and not ended.failures


def test_time_in_which_it_was_put_aside_or_paused_does_not_count_as_its_own() -> None:
    bench = Bench(nodes=2, spec=replace(a_spec(dp=4), max_runtime_s=600.0)).running().passed(1, 2, 3)
    put_aside(submit(bench, 2))
    planned(bench).planned()
    bench.now += 1000
    assert isinstance(bench.see_nodes().state, Queued) and bench.record.held_until(bench.now) < 10
