"""Layers over stages, ids over pipelines, owned state over replicas: as good as trying everything."""

from __future__ import annotations

from itertools import accumulate, pairwise, product

from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.planner_gap import all_splits
from orchestrator.planner.shares import Pace, fill_water, share_ids
from orchestrator.planner.split import exact_split

layer_costs = st.lists(st.integers(1, 20), min_size=1, max_size=8)
speeds = st.lists(st.integers(1, 5), min_size=1, max_size=5)


def prefix(values: list[float]) -> list[float]:
    return [0.0, *accumulate(values)]


@settings(max_examples=80, deadline=None)
@given(
    layer_costs,
    speeds,
    st.lists(st.integers(0, 6), min_size=5, max_size=5),
    st.integers(0, 60),
    st.booleans(),
    st.booleans(),
)
def test_the_slowest_stage_is_as_fast_as_in_any_split(
    costs: list[int], paces: list[int], extra: list[int], room: int, is_tight: bool, is_regular: bool
) -> None:
    if is_regular:
        costs = [min(costs[0], 3), *([3] * (len(costs) - 1)), costs[-1] + 3]
    depth, layers = len(paces), len(costs)
    seconds = [prefix([cost / pace for cost in costs]) for pace in paces]
    # Bytes fall from stage to stage, as those of micro-batches in flight do.
    held = [prefix([cost * (depth - i) for cost in costs]) if is_tight else [] for i in range(depth)]

    def slowest(bounds: tuple[int, ...]) -> float:
        return max(seconds[i][bounds[i + 1]] - seconds[i][bounds[i]] + extra[i] for i in range(depth))

    def fits(bounds: tuple[int, ...]) -> bool:
        return not is_tight or all(held[i][bounds[i + 1]] - held[i][bounds[i]] <= room + 20 for i in range(depth))

    best = min((slowest(bounds) for bounds in all_splits(layers, depth) if fits(bounds)), default=None)
    found = exact_split(
        seconds, held, [float(room + 20)] * depth, [float(one) for one in extra[:depth]], is_regular=is_regular
    )
    if best is None:
        assert found is None
        return
    assert found is not None and fits(found)
    assert found[0] == 0 and found[-1] == layers and all(a < b for a, b in pairwise(found))
    assert abs(slowest(found) - best) <= 1e-9 * best


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9), st.integers(1, 3)), min_size=1, max_size=4),
    st.integers(1, 14),
)
def test_ids_are_shared_so_that_the_last_pipeline_ends_as_early_as_can_be(
    pipelines: list[tuple[int, int, int]], total: int
) -> None:
    paces = [Pace(start, period, least) for start, period, least in pipelines]

    def end(ids: tuple[int, ...]) -> float:
        return max(pace.start + pace.period * mine for pace, mine in zip(paces, ids, strict=True))

    everything = [ids for ids in product(*(range(pace.least, total + 1) for pace in paces)) if sum(ids) == total]
    found = share_ids(paces, total)
    if not everything:
        assert found is None
        return
    assert found is not None
    ids = tuple(mine[0] for mine in found)
    assert sum(ids) == total and all(mine >= pace.least for mine, pace in zip(ids, paces, strict=True))
    assert end(ids) <= min(map(end, everything)) * (1 + 1e-12)


def test_pipelines_alike_get_as_many_ids_but_for_one() -> None:
    found = share_ids([Pace(1.0, 0.5, 2, 3), Pace(1.0, 1.0, 2, 2)], 23)
    assert found is not None
    assert sum(map(sum, found)) == 23
    assert all(max(mine) - min(mine) <= 1 for mine in found)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 5)), min_size=1, max_size=3), st.integers(1, 40))
def test_water_fills_what_is_free_and_nobody_is_over(replicas: list[tuple[int, int]], amount: int) -> None:
    room, rates = [float(a) for a, _ in replicas], [float(b) for _, b in replicas]
    found = fill_water(room, rates, amount)
    if sum(room) < amount:
        assert found is None
        return
    assert found is not None
    assert abs(sum(found) - amount) < 1e-9 * amount
    assert all(-1e-12 <= part <= space + 1e-9 for part, space in zip(found, room, strict=True))
    level = max(part / rate for part, rate in zip(found, rates, strict=True))
    # Whoever is below the level is full: nothing can be taken off those that are at it.
    for part, space, rate in zip(found, room, rates, strict=True):
        assert part / rate >= level - 1e-9 or part >= space - 1e-9
