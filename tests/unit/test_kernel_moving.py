"""What the kernel does when a job has to leave devices: a node drains, or its owner wants it smaller."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.domain.effects import KillNode
from orchestrator.domain.events import (
    CordonRequested,
    HostClosed,
    InstantCame,
    PlanChosen,
    ResizeRequested,
    UncordonRequested,
)
from orchestrator.domain.failure import Cause
from orchestrator.domain.host_events import HostOpened
from orchestrator.domain.ids import NodeId
from orchestrator.domain.origin import FromMemory
from orchestrator.domain.plan import Infeasible
from orchestrator.domain.requests import CloseHost, SaveSoon, StopAfter
from orchestrator.domain.size import Size
from orchestrator.domain.state import Queued, Reforming, Running, Starting
from orchestrator.planner.choose import choose
from orchestrator.supervisor.deadlines import instants
from tests.builders import JOB, Bench, a_report, a_spec

N0, N1, N2 = NodeId("n0"), NodeId("n1"), NodeId("n2")


def running(nodes: int = 4, **spec: int) -> Bench:
    return Bench(nodes=nodes, spec=a_spec(tp=2, **spec)).running().passed(1, 2, 3)


def resized(bench: Bench, **size: int) -> Bench:
    return bench.tell(ResizeRequested(job=JOB, size=Size(**size))).planned()


def drained(bench: Bench, node: NodeId, **asked: object) -> Bench:
    return bench.tell(replace(CordonRequested(node=node, drain=True), **asked)).planned()  # type: ignore[arg-type]


def paused(bench: Bench) -> Bench:
    """Everybody stops after the step under way, as asked; the next plan is formed."""
    state, step = bench.state, bench.record.committed
    assert isinstance(state, Running) and bench.record.join is not None and bench.record.join.stopping
    assert {order.generation for _, order in bench.calls(StopAfter)} == {state.generation}
    for device in state.plan.devices:
        report = a_report(device, generation=state.generation, voted=step, passed=step, held=step)
        bench.reports(replace(report, stopped=True))
    return bench


def moved(bench: Bench) -> Bench:
    """The plan that is given up is left, and the next one trains."""
    return paused(bench).prepared().ready().recovered().passed(bench.record.committed + 1)


def test_a_smaller_size_takes_state_from_memory_and_costs_no_step() -> None:
    bench = paused(resized(running(nodes=2), target=2))
    state = bench.state
    assert isinstance(state, Reforming) and state.fault.cause is Cause.SHRINK
    assert state.forming is not None and state.forming.plan.world_size == 2
    bench.prepared()
    assert isinstance(bench.form().restore, FromMemory)
    bench.ready().passed(4)
    assert bench.plan.world_size == 2
    assert bench.record.incidents[-1].rolled_back == 0 and not bench.record.failures


def test_a_raised_limit_lets_the_job_grow_again() -> None:
    bench = moved(resized(running(nodes=2), target=2))
    resized(bench, target=0).opened()
    assert bench.record.target is not None and bench.record.target.world_size == 4


def test_a_size_that_is_had_already_changes_nothing() -> None:
    bench = running(nodes=2)
    bench.tell(ResizeRequested(job=JOB, size=bench.record.wanted_size))
    assert isinstance(bench.state, Running) and bench.record.size is None


def test_a_smaller_size_that_no_plan_has_is_said_and_training_goes_on() -> None:
    bench = resized(running(nodes=2, dp=2), target=2)
    assert isinstance(bench.state, Running) and bench.said_to_people().count("not_moved") == 1
    bench.passed(4, 5).planned()
    assert bench.said_to_people().count("not_moved") == 1, "told once, not with every step"


def test_an_answer_for_the_size_it_had_is_none_for_the_one_it_has() -> None:
    """A planner that takes its time would leave it waiting for ever for what it may have by now (seed 62688)."""
    bench = Bench(spec=a_spec(tp=2)).submitted().tell(ResizeRequested(job=JOB, size=Size(max_devices=1))).probed()
    asked = bench.asked()
    bench.tell(ResizeRequested(job=JOB, size=Size()))
    late = choose(asked)
    assert isinstance(late, Infeasible)
    bench.tell(PlanChosen(job=JOB, generation=asked.generation, result=late)).planned()
    assert isinstance(bench.state, Starting)


def test_a_queued_job_starts_when_its_least_size_is_lowered() -> None:
    bench = Bench(nodes=1, spec=a_spec(tp=2, min_devices=4)).submitted().probed().planned()
    assert isinstance(bench.state, Queued)
    resized(bench, min_devices=2)
    assert not isinstance(bench.state, Queued)


def test_a_drained_node_is_left_without_a_step_lost_then_its_host_is_closed() -> None:
    bench = paused(drained(running(nodes=2), N0)).prepared().ready()
    assert bench.record.incidents[-1].fault.cause is Cause.SHRINK
    assert bench.plan.nodes == (N1,) and not bench.calls(CloseHost), "what it holds may be needed until a step is made"
    bench.passed(bench.record.committed + 1)
    assert [node for node, _ in bench.calls(CloseHost)] == [N0]
    bench.tell(HostClosed(job=JOB, node=N0)).planned()
    assert bench.kernel.cordons[N0].is_empty and N0 not in bench.record.hosts
    assert isinstance(bench.state, Running) and bench.record.target is None


def test_another_node_takes_over_from_a_drained_one_while_training_goes_on() -> None:
    bench = running(nodes=3, dp=2)
    (spare,) = set(bench.nodes) - set(bench.plan.nodes)
    left = bench.plan.nodes[0]
    drained(bench, left).said(spare, HostOpened(seconds=1.0))
    assert isinstance(bench.state, Running) and bench.record.join is not None
    assert set(bench.record.join.plan.nodes) == {*bench.plan.nodes, spare} - {left}


def test_nothing_new_is_placed_on_a_cordoned_node_and_what_trains_there_stays() -> None:
    bench = running(nodes=2)
    bench.tell(CordonRequested(node=N0), CordonRequested(node=N2)).add_node(2).planned()
    assert isinstance(bench.state, Running) and bench.record.target is None
    bench.tell(UncordonRequested(node=N2)).planned()
    assert bench.record.target is not None and N2 in bench.record.target.nodes


def test_a_node_on_which_a_job_was_to_grow_and_that_drains_is_given_up() -> None:
    bench = running(nodes=2).add_node(2).planned()
    assert bench.record.target is not None and N2 in bench.record.target.nodes
    drained(bench, N2)
    assert bench.record.target is None or N2 not in bench.record.target.nodes


def test_a_drain_that_nothing_fits_is_said_and_everything_is_saved() -> None:
    bench = drained(running(nodes=2, dp=2), N0)
    assert isinstance(bench.state, Running) and "not_moved" in bench.said_to_people()
    assert bench.calls(SaveSoon)


def test_a_node_goes_once_it_is_empty() -> None:
    bench = drained(running(nodes=2), N0, remove=True)
    assert KillNode(node=N0) not in bench.last.loose
    moved(bench).tell(HostClosed(job=JOB, node=N0))
    assert bench.last.loose == (KillNode(node=N0),)
    bench.passed(9)
    assert not bench.last.loose, "asked once"
    bench.lose_node(N0)
    assert N0 not in bench.kernel.cordons


@pytest.mark.parametrize("after_s", [10.0, 31.0])
def test_a_deadline_takes_the_node_whoever_is_still_there(after_s: float) -> None:
    bench = drained(running(nodes=2, dp=2), N0, remove=True, deadline_s=30.0)
    bench.now += after_s
    bench.passed(9)
    assert (KillNode(node=N0) in bench.last.loose) is (after_s > 30)


def test_a_deadline_is_waited_for_where_there_is_no_other_news() -> None:
    bench = drained(running(nodes=2, dp=2), N0, remove=True, deadline_s=30.0)
    ((key, seconds),) = instants(bench.kernel.cordons, (), bench.now).items()
    assert 29.0 < seconds <= 30.0
    bench.now += seconds
    bench.tell(InstantCame(key=key))
    assert bench.last.loose == (KillNode(node=N0),)
    ((again, seconds),) = instants(bench.kernel.cordons, (), bench.now).items()
    assert again != key
    bench.now += seconds
    bench.tell(InstantCame(key=again))
    assert bench.last.loose == (KillNode(node=N0),), "it is still there, so its provider is asked again"


def test_a_drain_that_takes_nothing_away_has_no_deadline() -> None:
    bench = drained(running(nodes=2, dp=2), N0, deadline_s=30.0)
    assert not instants(bench.kernel.cordons, (), bench.now)


def test_a_cordon_is_not_weakened_by_another_one_and_outlives_the_supervisor() -> None:
    bench = drained(running(nodes=2), N0, remove=True, deadline_s=30.0)
    bench.tell(CordonRequested(node=N0))
    kept = bench.kernel.cordons[N0]
    assert kept.drains and kept.removes and kept.deadline is not None
