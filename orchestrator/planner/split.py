"""Which contiguous layers each stage takes: the split whose slowest stage is as fast as any split's. Exact.

For a trial period every stage, from the first, takes as many layers as fit its time and its memory. Where layers are
alike but for the first and the last, a split exists if and only if that reaches the end, because starting later never
makes a stage end earlier; where they are not, a stage may have to leave a heavy layer to a stronger one, and every
place that stages can reach is followed. A period that fails names the next one worth trying: the least at which some
stage would have taken one layer more.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

ROUNDING = 1e-12
"""Relative: the rounding of prefix sums must not cost a stage a layer."""
EASY = 3
"""Trials of the very next period, before leaps."""
LEAP = 1.3


def exact_split(
    seconds: Sequence[Sequence[float]],
    held: Sequence[Sequence[float]],
    room: Sequence[float],
    extra: Sequence[float],
    least: float = 0.0,
    *,
    is_regular: bool = False,
) -> tuple[int, ...] | None:
    """Bounds 0..num_layers of the stages, one more than there are stages; None where no split fits memory.

    seconds[i], held[i]: prefix sums over layers of stage i's time and bytes, num_layers + 1 long; held[i] is empty
    where memory is known to be enough. room[i]: bytes it has. extra[i]: its seconds besides layers. least: no period is
    shorter. is_regular: layers are alike but for the first and the last.
    """
    cover = _greedy if is_regular else _everywhere
    if len(seconds) > len(seconds[0]) - 1:
        return None
    low, best, reached = least, None, float("inf")
    for trial_number in range(1 << 16):
        if best is not None and low >= reached * (1 - ROUNDING):
            return best
        leap = low * LEAP if best is None else (low + reached) / 2
        trial = low if trial_number < EASY else leap
        bounds, slowest, after = cover(seconds, held, room, extra, trial)
        if bounds is None:
            if after == float("inf"):
                return best
            low = max(after, trial)
        elif slowest < reached:
            best, reached = bounds, slowest
        else:
            low = trial
    return best


def _greedy(
    seconds: Sequence[Sequence[float]],
    held: Sequence[Sequence[float]],
    room: Sequence[float],
    extra: Sequence[float],
    period: float,
) -> tuple[tuple[int, ...] | None, float, float]:
    """(bounds or None, the slowest stage's seconds, the next longer period at which any stage would take more)."""
    depth, num_layers = len(seconds), len(seconds[0]) - 1
    bounds, first, slowest, after = [0], 0, 0.0, float("inf")
    for stage in range(depth):
        most = num_layers - (depth - 1 - stage)
        prefix = seconds[stage]
        begun = prefix[first] - extra[stage]
        last = bisect_right(prefix, (prefix[first] - extra[stage] + period) * (1 + ROUNDING), first, most + 1) - 1
        if last < first:
            last = first
        is_timed = last < most
        if held[stage]:
            by_room = bisect_right(held[stage], held[stage][first] + room[stage], first, most + 1) - 1
            if by_room <= last:
                is_timed, last = False, by_room
        if is_timed:
            after = min(after, prefix[last + 1] - begun)
        if last <= first:
            return None, slowest, after
        slowest = max(slowest, prefix[last] - begun)
        bounds.append(last)
        first = last
    return (tuple(bounds) if first == num_layers else None), slowest, after


def _everywhere(
    seconds: Sequence[Sequence[float]],
    held: Sequence[Sequence[float]],
    room: Sequence[float],
    extra: Sequence[float],
    period: float,
) -> tuple[tuple[int, ...] | None, float, float]:
    """As `_greedy`, whatever the layers: by all places at which stages can end."""
    depth, num_layers = len(seconds), len(seconds[0]) - 1
    after = float("inf")
    starts: list[dict[int, int]] = []
    reached = [0]
    for stage in range(depth):
        most = num_layers - (depth - 1 - stage)
        prefix, ends, farthest = seconds[stage], set[int](), dict[int, int]()
        for first in reached:
            limit = (prefix[first] - extra[stage] + period) * (1 + ROUNDING)
            last = max(first, bisect_right(prefix, limit, first, most + 1) - 1)
            is_timed = last < most
            if held[stage]:
                by_room = bisect_right(held[stage], held[stage][first] + room[stage], first, most + 1) - 1
                if by_room <= last:
                    is_timed, last = False, by_room
            if is_timed:
                after = min(after, prefix[last + 1] - prefix[first] + extra[stage])
            farthest[first] = last
            ends.update(range(first + 1, last + 1))
        starts.append(farthest)
        reached = sorted(ends)
    if num_layers not in reached:
        return None, 0.0, after
    bounds = [num_layers]
    for farthest in reversed(starts):
        bounds.append(max(first for first, last in farthest.items() if first < bounds[-1] <= last))
    found = tuple(reversed(bounds))
    slowest = max(seconds[i][found[i + 1]] - seconds[i][found[i]] + extra[i] for i in range(depth))
    return found, slowest, after
