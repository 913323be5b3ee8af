"""A job's life without trouble: submitted, probed, planned, opened, prepared, formed, trained, saved, ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from orchestrator.domain import codec
from orchestrator.domain.checkpoint import CheckpointRef
from orchestrator.domain.effects import AddNode, ChoosePlan, ProbeProgram, StrikeNode
from orchestrator.domain.events import (
    CancelRequested,
    CheckpointFailed,
    Contact,
    DeadlinePassed,
    EffectDone,
    HostClosed,
    HostLost,
    JobSubmitted,
    NodeRequested,
    PlanChosen,
    ProgramProbed,
    ProgramRefused,
    ResizeRequested,
)
from orchestrator.domain.faults import FaultKind, FaultRequested
from orchestrator.domain.generation import Unreadable
from orchestrator.domain.host_events import HostFailed, RankReady, ShardNotSaved
from orchestrator.domain.ids import EffectId, Generation, JobId, NodeId, Step
from orchestrator.domain.job import JobRecord
from orchestrator.domain.origin import FromCheckpoint, FromSeed
from orchestrator.domain.plan import Infeasible
from orchestrator.domain.requests import CloseHost, FormGeneration, InjectFault, OpenHost, PrepareSeats
from orchestrator.domain.size import Size
from orchestrator.domain.state import (
    TERMINAL,
    Cancelled,
    Failed,
    Probing,
    Queued,
    Reforming,
    Running,
    Starting,
    Stopping,
    Succeeded,
)
from orchestrator.domain.status import reason_of
from orchestrator.planner.choose import choose
from orchestrator.supervisor.deadlines import deadlines
from orchestrator.supervisor.kernel import State, step
from tests.builders import JOB, Bench, a_device, a_profile, a_report, a_spec, an_answer


def closed(bench: Bench) -> Bench:
    for node in sorted(bench.record.hosts):
        bench.tell(HostClosed(job=JOB, node=node))
    return bench


# --- where it begins -----------------------------------------------------------------------------------------------------


def test_a_job_begins_with_the_checkpoint_that_it_asked_for_and_goes_back_to_it_until_it_has_one_of_its_own() -> None:
    start = CheckpointRef(step=Step(40), generation=Generation(3), path="/other/step-00000040.g3", answer=an_answer(40))
    bench = Bench(spec=a_spec(tp=1, pp=1, dp=2, steps=50, mirrors=0)).submitted()
    bench.tell(ProgramProbed(job=JOB, profile=a_profile(), start=start)).planned().opened().prepared()
    form = bench.form()
    assert (form.restore, form.committed) == (FromCheckpoint(checkpoint=start), 40)
    bench.ready().passed(41)
    assert [record.answer.step for record in bench.steps] == [41] and bench.record.committed == 41
    # Nobody else holds what this rank held.
    device = bench.plan.devices[0]
    bench.exited(device)
    bench.all_report(lambda other: a_report(other, generation=1, voted=41, held=41)).planned().prepared()
    restore = bench.form().restore
    assert isinstance(restore, FromCheckpoint) and restore.checkpoint.path == start.path
    assert restore.checkpoint.after == an_answer(41).losses and bench.record.committed == 40


def test_a_job_whose_only_checkpoint_is_no_good_ends_rather_than_begin_with_its_seed() -> None:
    spec = a_spec(tp=1, pp=1, dp=1, steps=50)
    spec = replace(spec, checkpoint=replace(spec.checkpoint, restore_from="/other"))
    start = CheckpointRef(step=Step(40), generation=Generation(3), path="/other/step-00000040.g3")
    bench = Bench(spec=spec).submitted()
    bench.tell(ProgramProbed(job=JOB, profile=a_profile(), start=start)).planned().opened().prepared()
    found = Unreadable(step=Step(40), generation=Generation(3))
    report = a_report(bench.form().plan.devices[0], generation=1, held=None)
    bench.reports(replace(report, found=found, cause="a piece has no hash"))
    state = bench.state
    assert isinstance(state, Stopping) and isinstance(state.outcome, Failed)
    assert state.outcome.message == (
        "the checkpoint of step 40 to begin with is no good, and there is no other: a piece has no hash"
    )
    assert not bench.planned().calls(FormGeneration)


def test_a_job_whose_first_step_is_not_the_one_that_was_made_then_ends_too() -> None:
    spec = a_spec(tp=1, pp=1, dp=1, steps=50)
    spec = replace(spec, checkpoint=replace(spec.checkpoint, restore_from="/other"))
    start = CheckpointRef(step=Step(40), generation=Generation(3), path="/other/40", after=(9.0,) * 4)
    bench = Bench(spec=spec).submitted()
    bench.tell(ProgramProbed(job=JOB, profile=a_profile(), start=start)).planned().opened().prepared().ready().passed(41)
    state = bench.state
    assert isinstance(state, Stopping) and isinstance(state.outcome, Failed)
    assert (
        "of step 40 to begin with is no good, and there is no other: the first step after it differs"
        in state.outcome.message
    )
    assert not bench.steps, "a step that may not count is not shown"


def test_a_job_that_takes_weights_alone_begins_at_step_0() -> None:
    start = CheckpointRef(step=Step(0), generation=Generation(3), path="/other/step-00000040.g3")
    bench = Bench(spec=a_spec(tp=1, pp=1, dp=1, steps=5)).submitted()
    bench.tell(ProgramProbed(job=JOB, profile=a_profile(), start=start)).planned().opened().prepared()
    form = bench.form()
    assert (form.restore, form.committed) == (FromCheckpoint(checkpoint=start), 0)


# --- the straight way ----------------------------------------------------------------------------------------------------


def test_from_submission_to_success() -> None:
    bench = Bench(spec=a_spec(tp=2, pp=2, dp=2, steps=5)).submitted()
    assert isinstance(bench.state, Probing)
    assert [type(effect) for effect in bench.last.effects.values()] == [ProbeProgram]

    bench.probed()
    assert isinstance(bench.state, Queued) and [type(e) for e in bench.last.effects.values()] == [ChoosePlan]
    assert len(bench.asked().devices) == 8 and bench.asked().generation == 1

    bench.planned()
    assert isinstance(bench.state, Starting) and bench.record.generation == 1
    assert {node for node, _ in bench.calls(OpenHost)} == set(bench.nodes)
    assert not bench.calls(PrepareSeats), "no seat before its host is warm"

    bench.opened(NodeId("n0"))
    assert bench.preparing() == {"n0"}
    bench.opened().prepared(NodeId("n0"), NodeId("n1"), NodeId("n2"))
    assert not bench.calls(FormGeneration), "not before every seat has an address"
    bench.prepared(NodeId("n3"))
    assert {node for node, _ in bench.calls(FormGeneration)} == set(bench.nodes)
    form = bench.form()
    assert isinstance(form.restore, FromSeed) and set(form.addresses) == set(form.plan.devices) and form.committed == 0

    bench.ready()
    assert isinstance(bench.state, Running) and bench.record.started_at is not None
    bench.passed(1, 2, 3).passed(4, 5)
    assert bench.record.committed == 5 and [one.answer.step for one in bench.steps] == [1, 2, 3, 4, 5]
    assert isinstance(bench.state, Running), "the last checkpoint is still to come"
    bench.saved(5)
    (commit,) = bench.commits()
    assert commit.step == 5 and {shard.device for shard in commit.shards} == set(bench.plan.devices)
    bench.checkpoint(5)
    assert isinstance(bench.state, Stopping) and {node for node, _ in bench.calls(CloseHost)} == set(bench.nodes)
    closed(bench)
    assert isinstance(bench.state, Succeeded) and not bench.record.outbox and not bench.kernel.jobs


def test_a_step_proves_that_everybody_is_ready() -> None:
    bench = Bench().submitted().probed().planned().opened().prepared()
    bench.passed(1)
    assert isinstance(bench.state, Running) and bench.record.committed == 1


def test_readiness_of_another_generation_says_nothing() -> None:
    bench = Bench().submitted().probed().planned().opened().prepared()
    for device in bench.plan.devices:
        bench.said(device.node, RankReady(device=device, generation=Generation(7), phases={}))
    assert isinstance(bench.state, Starting)


def test_without_checkpoints_the_last_step_ends_the_job() -> None:
    bench = Bench(spec=a_spec(dp=2, steps=2, every=0)).running().passed(1, 2)
    assert isinstance(closed(bench).state, Succeeded)


def test_effects_stay_in_the_outbox_until_they_are_done() -> None:
    bench = Bench().submitted()
    (identity,) = bench.record.outbox
    bench.tell(EffectDone(job=JOB, effect=identity)).tell(EffectDone(job=JOB, effect=identity))
    assert not bench.record.outbox


def test_steps_are_recorded_once_in_order_and_with_their_seconds() -> None:
    bench = Bench().running().passed(1, 2).passed(2, 3, node=NodeId("n1")).passed(1, 2, 3, node=NodeId("n2"))
    assert [one.answer for one in bench.steps] == [an_answer(1), an_answer(2), an_answer(3)]
    assert bench.steps[0].seconds is None and bench.steps[2].seconds == pytest.approx(0.01)


def test_a_vote_that_passed_proves_those_before_it_even_if_nobody_told_of_them() -> None:
    bench = Bench().running().passed(1).passed(4, 5)
    assert bench.record.committed == 5 and [one.answer.step for one in bench.steps] == [1, 4, 5]
    assert bench.said_to_people().count("steps_untold") == 1


# --- checkpoints ---------------------------------------------------------------------------------------------------------


def test_a_checkpoint_is_committed_once_all_shards_are_there_and_its_step_is_recorded() -> None:
    bench = Bench().running().passed(1, 2, 3, 4)
    bench.saved(5)
    assert not bench.commits(), "step 5 is not recorded yet"
    bench.passed(5)
    assert [commit.step for commit in bench.commits()] == [5] and not bench.record.saving
    bench.passed(6, 7, 8, 9, 10).saved(10, *bench.plan.devices[:7]).saved(10, *bench.plan.devices[:7])
    assert len(bench.commits()) == 1, "one shard is missing, however often the others come"
    bench.saved(10, bench.device(7))
    assert [commit.step for commit in bench.commits()] == [5, 10]


def test_shards_saved_before_everybody_is_ready_count() -> None:
    bench = Bench(spec=a_spec(tp=2, pp=2, dp=2, steps=5)).running().passed(1, 2, 3, 4, 5)
    bench.exited(bench.device(0))
    bench.all_report(lambda device: a_report(device, voted=5, passed=5, held=5)).prepared()
    bench.saved(5)  # each rank saves again when it has restored, and the first to be ready are quick
    assert isinstance(bench.state, Reforming) and len(bench.commits()) == 1
    bench.ready().checkpoint(5)
    assert isinstance(closed(bench).state, Succeeded)


def test_shards_that_a_closed_generation_saved_are_no_part_of_its_successors_checkpoint() -> None:
    """Each has its own files: one checkpoint of both would mix two attempts."""
    bench = Bench().running().passed(1, 2, 3, 4, 5).saved(5, *Bench().running().plan.devices[:3])
    bench.exited(bench.device(7))
    bench.all_report(lambda device: a_report(device, voted=5, passed=5, held=5)).prepared().ready()
    bench.saved(5, *bench.plan.devices[3:])
    assert not bench.commits(), "three are of the generation before"
    bench.saved(5, *bench.plan.devices[:3])
    assert [(commit.step, commit.generation) for commit in bench.commits()] == [(5, 2)]


def test_a_failed_checkpoint_is_told_and_only_the_last_one_fails_the_job() -> None:
    bench = Bench().running().passed(1, 2, 3, 4, 5)
    bench.tell(CheckpointFailed(job=JOB, step=Step(5), message="disk full"))
    assert isinstance(bench.state, Running) and "checkpoint_failed" in bench.said_to_people()
    bench.tell(CheckpointFailed(job=JOB, step=Step(20), message="disk full"))
    assert isinstance(closed(bench).state, Failed)


def test_a_part_that_is_not_saved_costs_its_checkpoint_and_is_said_once() -> None:
    bench = Bench().running().passed(1, 2, 3, 4, 5)
    first, second, *others = bench.plan.devices
    bench.saved(5, *others)
    for device in (first, second):
        bench.said(
            device.node,
            ShardNotSaved(device=device, generation=bench.record.generation, step=Step(5), message="the disk is full"),
        )
    assert isinstance(bench.state, Running) and bench.commits() == []
    (told,) = [entry for entry in bench.history if entry.type == "checkpoint_failed"]
    assert told.message == f"no checkpoint of step 5: {first}: the disk is full"
    bench.saved(5, first, second)
    assert 5 not in bench.record.saving, "nothing is kept of it"
    bench.passed(6, 7, 8, 9, 10).saved(10)
    assert [commit.step for commit in bench.commits()] == [10], "the next one tries again"
    bench.said(
        first.node, ShardNotSaved(device=first, generation=Generation(0), step=Step(15), message="an old generation's")
    )
    assert bench.record.unsaved == (5,)


# --- the job cannot run --------------------------------------------------------------------------------------------------


def test_a_refused_program_fails_with_its_reason() -> None:
    bench = Bench().submitted().tell(ProgramRefused(job=JOB, message="model.heads must be positive"))
    assert isinstance(bench.state, Failed) and bench.state.message == "model.heads must be positive"


def test_what_does_not_fit_waits_with_its_reason_and_starts_when_a_node_comes() -> None:
    bench = Bench(nodes=3).submitted().probed().planned()
    assert bench.state == Queued(reason="needs 8 devices, 6 usable; lower dp or wait for a node")
    bench.see_nodes()
    assert not bench.last.effects, "nothing new, so nobody is asked again"
    bench.add_node(3)
    assert [type(e) for e in bench.last.effects.values()] == [ChoosePlan]
    assert isinstance(bench.planned().state, Starting)


def test_what_can_never_fit_fails() -> None:
    bench = Bench(spec=a_spec(tp=3)).submitted().probed().planned()
    assert isinstance(bench.state, Failed) and "parallel.tp 3 does not divide model.heads 4" in bench.state.message


def test_a_program_that_raises_twice_fails_the_job_with_rank_code_and_log() -> None:
    bench = Bench().running()
    device = bench.device(3)
    for _ in range(2):
        assert isinstance(bench.state, Running)
        bench.exited(device, user_error=True, exit_code=1, log_tail=("ValueError: boom",))
        if isinstance(bench.state, Reforming):
            bench.prepared().all_report(lambda d: a_report(d, held=0)).ready()
    state = closed(bench).state
    assert isinstance(state, Failed) and "boom" in state.message and state.exit_code == 1 and state.device == device
    assert state.log_tail == ("ValueError: boom",) and state.verdict == "repeated_error"


def test_a_host_that_cannot_start_fails_a_job_that_never_ran() -> None:
    bench = Bench().submitted().probed().planned()
    bench.said(NodeId("n1"), HostFailed(message="no module named torch", log_tail=("Traceback",)))
    state = closed(bench).state
    assert isinstance(state, Failed) and "n1 failed: no module named torch" in state.message


def test_probing_and_starting_have_deadlines() -> None:
    bench = Bench().submitted().tell(DeadlinePassed(job=JOB, key="probe"))
    assert isinstance(bench.state, Failed)
    bench = Bench().submitted().probed().planned().tell(DeadlinePassed(job=JOB, key="open:1"))
    assert isinstance(closed(bench).state, Failed), "no host at all became ready: it is the program"
    bench = Bench().submitted().probed().planned().opened(NodeId("n0")).prepared(NodeId("n0"))
    bench.tell(DeadlinePassed(job=JOB, key="open:1"))
    assert isinstance(bench.state, Reforming), "one host was quick: it is the others"


def test_a_job_whose_ranks_may_be_still_for_long_gives_them_as_long_to_become_ready() -> None:
    spec = a_spec(tp=2, pp=2, dp=2)
    for hang_s in (0.0, 500.0):
        bench = Bench(spec=replace(spec, recovery=replace(spec.recovery, hang_s=hang_s)))
        bench.submitted().probed().planned().opened().prepared()
        assert deadlines(bench.record) == {"form:1": 60.0 + hang_s}


def test_a_deadline_of_an_earlier_state_is_late_and_changes_nothing() -> None:
    bench = Bench().running()
    before = bench.record
    bench.tell(*(DeadlinePassed(job=JOB, key=key) for key in ("probe", "open:1", "form:1", "settle:1", "stop")))
    assert bench.record == before


# --- cancel and terminal -------------------------------------------------------------------------------------------------


def reforming() -> Bench:
    bench = Bench().running().passed(1)
    return bench.exited(bench.device(0))


def without_hosts() -> Bench:
    bench = Bench(nodes=1, spec=a_spec(dp=2)).running()
    return bench.host_gone(NodeId("n0")).lose_node(NodeId("n0"))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Bench().submitted(),
        lambda: Bench(nodes=1).submitted().probed().planned(),
        lambda: Bench().submitted().probed(),
        lambda: Bench().submitted().probed().planned(),
        lambda: Bench().running(),
        reforming,
        without_hosts,
        lambda: reforming().all_report(lambda device: a_report(device, voted=1, passed=1, held=1)).prepared(),
    ],
    ids=["probing", "queued", "planning", "starting", "running", "reforming", "reforming_without_hosts", "restoring"],
)
def test_cancel_ends_a_job_in_every_state(make: Callable[[], Bench]) -> None:
    bench = make()
    bench.tell(CancelRequested(job=JOB))
    assert isinstance(bench.state, Stopping | Cancelled)
    bench.tell(CancelRequested(job=JOB))
    closed(bench)
    assert isinstance(bench.state, Cancelled) and not bench.record.outbox and not bench.record.hosts


def test_who_cancelled_a_job_is_told_and_stays_with_it() -> None:
    bench = Bench().running().tell(CancelRequested(job=JOB, by="ci"))
    assert (bench.history[-1].type, bench.history[-1].data["by"]) == ("stopping", "ci")
    closed(bench)
    assert reason_of(bench.state) == "cancelled by ci" and bench.history[-1].message.startswith("CANCELLED by ci")


def test_who_cancelled_a_job_that_holds_nothing_is_told_once() -> None:
    bench = Bench(nodes=1).submitted().probed().planned().tell(CancelRequested(job=JOB, by="ci"))
    assert bench.history[-1].message == "CANCELLED at step 0; asked by ci"


def test_what_comes_after_a_command_is_not_its_authors() -> None:
    bench = Bench().running()
    asked = ResizeRequested(job=JOB, size=Size(target=4), by="ci")
    bench.tell(asked, HostLost(job=JOB, node=NodeId("n0"), contact=Contact.UNREACHABLE, message="no answer"))
    by = {entry.type: entry.data.get("by") for entry in bench.history}
    assert by["resize_asked"] == "ci" and [type for type, who in by.items() if who] == ["resize_asked"]


def test_hosts_that_do_not_confirm_are_abandoned_and_those_that_ended_need_not() -> None:
    bench = Bench().running().tell(CancelRequested(job=JOB))
    for node in ("n0", "n1", "n2"):
        bench.host_gone(NodeId(node))
    assert isinstance(bench.state, Stopping) and bench.state.open_hosts == {"n3"}
    assert list(deadlines(bench.record)) == ["stop"]
    bench.tell(DeadlinePassed(job=JOB, key="stop"))
    assert isinstance(bench.state, Cancelled) and "hosts_abandoned" in bench.said_to_people()


def test_the_outcome_decided_first_stays() -> None:
    bench = Bench(spec=a_spec(dp=2, steps=1, every=0)).running().passed(1)
    bench.tell(CancelRequested(job=JOB)).exited(next(iter(bench.record.pids)), user_error=True)
    assert isinstance(closed(bench).state, Succeeded)


def test_terminal_is_final() -> None:
    bench = Bench().running().tell(CancelRequested(job=JOB))
    closed(bench)
    bench.said(NodeId("n0"), RankReady(device=a_device(0), generation=Generation(1), phases={}))
    bench.tell(CancelRequested(job=JOB), EffectDone(job=JOB, effect=EffectId("job:1")))
    bench.probed().checkpoint(5)
    assert not bench.last.changed and isinstance(bench.state, TERMINAL)


# --- several jobs, faults, nodes -----------------------------------------------------------------------------------------


def test_two_jobs_never_get_the_same_devices_even_from_answers_of_one_moment() -> None:
    bench = Bench(nodes=2)
    other = JobId("other")
    bench.see_nodes().tell(*(JobSubmitted(job=job, spec=a_spec(dp=2, pp=2), at=1.0) for job in (JOB, other)))
    state = replace(
        bench.kernel,
        jobs={
            job: replace(r, profile=a_profile(), state=Queued(reason="a plan is being chosen"))
            for job, r in bench.kernel.jobs.items()
        },
    )
    asked = step(1.0, state, [])
    requests = [effect for effect in asked.effects.values() if isinstance(effect, ChoosePlan)]
    assert len(requests) == 2 and requests[0].devices == requests[1].devices
    answers = [PlanChosen(job=r.job, generation=r.generation, result=choose(r)) for r in requests]
    after = step(2.0, asked.state, answers)
    assert isinstance(after.state.jobs[JOB].state, Starting) and isinstance(after.state.jobs[other].state, Queued)


def test_devices_of_a_finished_job_start_one_that_waits() -> None:
    bench = Bench(nodes=1, spec=a_spec(dp=2, steps=1, every=0)).running()
    other = JobId("other")
    bench.tell(JobSubmitted(job=other, spec=a_spec(dp=2), at=1.0))
    waiting = replace(bench.kernel.jobs[other], profile=a_profile(), state=Queued(reason="needs 2 devices, 0 usable"))
    bench.kernel = replace(bench.kernel, jobs={**bench.kernel.jobs, other: waiting})
    bench.see_nodes()
    (asked,) = [e for e in bench.last.effects.values() if isinstance(e, ChoosePlan)]
    bench.tell(PlanChosen(job=other, generation=asked.generation, result=choose(asked)))
    assert isinstance(bench.kernel.jobs[other].state, Queued), "it is known only that the cluster could hold it"
    bench.see_nodes()
    assert not bench.last.effects
    closed(bench.passed(1))
    assert [e.job for e in bench.last.effects.values() if isinstance(e, ChoosePlan)] == [other]


def test_a_supervisor_that_has_not_seen_the_cluster_takes_nothing_for_lost() -> None:
    bench = Bench().running().passed(1)
    fresh = State(jobs=bench.kernel.jobs, root=bench.kernel.root)
    assert not step(1.0, fresh, []).changed
    bench.kernel = fresh
    bench.exited(bench.device(0))
    assert isinstance(bench.state, Reforming) and bench.state.forming, "the same plan needs nobody else"


def test_faults_on_request() -> None:
    bench = Bench().running()
    bench.tell(FaultRequested(fault=FaultKind.KILL, job=JOB, rank=3))
    asked = FaultRequested(fault=FaultKind.KILL, job=JOB, rank=3, id="f1")
    assert bench.calls(InjectFault) == [(bench.device(3).node, InjectFault(fault=asked, device=bench.device(3)))]
    bench.tell(FaultRequested(fault=FaultKind.KILL, job=JOB, rank=99))
    assert not bench.last.effects
    killed = FaultRequested(fault=FaultKind.NODE_KILL, node=NodeId("n1"), beyond_mirrors=True)
    assert list(bench.tell(killed).last.effects.values()) == [StrikeNode(job=JOB, node=NodeId("n1"))]
    assert bench.tell(NodeRequested(kind="H100", num_devices=2)).last.loose == (AddNode(kind="H100", num_devices=2),)


def test_an_infeasible_answer_to_an_old_question_is_ignored() -> None:
    bench = Bench().running()
    before = bench.record
    bench.tell(PlanChosen(job=JOB, generation=Generation(1), result=Infeasible(reason="old", forever=True)))
    assert bench.record == before


@pytest.mark.parametrize(
    ("make", "keys"),
    [
        (lambda: Bench().submitted(), ["probe"]),
        (lambda: Bench().submitted().probed().planned(), ["open:1"]),
        (lambda: Bench().submitted().probed().planned().opened().prepared(), ["form:1"]),
        (lambda: Bench().running(), []),
        (reforming, ["settle:1"]),
        (lambda: reforming().all_report(lambda device: a_report(device, voted=1, passed=1, held=1)), ["prepare:2"]),
        (lambda: Bench().running().tell(CancelRequested(job=JOB)), ["stop"]),
    ],
    ids=["probing", "starting", "forming", "running", "settling", "preparing", "stopping"],
)
def test_deadlines_follow_from_the_stored_record_so_that_a_successor_starts_them_again(
    make: Callable[[], Bench], keys: list[str]
) -> None:
    stored = codec.loads(JobRecord, codec.dumps(make().record))
    assert list(deadlines(stored)) == keys and all(seconds > 0 for seconds in deadlines(stored).values())
