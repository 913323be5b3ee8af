"""What ranks make of held-out text reaches the record and people; a job is not over before its final state is judged."""

from __future__ import annotations

from dataclasses import replace

from orchestrator.domain.events import HistoryEntry
from orchestrator.domain.generation import Evaluation
from orchestrator.domain.host_events import RankFinished, StepsPassed
from orchestrator.domain.ids import Generation, Step
from orchestrator.domain.spec import CheckpointSpec, EvaluationSpec
from orchestrator.domain.state import Running, Stopping
from tests.builders import Bench, a_spec, an_answer

SPEC = replace(
    a_spec(tp=2, pp=2, dp=2, steps=5),
    checkpoint=CheckpointSpec(every=0),
    evaluation=EvaluationSpec(every=2, micro_batches=4),
)


def running() -> Bench:
    return Bench(spec=SPEC).submitted().probed().planned().opened().prepared().ready()


def evaluated(bench: Bench, step: int, loss: float | None) -> None:
    """By the vote on the step after it."""
    answer = replace(an_answer(step + 1), evaluation=Evaluation(step=Step(step), loss=loss))
    event = StepsPassed(generation=bench.record.generation, answers=(answer,), at=(bench.now,))
    for node in bench.nodes:
        bench.said(node, event)


def finished(bench: Bench, generation: int, loss: float) -> None:
    found = Evaluation(step=Step(5), loss=loss)
    for device in bench.plan.devices:
        event = RankFinished(device=device, generation=Generation(generation), step=Step(5), evaluation=found)
        bench.said(device.node, event)


def told(bench: Bench) -> list[HistoryEntry]:
    return [one for one in bench.history if one.type == "evaluated"]


def test_an_evaluation_is_kept_and_told_once_whoever_says_it() -> None:
    bench = running().passed(1, 2)
    assert bench.record.evaluation is None
    evaluated(bench, 2, 2.5)
    assert bench.record.committed == 3 and bench.record.evaluation == Evaluation(step=Step(2), loss=2.5)
    (entry,) = told(bench)
    assert entry.message == "loss on held-out text after step 2: 2.5000"
    assert dict(entry.data) == {"evaluated": 2, "loss": 2.5}


def test_a_loss_that_is_not_finite_is_said_and_ends_nothing() -> None:
    bench = running().passed(1, 2)
    evaluated(bench, 2, None)
    assert told(bench)[0].message == "loss on held-out text after step 2: not finite"
    assert isinstance(bench.state, Running)


def test_a_job_waits_for_the_evaluation_of_its_final_state() -> None:
    bench = running().passed(1, 2)
    evaluated(bench, 2, 2.5)
    bench.passed(4)
    evaluated(bench, 4, 2.25)
    assert bench.record.committed == 5 and isinstance(bench.state, Running)
    finished(bench, bench.record.generation - 1, 9.0)
    assert isinstance(bench.state, Running), "of a generation that is over"
    finished(bench, bench.record.generation, 2.0)
    assert isinstance(bench.state, Stopping) and bench.record.evaluation == Evaluation(step=Step(5), loss=2.0)
    assert [entry.data["evaluated"] for entry in told(bench)] == [2, 4, 5]


def test_a_rank_lost_after_the_last_step_is_replaced_and_the_next_generation_evaluates() -> None:
    bench = running().passed(1, 2, 3, 4, 5)
    victim = bench.plan.devices[0]
    bench.exited(victim)
    assert not isinstance(bench.state, Stopping), "nobody has evaluated yet"


def test_an_evaluation_of_a_state_that_was_rolled_back_is_not_that_of_the_one_made_again() -> None:
    spec = replace(SPEC, checkpoint=CheckpointSpec(every=3))
    bench = Bench(spec=spec).submitted().probed().planned().opened().prepared().ready().passed(1, 2)
    evaluated(bench, 2, 2.5)
    bench.saved(3).checkpoint(3).passed(4, 5)
    finished(bench, bench.record.generation, 2.0)
    assert isinstance(bench.state, Running) and bench.record.evaluation == Evaluation(step=Step(5), loss=2.0), "not saved"
    for node in bench.plan.nodes:
        bench.lose_node(node).host_gone(node)
    for number in range(10, 14):
        bench.add_node(number)
    bench.planned().opened().prepared()
    assert bench.form().committed == 3 and bench.record.evaluation is None
    bench.ready().passed(4, 5).saved(5).checkpoint(5)
    assert isinstance(bench.state, Running), "the final state is another one now"
    finished(bench, bench.record.generation, 2.25)
    assert isinstance(bench.state, Stopping) and bench.record.evaluation == Evaluation(step=Step(5), loss=2.25)
