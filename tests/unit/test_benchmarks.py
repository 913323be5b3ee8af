"""What the benchmarks compute from what they measured."""

from __future__ import annotations

from itertools import pairwise
from random import Random
from statistics import median

import pytest

from benchmarks import resizes
from benchmarks.soak import SHAPES
from benchmarks.stats import StepTime, medians_by_name, paired_ratio, quantile, step_times, within


def test_a_step_under_way_at_either_end_of_a_block_does_not_count() -> None:
    steps = step_times([0.9, 1.2, 1.5, 1.9, 2.1])
    assert within(steps, 1.0, 2.0) == pytest.approx([0.3, 0.4])


def test_a_pause_between_blocks_is_in_no_block() -> None:
    # Stopped from 2.0 to 9.0: the step that spans the stop ends within the second block's warm-up.
    steps = step_times([1.4, 1.7, 9.3, 9.6, 9.9, 10.2])
    assert within(steps, 9.5, 10.5) == pytest.approx([0.3, 0.3])


def test_one_instant_is_no_step() -> None:
    assert step_times([1.0]) == []
    assert within([], 0.0, 1.0) == []
    assert within([StepTime(at=1.0, seconds=0.5)], 0.5, 1.0) == [0.5]


def test_the_ratio_of_paired_blocks_ignores_a_drift_that_both_share() -> None:
    drift = [1.0 + 0.2 * block for block in range(20)]
    found = paired_ratio([1.03 * x for x in drift], drift)
    assert found.value == pytest.approx(1.03)
    assert found.low == pytest.approx(1.03)
    assert found.high == pytest.approx(1.03)


def test_the_interval_covers_the_true_ratio_about_nineteen_times_of_twenty() -> None:
    random, covered, trials = Random(7), 0, 60
    for trial in range(trials):
        ours = [1.05 * random.lognormvariate(0.0, 0.04) for _ in range(20)]
        theirs = [random.lognormvariate(0.0, 0.04) for _ in range(20)]
        found = paired_ratio(ours, theirs, seed=trial)
        assert found.low < found.value < found.high
        covered += found.low <= 1.05 <= found.high
    assert covered >= 0.85 * trials


def test_the_same_blocks_give_the_same_interval() -> None:
    ours, theirs = [1.0, 1.1, 0.9, 1.2], [1.0, 1.0, 1.0, 1.0]
    assert paired_ratio(ours, theirs) == paired_ratio(ours, theirs)


def test_ratio_and_interval_turn_over_when_the_two_change_places() -> None:
    ours, theirs = [1.0, 1.1, 0.9, 1.2, 1.05], [1.0, 1.2, 1.0, 1.0, 0.95]
    there, back = paired_ratio(ours, theirs), paired_ratio(theirs, ours)
    assert there.value * back.value == pytest.approx(1.0)
    assert there.low * back.high == pytest.approx(1.0, rel=0.02)


def test_one_block_has_no_interval() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        paired_ratio([1.0], [1.0])


def test_blocks_without_a_partner_are_refused() -> None:
    with pytest.raises(ValueError):
        paired_ratio([1.0, 1.0, 1.0], [1.0, 1.0])


@pytest.mark.parametrize(("share", "expected"), [(0.0, 1.0), (0.5, 2.5), (0.95, 3.85), (1.0, 4.0)])
def test_a_quantile_lies_between_its_neighbours(share: float, expected: float) -> None:
    assert quantile([4.0, 1.0, 3.0, 2.0], share) == pytest.approx(expected)


def test_the_middle_quantile_is_the_median() -> None:
    values = [3.0, 9.0, 1.0, 4.0, 7.0]
    assert quantile(values, 0.5) == median(values)
    with pytest.raises(ValueError, match="measure something"):
        quantile([], 0.5)


def test_phases_that_only_some_recoveries_have_are_medians_of_those() -> None:
    rows = [{"detect": 0.01, "transfer": 0.2}, {"detect": 0.03}, {"detect": 0.02, "transfer": 0.4}]
    assert medians_by_name(rows) == pytest.approx({"detect": 0.02, "transfer": 0.3})


@pytest.mark.parametrize("shape", list(SHAPES))
def test_a_script_of_changes_asks_for_another_size_each_time(shape: str) -> None:
    sizes = SHAPES[shape].sizes
    script = resizes.draw(Random(5), sizes, 60)
    asked = [max(sizes), *(one for one in script if one != resizes.DRAIN)]
    assert script == resizes.draw(Random(5), sizes, 60) and set(script) == {resizes.DRAIN, *sizes}
    assert all(one != other for one, other in pairwise(asked))
    assert max(sizes) == sum(node.num_devices for node in SHAPES[shape].nodes)
