"""Layers over stages, ids over pipelines, owned state over replicas: as good as trying everything."""

from __future__ import annotations

from itertools import accumulate, combinations, pairwise, product

from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.planner_gap import all_splits
from orchestrator.planner.shares import Holder, Pace, fill_water, share_ids, spread
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


PARTS = 4
spans = st.sampled_from([(a, b) for a in range(PARTS) for b in range(a + 1, PARTS + 1)])
some_holders = st.lists(
    st.builds(
        lambda span, room, rate, count: Holder(*span, float(room), float(rate), count),
        spans,
        st.integers(0, 9),
        st.integers(1, 4),
        st.integers(1, 2),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=200, deadline=None)
@given(some_holders, st.lists(st.integers(0, 9), min_size=PARTS, max_size=PARTS))
def test_state_is_spread_over_unequal_spans_as_well_as_can_be(holders: list[Holder], amounts: list[int]) -> None:
    def needs(parts: tuple[int, ...]) -> float:
        """No spread is better: these parts alone, were the rest not there, take all who hold one of them so long."""
        mine = [one for one in holders if any(one.first <= part < one.last for part in parts)]
        amount = sum(amounts[part] for part in parts)
        filled = fill_water([o.room * o.count for o in mine], [o.rate * o.count for o in mine], amount) if mine else None
        if filled is None:
            return float("inf") if amount else 0.0
        return max(part / (one.rate * one.count) for part, one in zip(filled, mine, strict=True))

    least = max(needs(parts) for size in range(1, PARTS + 1) for parts in combinations(range(PARTS), size))
    found = spread([float(amount) for amount in amounts], holders)
    if least == float("inf"):
        assert found is None
        return
    assert found is not None
    for part, amount in enumerate(amounts):
        taken = sum(
            h.count * mine[part - h.first] for h, mine in zip(holders, found, strict=True) if h.first <= part < h.last
        )
        assert abs(taken - amount) <= 1e-6
    assert all(each >= 0.0 for mine in found for each in mine)
    assert all(sum(mine) <= holder.room + 1e-6 for holder, mine in zip(holders, found, strict=True))
    assert max(sum(mine) / holder.rate for holder, mine in zip(holders, found, strict=True)) <= least + 1e-6


def test_those_with_most_to_spare_are_not_asked_for_more_than_the_fullest_need() -> None:
    """What only one holds is that one's; the others share the rest evenly, not up to the same level."""
    found = spread([8.0, 6.0], [Holder(0, 1, 99.0, 1.0), Holder(0, 2, 99.0, 1.0), Holder(1, 2, 99.0, 1.0, 2)])
    assert found is not None
    loads = sorted(round(sum(mine), 6) for mine in found)
    assert loads == [3.0, 4.0, 4.0]
