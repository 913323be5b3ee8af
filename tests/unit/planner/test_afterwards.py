"""A loss in a job on mixed kinds: what is whole goes on where it is, and nothing moves that need not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.domain.effects import ChoosePlan
from orchestrator.domain.ids import Device, Generation, JobId, NodeId
from orchestrator.domain.layout import layout, transfers
from orchestrator.domain.plan import Pipeline, Plan, Stage
from orchestrator.planner.afterwards import look_ahead
from orchestrator.planner.choose import choose
from tests.builders import a_profile, a_spec

KINDS = ("A100", "A100", "H100", "B200")
DEVICES = tuple((Device(NodeId(f"n{number}"), 0), kind) for number, kind in enumerate(KINDS))


def asked(**parallel: int) -> ChoosePlan:
    spec = a_spec(tp=1, micro_batches=24)
    train = replace(spec.train, emulated_layer_s=0.02)
    spec = replace(spec, train=train, parallel=replace(spec.parallel, **parallel))
    return ChoosePlan(job=JobId("j"), generation=Generation(1), spec=spec, profile=a_profile(), devices=DEVICES)


def chosen(request: ChoosePlan) -> Plan:
    found = choose(request)
    assert isinstance(found, Plan)
    return found


def without(request: ChoosePlan, node: str, running: Plan, steps: float = 1000.0) -> ChoosePlan:
    left = tuple((device, kind) for device, kind in request.devices if device.node != node)
    return replace(request, devices=left, running=running, lost=DEVICES, horizon_steps=steps)


def ids_of(plan: Plan) -> dict[str, int]:
    return {p.stages[0].devices[0].node: len(p.micro_batches) for p in plan.pipelines}


@pytest.mark.parametrize("node", ["n0", "n2", "n3"])
def test_the_others_take_the_ids_of_a_lost_pipeline(node: str) -> None:
    request = asked(pp=1)
    before = chosen(request)
    after = chosen(without(request, node, before))
    assert node not in after.nodes and {p.stages for p in after.pipelines} < {p.stages for p in before.pipelines}
    assert sorted(i for p in after.pipelines for i in p.micro_batches) == list(range(24))
    fresh = chosen(replace(without(request, node, before), running=None))
    assert sorted(ids_of(after).values()) == sorted(ids_of(fresh).values()), "as fast as if it had been planned anew"
    assert "the others take their ids and" in after.reason


def test_only_what_the_lost_one_owned_is_given_to_others() -> None:
    request = asked(pp=1)
    before = chosen(request)
    after, profile = chosen(without(request, "n3", before)), request.profile
    held = layout(before, profile, mirrors=1)
    sources = {device: held.held(device) for device in after.devices}
    moved = [m for m in transfers(sources, layout(after, profile, mirrors=1)).moves if m.source != m.target]
    assert not transfers(sources, layout(after, profile, mirrors=1)).missing
    assert len({move.source for move in moved}) > 1, "no single holder is asked for everything"
    gigabytes = float(after.reason.split("take their ids and ")[1].split(" GB")[0])
    really = 12 * sum(len(move.interval) for move in moved) / 1e9
    assert 0.3 * really < gigabytes < 3 * really, "about what is said to move does"


def test_a_plan_that_was_shared_out_anew_is_gone_on_from_all_the_same() -> None:
    request = asked(pp=1)
    before = chosen(request)
    even = [replace(pipeline, micro_batches=tuple(range(6))) for pipeline in before.pipelines]
    odd = replace(before, pipelines=tuple(even))
    after = chosen(without(request, "n3", odd))
    assert {p.stages for p in after.pipelines} < {p.stages for p in before.pipelines} and after.dp == 3
    assert ids_of(after) == ids_of(chosen(without(request, "n3", before)))


def test_where_no_pipeline_is_whole_it_is_cut_anew() -> None:
    request = asked(dp=1)
    devices = [device for device, _ in DEVICES]
    stages = tuple(Stage(first=i, last=i + 1, devices=(device,)) for i, device in enumerate(devices))
    before = Plan(pipelines=(Pipeline(stages=stages, micro_batches=tuple(range(24))),))
    after = chosen(without(request, "n0", before))
    assert "n0" not in after.nodes and after.pipelines[0].stages[-1].last == 4


def test_a_slow_node_is_planned_as_slow_as_it_is() -> None:
    request = asked(pp=1)
    slow = chosen(replace(request, speeds={NodeId("n3"): 0.5}))
    assert ids_of(slow)["n3"] < ids_of(chosen(request))["n3"]
    alike = replace(request, devices=tuple((device, "A100") for device, _ in DEVICES), speeds={NodeId("n1"): 0.5})
    assert ids_of(chosen(alike))["n1"] < min(n for node, n in ids_of(chosen(alike)).items() if node != "n1")


@pytest.mark.parametrize("node", ["n0", "n1", "n2", "n3"])
def test_what_was_searched_before_the_loss_gives_the_same_plan(node: str) -> None:
    request = asked(pp=1)
    loss = without(request, node, chosen(request))
    ahead = look_ahead(request)
    assert ahead.ready and choose(loss, ahead) == chosen(loss)


def test_the_order_of_devices_changes_nothing() -> None:
    request = asked(pp=1)
    loss = without(request, "n1", chosen(request))
    assert chosen(replace(loss, devices=loss.devices[::-1], lost=loss.lost[::-1])) == chosen(loss)
