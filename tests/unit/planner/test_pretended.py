"""A job whose processors stand for other kinds of device is planned as if they were those."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.domain.effects import ChoosePlan
from orchestrator.domain.ids import Device, Generation, JobId, NodeId
from orchestrator.domain.plan import Plan
from orchestrator.planner.choose import choose
from tests.builders import a_profile, a_spec

KINDS = ("A100", "A100", "H100", "B200")


def planned(layer_s: float, **parallel: int) -> Plan:
    spec = a_spec(tp=1, micro_batches=24)
    spec = replace(
        spec,
        train=replace(spec.train, emulated_layer_s=layer_s),
        parallel=replace(spec.parallel, **parallel),
    )
    devices = tuple((Device(NodeId(f"n{number}"), 0), kind) for number, kind in enumerate(KINDS))
    asked = ChoosePlan(job=JobId("j"), generation=Generation(1), spec=spec, profile=a_profile(), devices=devices)
    found = choose(asked)
    assert isinstance(found, Plan)
    return found


def test_each_takes_ids_by_the_speed_it_stands_for() -> None:
    plan = planned(0.02, pp=1)
    ids = {pipeline.stages[0].devices[0].node: len(pipeline.micro_batches) for pipeline in plan.pipelines}
    assert ids == {"n0": 2, "n1": 2, "n2": 6, "n3": 14}


def test_without_pretence_all_are_alike() -> None:
    plan = planned(0.0, pp=1)
    assert {len(pipeline.micro_batches) for pipeline in plan.pipelines} == {6}


@pytest.mark.parametrize(("most", "nodes"), [(1, {"n3"}), (2, {"n2", "n3"}), (3, {"n0", "n2", "n3"})])
def test_a_job_that_may_have_fewer_devices_has_the_fastest(most: int, nodes: set[str]) -> None:
    plan = planned(0.02, max_devices=most)
    assert {device.node for device in plan.devices} == nodes
    assert f"max_devices is {most}" in plan.reason


def test_a_job_that_wants_all_devices_has_all_of_them() -> None:
    """Also where fewer would be as fast."""
    assert planned(0.02, min_devices=4, pp=1).world_size == 4
    assert planned(0.02, min_devices=4, max_devices=4).world_size == 4
