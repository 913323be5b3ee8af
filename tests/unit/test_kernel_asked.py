"""A checkpoint that a person asks for: who is told, how often, and when it is no longer wanted."""

from __future__ import annotations

from orchestrator.domain.effects import CallHost
from orchestrator.domain.events import CheckpointNow
from orchestrator.domain.protocol import SaveSoon
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
