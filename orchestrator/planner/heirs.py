"""Who owns what lost pipelines owned: those next to them in the plan's order, as few as make none of them much slower.

Owners are cut in one piece a rank, in the plan's order (domain/layout.py). Were all of them cut anew, every cut would move,
and of d replicas about d / 4 shares with them; whoever is not near what was lost keeps just what it owned this way.

    before    | a | b | c | d | e | f | g | h |
    without d | a | b  |  c  |  e  |  f | g | h |
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from math import ceil

from orchestrator.domain.ids import Device
from orchestrator.domain.plan import Pipeline, Plan

WORTH = 0.1
"""Of what the busiest owner would have to update and pass on were all cut anew: so much more is borne, not more."""
UNIT = 10_000
"""The weight of a share where all own alike."""
Weights = list[list[int]]
"""By pipeline, of each layer."""


def in_place(plan: Plan, running: Plan, fair: Plan | None = None) -> Plan:
    """The plan with such shares; as it is where it is more than what is left of `running`, or where all have to help.

    fair: the same plan with the shares that it would have were all cut anew; None for all alike.
    """
    on = {stage.devices: number for number, one in enumerate(running.pipelines) for stage in one.stages}
    places = [_place(pipeline, running, on) for pipeline in plan.pipelines]
    kept = [place for place in places if place is not None]
    if len(kept) < len(places) or kept != sorted(set(kept)) or len(kept) == len(running.pipelines):
        return plan
    weights = _weights(running)
    if weights is None:
        return plan
    lost = sorted(set(range(len(weights))) - set(kept))
    wanted = [sum(mine) for mine in (fair and _weights(fair)) or [[1]] * len(kept)]
    most = (1 + WORTH) * sum(map(sum, weights)) / max(1, sum(wanted))
    for helpers in range(fewest_helpers(len(weights), len(kept)), len(kept)):
        found = _given(weights, lost, kept, helpers)
        if all(sum(found[number]) <= most * share for number, share in zip(kept, wanted, strict=True)):
            return _told(plan, [found[number] for number in kept])
    return plan


def fewest_helpers(before: int, after: int) -> int:
    """Of one of the lost, where all own alike and are far from each other: with fewer, each would own too much."""
    return max(1, ceil(1 / ((1 + WORTH) * before / after - 1)))


def nearest(kept: Sequence[int], number: int, helpers: int) -> list[int]:
    """So many of `kept`, which is in order, around `number`, which is not in it; in order."""
    stop = start = bisect(kept, number)
    while stop - start < min(helpers, len(kept)):
        if stop == len(kept) or (start > 0 and number - kept[start - 1] <= kept[stop] - number):
            start -= 1
        else:
            stop += 1
    return list(kept[start:stop])


def _given(weights: Weights, lost: Sequence[int], kept: Sequence[int], helpers: int) -> Weights:
    """What each lost one had goes to those around it, by what they have."""
    found = [list(mine) for mine in weights]
    for number in lost:
        near = nearest(kept, number, helpers)
        for layer, amount in enumerate(weights[number]):
            rates = [weights[other][layer] for other in near]
            rates = rates if any(rates) else [1] * len(near)
            cuts = [amount * reached // sum(rates) for reached in accumulate(rates, initial=0)]
            for other, (low, high) in zip(near, pairwise(cuts), strict=True):
                found[other][layer] += high - low
    return found


def _place(pipeline: Pipeline, running: Plan, on: Mapping[tuple[Device, ...], int]) -> int | None:
    """Where it was: the same layers, on devices some of which are the same. on: by devices of a stage, the pipeline."""
    number = next((on[stage.devices] for stage in pipeline.stages if stage.devices in on), None)
    return number if number is not None and _cut(pipeline) == _cut(running.pipelines[number]) else None


def _cut(pipeline: Pipeline) -> list[tuple[int, int]]:
    return [(stage.first, stage.last) for stage in pipeline.stages]


def _weights(plan: Plan) -> Weights | None:
    """None where only some say what they own."""
    told = {bool(stage.shares) for pipeline in plan.pipelines for stage in pipeline.stages}
    if len(told) > 1:
        return None
    return [
        [
            stage.share_of(layer) if stage.shares else UNIT
            for stage in one.stages
            for layer in range(stage.first, stage.last)
        ]
        for one in plan.pipelines
    ]


def _told(plan: Plan, weights: Weights) -> Plan:
    pipelines = []
    for pipeline, mine in zip(plan.pipelines, weights, strict=True):
        stages = tuple(replace(stage, shares=_shares(mine[stage.first : stage.last])) for stage in pipeline.stages)
        pipelines.append(replace(pipeline, stages=stages))
    return replace(plan, pipelines=tuple(pipelines))


def _shares(weights: Sequence[int]) -> tuple[int, ...]:
    """One, where they are alike: the plan is in every message that forms a generation."""
    return tuple(weights[:1] if len(set(weights)) == 1 else weights)
