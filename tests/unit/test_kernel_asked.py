"""A checkpoint that a person asks for: who is told, how often, and when it is no longer wanted."""

from __future__ import annotations

from orchestrator.domain.effects import CallHost
from orchestrator.domain.events import CheckpointFailed, CheckpointNow, DeadlinePassed
from orchestrator.domain.host_events import ShardNotSaved
from orchestrator.domain.ids import Step
from orchestrator.domain.requests import SaveSoon
from orchestrator.supervisor.asked import MAX_TRIES
from orchestrator.supervisor.deadlines import MAX_SAVE_AGAIN_S, SAVE_AGAIN_S, deadlines
from tests.builders import JOB, Bench, a_report, a_spec


def test_a_checkpoint_that_is_asked_for_is_told_to_one_rank_and_again_to_the_next_generation() -> None:
    bench = Bench(spec=a_spec(tp=1, pp=1, dp=2, every=0)).running().passed(1)
    bench.tell(CheckpointNow(job=JOB))
    (node, order), *others = bench.calls(SaveSoon)
    assert (node, order.device, order.generation) == (bench.plan.devices[0].node, bench.plan.devices[0], 1) and not others
    assert not bench.passed(2).calls(SaveSoon), "once"
    device = bench.plan.devices[1]
    bench.exited(device)
    bench.all_report(lambda other: a_report(other, generation=1, voted=2, held=2)).planned().prepared().ready()
    assert [order.generation for _, order in bench.calls(SaveSoon)] == [2], "it died before anything was saved"
    bench.passed(3).saved(3).checkpoint(3)
    assert bench.record.save_asked is None and not bench.passed(4).calls(SaveSoon)


def test_a_checkpoint_that_is_asked_for_early_is_made_as_soon_as_the_job_trains() -> None:
    bench = Bench(spec=a_spec(tp=1, pp=1, dp=1)).submitted().tell(CheckpointNow(job=JOB))
    assert not bench.calls(SaveSoon)
    bench.probed().planned().opened().prepared().ready()
    assert len([e for e in bench.effects.values() if isinstance(e, CallHost) and isinstance(e.request, SaveSoon)]) == 1


def test_one_that_was_asked_for_has_a_canary_whichever_step_it_is_of() -> None:
    """Its shards are heard of when they are written: by then the step after it has long passed."""
    bench = an_asked_one().passed(*range(2, 12)).saved(2).checkpoint(2)
    assert bench.record.checkpoint is not None and bench.record.checkpoint.after
    assert not bench.passed(12, 13).record.after, "and nothing is noted when nobody waits"


def an_asked_one() -> Bench:
    bench = Bench(spec=a_spec(tp=1, pp=1, dp=2, every=0)).running().passed(1).tell(CheckpointNow(job=JOB))
    assert len(bench.calls(SaveSoon)) == 1
    return bench


def not_saved(bench: Bench, step: int) -> Bench:
    for device in bench.plan.devices:
        event = ShardNotSaved(device=device, generation=bench.record.generation, step=Step(step), message="no space left")
        bench.said(device.node, event)
    return bench


def again_s(bench: Bench) -> tuple[str, float]:
    ((key, seconds),) = [(k, s) for k, s in deadlines(bench.record).items() if k.startswith("save_again")]
    return key, seconds


def test_one_that_could_not_be_made_is_told_again_after_longer_and_longer_and_said_each_time() -> None:
    bench = an_asked_one().passed(2)
    waited = []
    for failures in range(1, MAX_TRIES):
        step = 2 * failures
        not_saved(bench, step)
        assert bench.history[-1].type == "checkpoint_late" and "no space left" in bench.history[-1].message
        assert not bench.passed(step + 1).calls(SaveSoon), "not at once"
        key, seconds = again_s(bench)
        waited.append(seconds)
        bench.tell(DeadlinePassed(job=JOB, key=key))
        assert [order.generation for _, order in bench.calls(SaveSoon)] == [1], "the same generation"
        bench.passed(step + 2)
    assert waited[:3] == [SAVE_AGAIN_S, 2 * SAVE_AGAIN_S, 4 * SAVE_AGAIN_S] and waited[-1] == MAX_SAVE_AGAIN_S
    assert bench.said_to_people().count("checkpoint_late") == MAX_TRIES - 1, "once a step, whoever could not"
    not_saved(bench, 2 * MAX_TRIES)
    assert "given up" in bench.history[-1].message and bench.record.save_asked is None
    bench.tell(CheckpointNow(job=JOB))
    assert len(bench.calls(SaveSoon)) == 1 and bench.record.save_failures == 0


def test_a_manifest_that_cannot_be_written_counts_and_a_checkpoint_that_is_made_ends_it() -> None:
    bench = an_asked_one().passed(2).saved(2)
    bench.tell(CheckpointFailed(job=JOB, step=Step(2), message="read-only file system"))
    key, _ = again_s(bench)
    bench.tell(DeadlinePassed(job=JOB, key=key)).passed(3, 4).saved(4).checkpoint(4)
    assert bench.record.save_asked is None and bench.record.save_failures == 0 and not bench.record.save_rests


def test_the_next_generation_is_told_at_once_and_another_step_on_its_way_is_waited_for() -> None:
    bench = an_asked_one().passed(2)
    device = bench.plan.devices[1]
    not_saved(bench.saved(2, device), 3)
    assert not bench.record.save_rests, "step 2 may still become one"
    not_saved(bench, 2)
    assert bench.record.save_rests
    bench.exited(device)
    bench.all_report(lambda other: a_report(other, generation=1, voted=3, held=3)).planned().prepared().ready()
    assert [order.generation for _, order in bench.calls(SaveSoon)] == [2] and not bench.record.save_rests
