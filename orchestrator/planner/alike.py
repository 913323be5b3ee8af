"""How layers are split over the stages of alike devices: by parameter count, and by what stages were seen to take.

A stage's time is known only as a whole: it is spread over its layers by their parameters, so that a heavy head or a light
first layer shows once a plan has trained. The measured split is taken where it makes the slowest stage GAIN shorter:
differences below that are noise, and another split moves state.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

from orchestrator.domain.balance import StageTime
from orchestrator.domain.effects import ChoosePlan
from orchestrator.domain.profile import Profile

from .split import exact_split

GAIN = 0.07


def layer_bounds(request: ChoosePlan, stages: int) -> list[int]:
    """Where each stage begins, and the number of layers."""
    return list(_split(request.profile, request.measured, stages)[0])


def longest(request: ChoosePlan, stages: int, *, usual: bool = False) -> float:
    """Of the slowest stage of that split, in units of the mean layer; by number of layers where nothing was seen.

    usual: of the split by parameters, whatever was seen.
    """
    _, slowest, of_usual = _split(request.profile, request.measured, stages)
    return of_usual if usual else slowest


def split_words(request: ChoosePlan, stages: int) -> str:
    """`; layers are split by the times that stages were seen to take`; nothing where they are not."""
    is_other = layer_bounds(request, stages) != _by_weight(_params(request.profile), stages)
    return "; layers are split by the times that stages were seen to take" if is_other else ""


@lru_cache(maxsize=4096)
def _split(profile: Profile, measured: tuple[StageTime, ...], stages: int) -> tuple[tuple[int, ...], float, float]:
    """Bounds, and their slowest stage's time and that of the usual ones.

    Kept, because it is asked for with every tp and dp that a number of stages is tried with.
    """
    params = _params(profile)
    usual = tuple(_by_weight(params, stages))
    seen = _seen(params, measured)
    if not seen:
        layers = float(-(-len(params) // stages))
        return usual, layers, layers
    mean = sum(seen) / len(seen)
    sums = [sum(seen[:layer]) for layer in range(len(seen) + 1)]
    slowest = _slowest(sums, usual)
    nothing = [0.0] * len(sums)
    found = exact_split([sums] * stages, [nothing] * stages, [0.0] * stages, [0.0] * stages)
    other = found or usual
    if _slowest(sums, other) < slowest * (1 - GAIN):
        return other, _slowest(sums, other) / mean, slowest / mean
    return usual, slowest / mean, slowest / mean


def _slowest(sums: Sequence[float], bounds: Sequence[int]) -> float:
    return max(sums[last] - sums[first] for first, last in pairwise(bounds))


def _params(profile: Profile) -> list[float]:
    weight = [0.0] * profile.num_layers
    for line in profile.lines:
        weight[line.layers[0]] += line.numel
    return weight


def _seen(params: Sequence[float], measured: Sequence[StageTime]) -> list[float]:
    """Seconds of every layer; nothing where not every layer was seen, or all of them only together.

    Of one tp degree, the one with the fewest ranks a stage: with more, collectives hide what layers differ in. A layer that
    was seen in several stages, or on several kinds, takes their mean.
    """
    degree = min((one.tp for one in measured), default=1)
    total, times = [0.0] * len(params), [0] * len(params)
    for one in measured:
        weight = sum(params[one.first : one.last])
        if one.tp != degree or one.seconds <= 0.0 or one.last > len(params):
            continue
        for layer in range(one.first, one.last):
            share = params[layer] / weight if weight else 1 / (one.last - one.first)
            total[layer] += one.seconds * share
            times[layer] += 1
    spans = {(one.first, one.last) for one in measured if one.tp == degree}
    return [a / n for a, n in zip(total, times, strict=True)] if all(times) and len(spans) > 1 else []


def _by_weight(weight: Sequence[float], stages: int) -> list[int]:
    """Cut layers where the running parameter count passes each stage's share, at least one layer a stage."""
    total, bounds, running = sum(weight), [0], 0.0
    for layer, size in enumerate(weight):
        running += size
        left_layers, left_stages = len(weight) - layer - 1, stages - len(bounds)
        if (
            left_stages
            and layer + 1 > bounds[-1]
            and (running >= total * len(bounds) / stages or left_layers == left_stages)
        ):
            bounds.append(layer + 1)
    return [*bounds, len(weight)]
