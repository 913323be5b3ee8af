"""A job that its owner pauses and resumes: who is told, when it is over, and what if something comes in between."""

from __future__ import annotations

from orchestrator.domain.events import (
    CancelRequested,
    CheckpointFailed,
    DeadlinePassed,
    HostClosed,
    PauseRequested,
    ResumeRequested,
)
from orchestrator.domain.failure import Cause
from orchestrator.domain.host_events import HostFailed, RankFinished
from orchestrator.domain.ids import Step
from orchestrator.domain.origin import FromCheckpoint
from orchestrator.domain.requests import CloseHost, SaveSoon
from orchestrator.domain.state import Cancelled, JobStatus, Paused, Queued, Reforming, Running, Starting, Stopping
from orchestrator.domain.status import aside_of, status_of
from tests.builders import JOB, Bench, a_spec
from tests.recovering import holding, trained


def resting(bench: Bench, step: int) -> Bench:
    """Everybody has saved the step, and makes no other."""
    bench.passed(step)
    for device in bench.plan.devices:
        bench.said(device.node, RankFinished(device=device, generation=bench.record.generation, step=Step(step)))
    return bench


def closed(bench: Bench) -> Bench:
    for node in sorted(bench.record.hosts):
        bench.tell(HostClosed(job=JOB, node=node))
    return bench


def paused() -> Bench:
    bench = resting(trained().tell(PauseRequested(job=JOB)), 4).saved(4).checkpoint(4)
    return closed(bench)


def test_it_makes_one_more_step_saves_it_and_holds_nothing_until_it_is_resumed_from_there() -> None:
    bench = trained().tell(PauseRequested(job=JOB))
    ((node, order),) = bench.calls(SaveSoon)
    assert order.rests and order.generation == 1 and node == order.device.node
    assert not bench.tell(PauseRequested(job=JOB)).calls(SaveSoon), "asked twice, told once"
    assert "pauses" in aside_of(bench.record)
    resting(bench, 4)
    assert isinstance(bench.state, Running), "not before it is saved"
    bench.saved(4).checkpoint(4)
    assert isinstance(bench.state, Stopping) and status_of(bench.state) is JobStatus.PAUSING
    assert {node for node, _ in bench.calls(CloseHost)} == set(bench.nodes)
    closed(bench)
    assert isinstance(bench.state, Paused) and bench.record.pause is None and not bench.record.incidents
    assert not bench.record.hosts and not bench.record.pids and bench.ended is None
    assert not bench.see_nodes().record.planning, "it wants nothing"

    bench.tell(ResumeRequested(job=JOB)).planned().opened().prepared()
    assert isinstance(bench.state, Starting) and bench.record.committed == 4
    restore = bench.form().restore
    assert isinstance(restore, FromCheckpoint) and restore.checkpoint.step == 4
    bench.ready().passed(5)
    assert [one.answer.step for one in bench.steps] == [1, 2, 3, 4, 5], "none is made twice"
    assert bench.steps[-1].seconds is None, "a pause is no slow step"


def test_a_checkpoint_of_an_earlier_step_is_not_what_it_waits_for() -> None:
    bench = resting(trained().saved(3).tell(PauseRequested(job=JOB)), 4).checkpoint(3)
    assert isinstance(bench.state, Running)


def test_one_that_cannot_be_saved_trains_on_with_what_is_in_memory() -> None:
    bench = resting(trained().tell(PauseRequested(job=JOB)), 4)
    bench.tell(CheckpointFailed(job=JOB, step=Step(4), message="no space left"))
    state = bench.state
    assert isinstance(state, Reforming) and state.fault.cause is Cause.PAUSE and bench.record.pause is None
    assert "pause_failed" in bench.said_to_people() and "no space left" in state.fault.message
    bench.prepared().all_report(holding(4)).ready().passed(5)
    (incident,) = bench.record.incidents
    assert bench.record.committed == 5 and incident.rolled_back == 0 and not bench.record.failures


def test_an_earlier_failure_told_later_hides_nothing() -> None:
    bench = resting(trained().tell(PauseRequested(job=JOB)), 4)
    failed = [CheckpointFailed(job=JOB, step=Step(step), message="no space left") for step in (4, 3)]
    assert isinstance(bench.tell(*failed).state, Reforming)


def test_a_rank_lost_meanwhile_is_recovered_from_first() -> None:
    bench = trained().tell(PauseRequested(job=JOB))
    bench.exited(bench.device(3)).prepared().all_report(holding(3)).ready()
    ((_, order),) = bench.calls(SaveSoon)
    assert order.rests and order.generation == 2
    closed(resting(bench, 4).saved(4).checkpoint(4))
    assert isinstance(bench.state, Paused)


def test_what_holds_nothing_pauses_at_once_and_what_is_described_as_soon_as_it_is() -> None:
    waiting = Bench(nodes=1, spec=a_spec(tp=2, min_devices=4)).submitted().probed().planned()
    assert isinstance(waiting.state, Queued)
    assert isinstance(waiting.tell(PauseRequested(job=JOB)).state, Paused)
    probing = Bench().submitted().tell(PauseRequested(job=JOB))
    assert isinstance(probing.probed().state, Paused) and not probing.record.planning
    assert isinstance(probing.tell(ResumeRequested(job=JOB)).planned().state, Starting)


def test_paused_while_it_was_asked_whether_it_fits_it_starts_once_it_is_resumed_and_there_is_room() -> None:
    """That question is over, and the next one is for a plan to begin with (seed 40960)."""
    bench = Bench(nodes=1, devices=1, spec=a_spec(tp=2)).submitted().probed()
    assert bench.record.planning and bench.record.turn.asks_whether
    bench.tell(PauseRequested(job=JOB)).add_node(1).tell(ResumeRequested(job=JOB)).planned()
    assert isinstance(bench.state, Starting)


def test_resumed_before_it_was_told_it_never_pauses_and_after_that_it_goes_on_at_once() -> None:
    early = Bench().submitted().tell(PauseRequested(job=JOB), ResumeRequested(job=JOB)).probed()
    assert early.record.pause is None and isinstance(early.planned().state, Starting)
    late = resting(trained().tell(PauseRequested(job=JOB)).tell(ResumeRequested(job=JOB)), 4).saved(4).checkpoint(4)
    assert isinstance(closed(late).state, Queued)
    assert isinstance(late.planned().state, Starting)


def test_resumed_and_then_its_generation_ends_the_next_one_is_not_told() -> None:
    told = trained().tell(PauseRequested(job=JOB))
    before = told.tell(ResumeRequested(job=JOB)).exited(told.device(3))
    lost = trained().tell(PauseRequested(job=JOB))
    after = lost.exited(lost.device(3)).tell(ResumeRequested(job=JOB))
    for bench in (before, after):
        bench.prepared().all_report(holding(3)).ready().passed(4)
        assert isinstance(bench.state, Running) and bench.record.pause is None and not bench.calls(SaveSoon)


def test_a_resumed_job_whose_host_does_not_start_is_not_failed() -> None:
    for goes_wrong in (HostFailed(message="no space left on /tmp"), None):
        bench = paused().tell(ResumeRequested(job=JOB)).planned()
        state = bench.state
        assert isinstance(state, Starting)
        if goes_wrong is not None:
            bench.said(state.forming.plan.nodes[0], goes_wrong)
        else:
            bench.tell(DeadlinePassed(job=JOB, key=f"open:{state.forming.generation}"))
        assert isinstance(bench.state, Reforming | Queued) and bench.ended is None
        assert bench.record.checkpoint is not None and bench.record.committed == 4


def test_what_it_was_paused_for_counts_until_it_trains_again() -> None:
    bench = paused()
    bench.now += 3600
    bench.tell(ResumeRequested(job=JOB)).planned().opened()
    bench.now += 60
    bench.prepared().ready()
    assert isinstance(bench.state, Running) and bench.record.paused_since is None
    assert 3660 <= bench.record.paused_s < 3662


def test_a_cancel_counts_at_any_time() -> None:
    assert isinstance(paused().tell(CancelRequested(job=JOB)).ended.state, Cancelled)  # type: ignore[union-attr]
    half_way = resting(trained().tell(PauseRequested(job=JOB)), 4).saved(4).checkpoint(4).tell(CancelRequested(job=JOB))
    assert isinstance(closed(half_way).ended.state, Cancelled)  # type: ignore[union-attr]


def test_the_last_step_ends_a_job_that_was_to_pause() -> None:
    bench = trained().passed(*range(4, 20)).tell(PauseRequested(job=JOB))
    closed(resting(bench, 20).saved(20).checkpoint(20))
    assert bench.ended is not None and status_of(bench.ended.state) is JobStatus.SUCCEEDED
