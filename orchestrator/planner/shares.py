"""Who takes how much of what can be cut finely: micro-batch ids over pipelines, owned state over replicas. Both exact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor


@dataclass(frozen=True, slots=True)
class Pace:
    """`count` pipelines alike: `start` + `period` x ids seconds a step, at least `least` ids each."""

    start: float
    period: float
    least: int
    count: int = 1

    def ids_within(self, seconds: float) -> int:
        """What one of them does in this time; fewer than `least` is none."""
        found = floor((seconds - self.start) / self.period * (1 + 1e-12) + 1e-9)
        return found if found >= self.least else 0


def share_ids(paces: Sequence[Pace], total: int) -> tuple[tuple[int, ...], ...] | None:
    """Ids of each pipeline, by pace, the most first; the last to end ends as early as can be. None where `total` is
    less than all take.
    """
    if sum(pace.count * pace.least for pace in paces) > total:
        return None
    floor_s = max(pace.start + pace.period * pace.least for pace in paces)
    rate = sum(pace.count / pace.period for pace in paces)
    started = sum(pace.count * pace.start / pace.period for pace in paces)
    low = max(floor_s, (total + started) / rate * (1 - 1e-9))
    end = low
    while True:
        taken = [max(pace.least, pace.ids_within(end)) for pace in paces]
        missing = total - sum(pace.count * ids for pace, ids in zip(paces, taken, strict=True))
        if missing <= 0:
            break
        # The next instant at which somebody ends one id more.
        end = min(pace.start + pace.period * (ids + 1) for pace, ids in zip(paces, taken, strict=True))
    return _trimmed(paces, taken, -missing)


def _trimmed(paces: Sequence[Pace], taken: Sequence[int], surplus: int) -> tuple[tuple[int, ...], ...]:
    """One id fewer for those that end last, until there is nothing over."""
    given = [{ids: pace.count} for pace, ids in zip(paces, taken, strict=True)]
    while surplus:
        _, i, ids = max(
            (pace.start + pace.period * ids, -i, ids)
            for i, (pace, mine) in enumerate(zip(paces, given, strict=True))
            for ids in mine
            if ids > pace.least
        )
        mine = given[-i]
        number = min(surplus, mine[ids])
        mine[ids] -= number
        if not mine[ids]:
            del mine[ids]
        mine[ids - 1] = mine.get(ids - 1, 0) + number
        surplus -= number
    return tuple(tuple(ids for ids in sorted(mine, reverse=True) for _ in range(mine[ids])) for mine in given)


def fill_water(room: Sequence[float], rates: Sequence[float], amount: float) -> tuple[float, ...] | None:
    """Parts of `amount` that sum to it, none above its room, the longest part / rate as short as can be. None: no room.

    Without a limit everybody takes in proportion to its rate; whoever is full keeps what fits, and the rest goes to the
    others.
    """
    if sum(room) < amount * (1 - 1e-12):
        return None
    order = sorted(range(len(room)), key=lambda i: (room[i] / rates[i], i))
    parts, left, rate = [0.0] * len(room), amount, sum(rates)
    for position, i in enumerate(order):
        level = left / rate if rate > 0 else 0.0
        if room[i] / rates[i] < level:
            parts[i] = room[i]
            left -= room[i]
            rate = sum(rates[j] for j in order[position + 1 :])
            continue
        for j in order[position:]:
            parts[j] = rates[j] * level
        break
    return tuple(parts)
