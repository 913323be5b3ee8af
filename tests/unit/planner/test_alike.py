"""Alike devices get layers by parameters, and by the times of stages once these were seen."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from orchestrator.domain.balance import StageTime
from orchestrator.domain.effects import ChoosePlan
from orchestrator.domain.ids import Generation, JobId
from orchestrator.domain.plan import Plan
from orchestrator.planner.alike import layer_bounds, longest
from orchestrator.planner.choose import choose
from orchestrator.planner.rectangular import cost_of
from tests.builders import a_device, a_profile, a_spec


def request(*measured: tuple[int, int, float], pp: int | None = 2, devices: int = 4, layers: int = 8) -> ChoosePlan:
    """measured: (first layer, last, seconds)."""
    return ChoosePlan(
        job=JobId("j"),
        generation=Generation(1),
        spec=a_spec(tp=1, pp=pp, micro_batches=8),
        profile=a_profile(layers=layers),
        devices=tuple((a_device(number), "A100") for number in range(devices)),
        measured=tuple(StageTime(kind="A100", tp=1, first=a, last=b, seconds=seconds) for a, b, seconds in measured),
    )


def split(asked: ChoosePlan) -> list[list[tuple[int, int]]]:
    plan = choose(asked)
    assert isinstance(plan, Plan)
    return [[(stage.first, stage.last) for stage in pipeline.stages] for pipeline in plan.pipelines]


def test_a_heavy_stage_gets_fewer_layers_once_it_has_been_seen_to_be() -> None:
    assert split(request()) == [[(0, 4), (4, 8)]] * 2
    asked = request((0, 4, 1.0), (4, 8, 2.0))
    assert split(asked) == [[(0, 5), (5, 8)]] * 2, "1.5 s where it was 2"
    plan = choose(asked)
    assert isinstance(plan, Plan) and plan.reason.endswith("layers are split by the times that stages were seen to take")
    assert longest(asked, 2) == 4.0, "1.5 s of 0.375 s a layer"


def test_noise_and_what_was_only_seen_as_a_whole_change_nothing() -> None:
    for measured in ([(0, 4, 1.0), (4, 8, 1.1)], [(0, 8, 3.0)], [(0, 4, 1.0)], [(0, 4, 0.0), (4, 8, 2.0)]):
        asked = request(*measured)
        assert choose(asked) == choose(request()), measured
        assert layer_bounds(asked, 4) == [0, 2, 4, 6, 8]


def test_times_of_one_split_serve_another_number_of_stages() -> None:
    assert layer_bounds(request((0, 4, 1.0), (4, 8, 4.0)), 5) == [0, 4, 5, 6, 7, 8]
    assert max(b - a for a, b in pairwise(layer_bounds(request(), 5))) == 2


def test_a_pipeline_that_cannot_be_even_costs_what_its_slowest_stage_takes() -> None:
    """Where one layer takes half of the time, four stages are no faster than two."""
    seen = request((0, 7, 1.0), (7, 8, 1.0), pp=None)
    even = request((0, 7, 7.0), (7, 8, 1.0), pp=None)
    four, two = (
        choose(replace(request(pp=pp, devices=pp), spec=a_spec(tp=1, pp=pp, dp=1, micro_batches=8))) for pp in (4, 2)
    )
    assert isinstance(four, Plan) and isinstance(two, Plan)
    assert cost_of(seen, four) > cost_of(seen, two) and cost_of(even, four) < cost_of(even, two)


def test_a_split_that_does_not_fit_memory_is_left_for_the_usual_one() -> None:
    """Activations of five layers do not fit a V100, of four they do."""
    profile = replace(a_profile(layers=8), activation_bytes=int(1.6 * (1 << 30)))
    asked = replace(request((0, 4, 1.0), (4, 8, 3.0)), profile=profile)
    assert split(asked) == [[(0, 5), (5, 8)]] * 2
    small = replace(asked, devices=tuple((device, "V100") for device, _ in asked.devices))
    assert split(small) == [[(0, 4), (4, 8)]] * 2


def test_a_usual_split_that_memory_leaves_is_judged_by_the_same_times() -> None:
    """tp2 x pp2 in halves takes 9 x 6 units of half a layer, not 9 x 4, and tp4 fits."""
    profile = replace(a_profile(layers=8), activation_bytes=int(3.5 * (1 << 30)))
    asked = request((0, 4, 1.0), (4, 8, 3.0), pp=None)
    one_node = tuple((a_device(0, index), "V100") for index in range(4))
    asked = replace(asked, profile=profile, devices=one_node, spec=a_spec(dp=1, micro_batches=8))
    found = choose(asked)
    assert isinstance(found, Plan) and found.tp == 4, found.reason
    assert longest(asked, 2) == 4.5 and longest(asked, 2, usual=True) == 6.0
    assert longest(replace(asked, measured=()), 2) == 4.0
