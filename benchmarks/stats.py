"""The arithmetic of the benchmarks: medians of blocks, ratios of paired blocks, percentiles. Pure; it measures nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import exp, floor, log
from random import Random
from statistics import fmean, median

RESAMPLES = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """One step: when it was committed (wall clock, s) and the time since the one before (s)."""

    at: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """A geometric mean of paired ratios, and the ends of its 95 % interval."""

    value: float
    low: float
    high: float


def step_times(instants: Sequence[float]) -> list[StepTime]:
    """From the instants of consecutive steps; the first has no step before it and only begins the second."""
    return [StepTime(at=at, seconds=at - before) for before, at in pairwise(instants)]


def within(steps: Sequence[StepTime], begin: float, end: float) -> list[float]:
    """Seconds of the steps that began and ended inside begin..end: none that was under way at either end."""
    return [step.seconds for step in steps if step.at - step.seconds >= begin and step.at <= end]


def paired_ratio(ours: Sequence[float], theirs: Sequence[float], *, seed: int = 0) -> Ratio:
    """ours[i] / theirs[i] over blocks measured side by side; the interval by resampling blocks, pairs kept together.

    Pairing takes out what changes slowly (other load, clock speed). Raises ValueError for fewer than two blocks.
    """
    logs = [log(a / b) for a, b in zip(ours, theirs, strict=True)]
    if len(logs) < 2:
        raise ValueError(f"{len(logs)} block has no spread; measure at least 2")
    random = Random(seed)
    means = sorted(fmean(random.choices(logs, k=len(logs))) for _ in range(RESAMPLES))
    return Ratio(value=exp(fmean(logs)), low=exp(quantile(means, 0.025)), high=exp(quantile(means, 0.975)))


def quantile(values: Sequence[float], share: float) -> float:
    """Of any order, interpolated between neighbours. share: 0..1. Raises ValueError for no values."""
    if not values:
        raise ValueError("no values have no quantile; measure something first")
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def medians_by_name(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """Per name, the median over the rows that have it; names in order of first appearance."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: median(row[name] for row in rows if name in row) for name in names}
