"""Layout and transfers as properties: over random programs, plans and losses nothing is lost or copied twice."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.domain.ids import Device, NodeId
from orchestrator.domain.layout import buckets, layout, partners, transfers
from orchestrator.domain.plan import Pipeline, Plan, Stage
from orchestrator.domain.profile import BLOCK, Interval, Line, Profile
from tests.builders import a_device, a_plan

NUM_LAYERS = 6


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    lines = []
    for layer in range(NUM_LAYERS):
        for number in range(draw(st.integers(1, 3))):
            split = draw(st.booleans())
            rows = 4 * draw(st.integers(1, 12)) if split else draw(st.integers(1, 50))
            layers = (layer,) if layer or not draw(st.booleans()) else (0, NUM_LAYERS - 1)
            lines.append(
                Line(
                    name=f"{layer}.{number}",
                    shape=(rows, draw(st.integers(1, 40))),
                    split=split,
                    layers=layers,
                    decay=draw(st.booleans()),
                )
            )
    return Profile(num_layers=NUM_LAYERS, lines=tuple(lines), divisors=(), activation_bytes=0)


@st.composite
def plans(draw: st.DrawFn, offset: int = 0) -> Plan:
    """tp 1, 2 or 4; up to three pipelines, each of its own depth, layer split and shares; nodes of random size."""
    tp = draw(st.sampled_from([1, 2, 4]))
    splits = []
    for _ in range(draw(st.integers(1, 3))):
        cuts = draw(st.sets(st.integers(1, NUM_LAYERS - 1), max_size=3))
        splits.append([0, *sorted(cuts), NUM_LAYERS])
    total = tp * sum(len(split) - 1 for split in splits)
    devices = []
    while len(devices) < total:
        node = NodeId(f"n{offset + len(devices)}")
        devices += [Device(node, i) for i in range(draw(st.sampled_from([1, 2, 4])))]
    devices = draw(st.permutations(devices[:total]))
    taken = iter(devices)
    is_told = draw(st.booleans())

    def shares(layers: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(0, 5)) for _ in range(layers)) if is_told or draw(st.integers(0, 3)) == 0 else ()

    pipelines = tuple(
        Pipeline(
            stages=tuple(
                Stage(first=first, last=last, devices=tuple(next(taken) for _ in range(tp)), shares=shares(last - first))
                for first, last in pairwise(split)
            ),
            micro_batches=(number,),
        )
        for number, split in enumerate(splits)
    )
    return Plan(pipelines=pipelines)


def elements(intervals: Iterable[Interval]) -> dict[tuple[str, int], int]:
    """How often each element occurs."""
    count: dict[tuple[str, int], int] = defaultdict(int)
    for interval in intervals:
        for position in range(interval.start, interval.stop):
            count[interval.line, position] += 1
    return count


def every_element(profile: Profile) -> set[tuple[str, int]]:
    return {(line.name, position) for line in profile.lines for position in range(line.numel)}


@settings(max_examples=60, deadline=None)
@given(profiles(), plans())
def test_owners_partition_every_line(profile: Profile, plan: Plan) -> None:
    owned = elements(i for held in layout(plan, profile, mirrors=1).owned.values() for i in held)
    assert owned == dict.fromkeys(every_element(profile), 1)


@settings(max_examples=40, deadline=None)
@given(profiles(), plans())
def test_every_interval_is_mirrored_once_on_another_device(profile: Profile, plan: Plan) -> None:
    held = layout(plan, profile, mirrors=1)
    partner = partners(plan)
    if plan.world_size == 1:
        assert not partner and not held.mirrored
        return
    assert sorted(partner) == sorted(partner.values()) == sorted(plan.devices)
    for owner, mirror in partner.items():
        assert owner != mirror
        assert held.mirrored[mirror] == held.owned[owner]


@settings(max_examples=60, deadline=None)
@given(plans())
def test_mirrors_are_on_another_node_unless_one_node_has_more_than_half(plan: Plan) -> None:
    sizes = [sum(device.node == node for device in plan.devices) for node in plan.nodes]
    if len(sizes) > 1 and 2 * max(sizes) <= sum(sizes):
        assert all(owner.node != mirror.node for owner, mirror in partners(plan).items())


@st.composite
def plans_in_racks(draw: st.DrawFn) -> Plan:
    """Some nodes have no rack: each is a domain by itself."""
    plan = draw(plans())
    racks = {node: draw(st.sampled_from([None, "rack=1", "rack=2", "rack=3"])) for node in plan.nodes}
    return replace(plan, domains={node: rack for node, rack in racks.items() if rack})


@settings(max_examples=200, deadline=None)
@given(plans_in_racks(), st.randoms())
def test_mirrors_share_a_domain_or_a_node_only_as_often_as_they_must(plan: Plan, random: Random) -> None:
    partner = partners(plan)
    domain = {node: plan.domains.get(node, node) for node in plan.nodes}
    count = plan.world_size
    largest_node = max(Counter(device.node for device in plan.devices).values())
    largest_domain = max(Counter(domain[device.node] for device in plan.devices).values())
    inside = sum(domain[owner.node] == domain[mirror.node] for owner, mirror in partner.items())
    on_node = sum(owner.node == mirror.node for owner, mirror in partner.items())
    assert sorted(partner) == sorted(partner.values()) == (sorted(plan.devices) if count > 1 else [])
    assert all(owner != mirror for owner, mirror in partner.items())
    if count > 1:
        assert on_node == max(0, 2 * largest_node - count)
        if 2 * largest_node <= count or largest_node == largest_domain:
            assert inside == max(0, 2 * largest_domain - count)
    shuffled = list(plan.domains.items())
    random.shuffle(shuffled)
    assert partners(replace(plan, domains=dict(shuffled))) == partner


def test_who_takes_a_place_takes_its_partners() -> None:
    """Whatever it is called: nobody else's mirror moves when one node is replaced by another."""
    old = a_plan([a_device(node, index) for node in range(4) for index in range(2)], tp=2, pp=2)
    new = a_plan([a_device(9 if node == 1 else node, index) for node in range(4) for index in range(2)], tp=2, pp=2)
    renamed = {before: after for before, after in zip(old.devices, new.devices, strict=True)}
    assert partners(new) == {renamed[owner]: renamed[mirror] for owner, mirror in partners(old).items()}


@settings(max_examples=60, deadline=None)
@given(profiles(), plans())
def test_bucket_members_are_exactly_the_ranks_that_compute_with_its_lines(profile: Profile, plan: Plan) -> None:
    lines = {line.name: line for line in profile.lines}
    for bucket in buckets(plan, profile):
        assert len(set(bucket.members)) == len(bucket.members)
        assert all(cut % BLOCK == 0 for cut in bucket.cuts) and list(bucket.cuts) == sorted(bucket.cuts)
        assert bucket.cuts[0] == 0
        for part in bucket.parts:
            line = lines[part.interval.line]
            users = {
                seat.rank
                for seat in plan.seats
                if any(plan.stage_at(seat).first <= layer < plan.stage_at(seat).last for layer in line.layers)
                and (not line.split or seat.tp * (line.numel // plan.tp) == part.interval.start)
            }
            assert set(bucket.members) == users
            assert part.offset % BLOCK == 0 and part.offset + len(part.interval) <= bucket.size


def test_who_has_twice_the_share_owns_twice_as_much() -> None:
    lines = (Line(name="w", shape=(60, BLOCK), split=True, layers=(0,), decay=True),)
    profile = Profile(num_layers=1, lines=lines, divisors=(), activation_bytes=0)
    plan = a_plan([a_device(node) for node in range(3)], layers=1)

    def owned(*weights: tuple[int, ...]) -> list[int]:
        pipelines = tuple(
            replace(one, stages=(replace(one.stages[0], shares=mine),))
            for one, mine in zip(plan.pipelines, weights, strict=True)
        )
        held = layout(replace(plan, pipelines=pipelines), profile, mirrors=1)
        return [sum(map(len, held.owned[device])) // BLOCK for device in plan.devices]

    assert owned((1,), (2,), (3,)) == [10, 20, 30]
    assert owned((0,), (7,), (0,)) == [0, 60, 0]
    assert owned((), (), ()) == owned((5,), (5,), (5,)) == owned((0,), (0,), (0,)) == owned((1,), (), (9,)) == [20, 20, 20]


def test_a_share_is_given_for_every_layer_or_for_none() -> None:
    """Or one for all of them."""
    assert [Stage(first=1, last=4, devices=(a_device(0),), shares=(7,)).share_of(layer) for layer in (1, 2, 3)] == [7, 7, 7]
    with pytest.raises(ValueError, match="one a layer"):
        Stage(first=0, last=3, devices=(a_device(0),), shares=(1, 2))


@settings(max_examples=60, deadline=None)
@given(profiles(), plans(), plans(), st.data())
def test_transfers_fill_every_target_once_from_living_holders_and_name_what_is_missing(
    profile: Profile, old: Plan, new: Plan, data: st.DataObject
) -> None:
    before, after = layout(old, profile, mirrors=1), layout(new, profile, mirrors=1)
    alive = data.draw(st.sets(st.sampled_from(old.devices), min_size=1))
    sources = {device: before.held(device) for device in alive}
    result = transfers(sources, after)
    available = set(elements(i for held in sources.values() for i in held))
    held_by = {device: set(elements(held)) for device, held in sources.items()}
    arrived: dict[Device, list[Interval]] = defaultdict(list)
    for move in result.moves:
        assert move.source in alive
        assert set(elements([move.interval])) <= held_by[move.source]
        if move.source != move.target and move.target in alive:
            assert not set(elements([move.interval])) & held_by[move.target], "fetched what it had"
        arrived[move.target].append(move.interval)
    missing = elements(result.missing)
    for device in new.devices:
        wanted = set(elements(after.held(device)))
        got = elements(arrived[device])
        assert set(got) == wanted & available
        assert all(count == 1 for count in got.values())
        assert wanted - available <= set(missing)
    assert not set(missing) & available


@settings(max_examples=30, deadline=None)
@given(profiles(), plans())
def test_an_unchanged_plan_moves_nothing_between_devices(profile: Profile, plan: Plan) -> None:
    held = layout(plan, profile, mirrors=1)
    result = transfers({device: held.held(device) for device in plan.devices}, held)
    assert not result.missing
    assert all(move.source == move.target for move in result.moves)


@settings(max_examples=30, deadline=None)
@given(profiles(), plans(), st.data())
def test_any_one_device_can_be_lost_without_missing_anything(profile: Profile, plan: Plan, data: st.DataObject) -> None:
    if plan.world_size == 1:
        return
    held = layout(plan, profile, mirrors=1)
    lost = data.draw(st.sampled_from(plan.devices))
    result = transfers({d: held.held(d) for d in plan.devices if d != lost}, held)
    assert not result.missing


@pytest.mark.parametrize("count", [2, 3, 4, 8])
def test_one_of_d_replicas_that_is_replaced_moves_a_dth_of_all_that_is_held(count: int) -> None:
    line = Line(name="0.w", shape=(count, 8, BLOCK), split=True, layers=(0,), decay=True)
    profile = Profile(num_layers=1, lines=(line,), divisors=(), activation_bytes=64)
    plan = a_plan([a_device(node) for node in range(count)], layers=1)
    whole = layout(plan, profile, mirrors=1)
    held = {device: whole.held(device) for device in plan.devices}
    total = sum(len(interval) for intervals in held.values() for interval in intervals)
    for lost in plan.devices:
        left = {device: intervals for device, intervals in held.items() if device != lost}
        found = transfers(left, whole)
        moved = sum(len(move.interval) for move in found.moves if move.source != move.target)
        assert not found.lacking and moved * count == total
