"""A device that has become slow gets less to do, if that is worth it, and its share back when it is well again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from orchestrator.domain.balance import Remedy
from orchestrator.domain.failure import Cause
from orchestrator.domain.host_events import StepsPassed
from orchestrator.domain.ids import Device, Generation, NodeId
from orchestrator.domain.state import Reforming, Running
from orchestrator.recovery.balance import HORIZON_S, MAX_CHANGES, Offer, choose, recent
from orchestrator.supervisor.balancing import MAX_BUSY
from tests.builders import Bench, a_report, a_spec, an_answer

IDS = 12
LAYER_S = 0.05


class Balanced:
    """Two pipelines of one device each, on a bench whose clock moves with the steps."""

    def __init__(self, steps: int = 10_000, nodes: int = 2, dp: int = 2, ids: int = IDS) -> None:
        spec = a_spec(tp=1, pp=1, dp=dp, steps=steps, micro_batches=ids, every=0)
        self.ids = ids
        self.bench = Bench(nodes=nodes, devices=1, spec=spec).running()
        self.slow: dict[Device, float] = {}

    @property
    def shares(self) -> list[int]:
        return [len(pipeline.micro_batches) for pipeline in self.bench.plan.pipelines]

    def trains(self, steps: int = 1, until: Callable[[], bool] = lambda: False) -> Balanced:
        """As long as the plan and the devices' speeds say, each host telling of its rank."""
        for _ in range(steps):
            bench, state = self.bench, self.bench.state
            if until():
                break
            if isinstance(state, Reforming):
                self.reform()
            elif bench.record.join:
                self.stop()
            plan, number = bench.plan, bench.record.committed + 1
            layers = plan.pipelines[0].stages[0].last
            took = {device: LAYER_S * layers * self.slow.get(device, 1.0) for device in plan.devices}
            bench.now += max(took[p.stages[0].devices[0]] * len(p.micro_batches) for p in plan.pipelines)
            for device in plan.devices:
                event = StepsPassed(
                    generation=bench.record.generation,
                    answers=(an_answer(number, self.ids),),
                    at=(bench.now,),
                    paces={device: took[device]},
                )
                bench.said(device.node, event)
        return self

    def stop(self) -> None:
        generation, step = self.bench.record.generation, self.bench.record.committed
        reports = [a_report(d, generation=generation, voted=step, held=step) for d in self.bench.plan.devices]
        self.bench.reports(*(replace(report, stopped=True) for report in reports))

    def reform(self) -> None:
        self.bench.recovered()

    def told(self, kind: str) -> list[str]:
        return [entry.message for entry in self.bench.history if entry.type == kind]


def slow_one(balanced: Balanced) -> Device:
    return balanced.bench.plan.pipelines[1].stages[0].devices[0]


def test_a_slow_device_gets_fewer_ids_without_a_lost_step_and_gets_them_back() -> None:
    one = Balanced().trains(8)
    device = slow_one(one)
    assert one.shares == [6, 6]
    one.slow = {device: 2.0}
    one.trains(12)
    assert one.shares == [8, 4]
    (incident,) = one.bench.record.incidents
    assert incident.fault.cause is Cause.BALANCE and incident.rolled_back == 0
    assert str(device) in incident.fault.message and "4 micro-batches instead of 6" in incident.fault.message
    one.trains(10)
    (balanced,) = one.told("balanced")
    assert "it was 2.4" in balanced and "were expected" in balanced and one.bench.record.rebalance is None
    one.slow = {}
    one.trains(30)
    assert one.shares == [6, 6] and not one.bench.record.is_rebalanced
    assert [i.fault.cause for i in one.bench.record.incidents] == [Cause.BALANCE] * 2
    assert not one.bench.record.failures


def test_a_step_tells_for_how_long_its_ranks_compute() -> None:
    one = Balanced().trains(8)
    quick, slow = one.bench.plan.devices[0], slow_one(one)
    one.slow = {slow: 1.2}
    one.trains(8)
    layers = one.bench.plan.pipelines[0].stages[0].last
    found = one.bench.steps[-1].busy
    assert found == {quick: pytest.approx(6 * layers * LAYER_S), slow: pytest.approx(1.2 * 6 * layers * LAYER_S)}


def test_of_a_large_plan_a_step_tells_of_the_slowest_and_the_quickest() -> None:
    one = Balanced(nodes=MAX_BUSY + 4, dp=MAX_BUSY + 4, ids=MAX_BUSY + 4)
    devices = one.bench.plan.devices
    one.slow = {device: 1.0 + number / 1000 for number, device in enumerate(devices)}
    one.trains(2)
    assert set(one.bench.steps[-1].busy) == {*devices[: MAX_BUSY // 2], *devices[-MAX_BUSY // 2 :]}


def test_one_fault_while_it_stops_for_other_shares_is_recovered_from_as_any() -> None:
    one = Balanced().trains(8)
    device = slow_one(one)
    one.slow = {device: 2.0}
    one.trains(20, until=lambda: one.bench.record.join is not None)
    assert one.bench.record.rebalance is not None
    one.bench.exited(device)
    assert one.bench.record.incidents[-1].fault.cause is Cause.RANK_LOST
    one.trains(30)
    assert isinstance(one.bench.state, Running) and one.shares == [8, 4]


def test_a_device_that_comes_and_goes_is_not_followed_for_ever() -> None:
    one = Balanced().trains(8)
    device = slow_one(one)
    for _ in range(60):
        one.slow = {device: 2.0}
        one.trains(14)
        one.slow = {}
        one.trains(14)
    changes = [i for i in one.bench.record.incidents if i.fault.cause is Cause.BALANCE]
    assert 1 <= len(changes) <= MAX_CHANGES


def test_a_new_supervisor_learns_speeds_anew_and_still_knows_who_is_slow() -> None:
    one = Balanced().trains(8)
    device = slow_one(one)
    one.slow = {device: 2.0}
    one.trains(14)
    assert one.shares == [8, 4]
    one.bench.kernel = replace(one.bench.kernel, tracks={})
    one.trains(12)
    assert one.shares == [8, 4] and one.bench.record.stragglers[device].is_slow
    one.slow = {}
    assert one.trains(20).shares == [6, 6]


def test_a_loss_is_planned_from_what_ran_and_from_who_is_slow() -> None:
    one = Balanced(nodes=3).trains(8)
    before, device = one.bench.plan, slow_one(one)
    one.slow = {device: 2.0}
    one.trains(14)
    (other,) = set(before.nodes) - {device.node}
    one.bench.lose_node(other).host_gone(other)
    asked = one.bench.asked()
    assert asked.running is not None and {d for d, _ in asked.lost} == set(before.devices) and asked.horizon_steps > 0
    assert asked.speeds == {device.node: 0.5}


def test_reports_of_another_generation_say_nothing_about_this_one() -> None:
    one = Balanced().trains(8)
    device = slow_one(one)
    before = one.bench.kernel.tracks
    event = StepsPassed(generation=Generation(99), answers=(), at=(), paces={device: 99.0})
    one.bench.said(NodeId(device.node), event)
    assert one.bench.kernel.tracks == before


def test_a_remedy_is_taken_in_order_if_it_pays_for_itself() -> None:
    ids, layers = (Offer(remedy=r, gain_s=g, pause_s=p) for r, g, p in ((Remedy.IDS, 0.2, 0.3), (Remedy.LAYERS, 0.5, 9.0)))
    assert choose([ids, layers], 1.0, 10_000).taken == ids
    small = replace(ids, gain_s=0.01)
    assert choose([small, layers], 1.0, 10_000).taken == layers
    few = choose([small, layers], 1.0, 10)
    assert few.taken is None and len(few.why_not) == 2 and "costs 9" in few.why_not[1]
    slow = replace(layers, pause_s=HORIZON_S)
    assert choose([slow], 1.0, 10**9).taken is None, "speeds last no longer than the horizon"


def test_only_changes_of_the_last_hour_count() -> None:
    assert recent((0.0, 100.0, 3700.0), 3800.0) == (3700.0,)


def test_who_plans_anew_is_told_what_stages_were_seen_to_take() -> None:
    one = Balanced().trains(8)
    (seen,) = one.bench.add_node(9, 1).asked().measured
    layers = one.bench.plan.pipelines[0].stages[0].last
    assert (seen.tp, seen.first, seen.last) == (1, 0, layers)
    assert abs(seen.seconds - LAYER_S * layers) < 1e-9
