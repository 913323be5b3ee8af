"""The running plan shared out anew: nobody moves, and no whole share of ids or layers would end earlier."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product

import pytest

from orchestrator.domain.ids import Device
from orchestrator.domain.plan import Pipeline, Plan
from orchestrator.planner.rebalance import (
    compute_s,
    layer_bytes,
    room_of,
    with_other_ids,
    with_other_layers,
    with_spare,
)
from tests.builders import a_device, a_plan, a_profile, a_spec

LAYERS, IDS = 6, 12
EACH = [1.0] * LAYERS


def plan(dp: int, pp: int) -> Plan:
    made = a_plan((a_device(i) for i in range(dp * pp)), pp=pp, layers=LAYERS)
    share = IDS // dp
    ids = [tuple(range(i * share, (i + 1) * share)) for i in range(dp)]
    pipelines = [replace(p, micro_batches=mine) for p, mine in zip(made.pipelines, ids, strict=True)]
    return replace(made, pipelines=tuple(pipelines))


def speeds(plan: Plan, **slow: float) -> dict[Device, float]:
    return {device: slow.get(str(device.node), 1.0) for device in plan.devices}


def best(plan: Plan, speed: dict[Device, float], layers: bool) -> float:
    """By trying every share."""
    depth = plan.pp
    cuts = [(0, *inner, LAYERS) for inner in combinations(range(1, LAYERS), depth - 1)] if layers else None
    found = float("inf")
    for ids in product(range(depth, IDS), repeat=plan.dp):
        if sum(ids) == IDS:
            ends = []
            for pipeline, number in zip(plan.pipelines, ids, strict=True):
                numbers = tuple(range(number))
                options = cuts or [(*(stage.first for stage in pipeline.stages), LAYERS)]
                ends.append(min(_ends(pipeline, bounds, numbers, speed) for bounds in options))
            found = min(found, max(ends))
    return found


def _ends(pipeline: Pipeline, bounds: tuple[int, ...], numbers: tuple[int, ...], speed: dict[Device, float]) -> float:
    stages = tuple(replace(s, first=bounds[i], last=bounds[i + 1]) for i, s in enumerate(pipeline.stages))
    return compute_s(Plan(pipelines=(Pipeline(stages=stages, micro_batches=numbers),)), speed)


@pytest.mark.parametrize(("dp", "pp"), [(2, 1), (3, 1), (2, 2), (2, 3)])
@pytest.mark.parametrize("factor", [1.5, 2.0, 3.7])
def test_no_share_of_ids_ends_earlier(dp: int, pp: int, factor: float) -> None:
    even = plan(dp, pp)
    slow = speeds(even, n1=factor)
    found = with_other_ids(even, slow) or even
    assert compute_s(found, slow) == pytest.approx(best(even, slow, layers=False))
    assert sorted(number for p in found.pipelines for number in p.micro_batches) == list(range(IDS))
    assert [p.stages for p in found.pipelines] == [p.stages for p in even.pipelines]
    back = with_other_ids(found, speeds(even))
    assert back is None or back.pipelines == even.pipelines, "well again, it is given its share back"


@pytest.mark.parametrize("pp", [2, 3])
@pytest.mark.parametrize("factor", [2.0, 3.0])
def test_layers_are_cut_where_the_slow_one_holds_its_pipeline_up(pp: int, factor: float) -> None:
    even = plan(2, pp)
    slow = speeds(even, n1=factor)
    found = with_other_layers(even, slow, dict.fromkeys(even.devices, 100.0), EACH)
    assert found is not None and found.devices == even.devices
    assert [s.first for s in found.pipelines[1].stages] == [s.first for s in even.pipelines[1].stages], (
        "a healthy one stays"
    )
    ids = with_other_ids(even, slow) or even
    assert compute_s(found, slow) < compute_s(ids, slow)
    assert compute_s(found, slow) <= best(even, slow, layers=True) * 1.1


def test_layers_that_do_not_fit_anybody_stay_where_they_are() -> None:
    even = plan(2, 2)
    slow = speeds(even, n1=2.0)
    assert with_other_layers(even, slow, dict.fromkeys(even.devices, 3.0), EACH) is None


def test_what_layers_take_is_at_least_their_state_and_no_more_than_a_device_has() -> None:
    spec, profile = a_spec(tp=1, pp=2, dp=2), a_profile(layers=4)
    each = layer_bytes(profile, spec, a_plan((a_device(i) for i in range(4)), pp=2))
    assert len(each) == 4 and sum(each) >= profile.num_params * (8 + 12)
    assert room_of("H100") > room_of("A100-40") > room_of("of no name") > 0


def test_equal_devices_keep_their_equal_shares() -> None:
    even = plan(3, 2)
    assert with_other_ids(even, speeds(even)) is None
    assert with_other_layers(even, speeds(even), dict.fromkeys(even.devices, 9.0), EACH) is None


def test_who_stands_in_for_a_slow_one_brings_its_failure_domain_and_takes_a_whole_share() -> None:
    running = plan(3, 1)
    first, second, slow = running.devices
    racks = {first.node: "rack=a", second.node: "rack=b", slow.node: "rack=c"}
    spare = a_device(9)
    held_up = replace(with_other_ids(running, speeds(running) | {slow: 3.0}) or running, domains=racks)
    after = with_spare(held_up, {slow: spare}, {first: 1.0, second: 1.0, spare: 1.0}, {spare.node: "rack=b"})
    assert after.devices == (first, second, spare)
    assert [len(one.micro_batches) for one in after.pipelines] == [IDS // 3] * 3
    assert after.domains == {first.node: "rack=a", second.node: "rack=b", spare.node: "rack=b"}
