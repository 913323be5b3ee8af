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


# --- state over stages of unequal span -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Holder:
    """`count` alike that hold the parts first..last-1. Each has `room` for what it takes of them, `rate` of it a second."""

    first: int
    last: int
    room: float
    rate: float
    count: int = 1


def spread(amounts: Sequence[float], holders: Sequence[Holder]) -> tuple[tuple[float, ...], ...] | None:
    """What one of each holder takes of each part: every part is taken whole by those that hold it, none takes more than its
    room, and the longest taken / rate is as short as can be, then the next longest. None where room is lacking.

    Holders of one span are water-filled; of several, the parts whose holders have least to give come first: a level is
    tried, and where it does not do, the parts that are short name the next one.
    """
    spans: dict[tuple[int, int], list[int]] = {}
    for number, holder in enumerate(holders):
        spans.setdefault((holder.first, holder.last), []).append(number)
    parts = frozenset(range(len(amounts)))
    taken = [[0.0] * (holder.last - holder.first) for holder in holders]
    while parts:
        found = _fullest(amounts, holders, spans, parts)
        if found is None:
            return None
        full, level, flows = found
        for span, flow in flows.items():
            caps = [_cap(holders[number], level) for number in spans[span]]
            whole = sum(holders[number].count * cap for number, cap in zip(spans[span], caps, strict=True))
            for number, cap in zip(spans[span], caps, strict=True):
                for part in full & flow.keys():
                    taken[number][part - span[0]] = flow[part] * cap / whole if whole else 0.0
        parts -= full
        spans = {span: mine for span, mine in spans.items() if span not in flows}
    return tuple(map(tuple, taken))


_Span = tuple[int, int]
_Flows = dict[_Span, dict[int, float]]


def _fullest(
    amounts: Sequence[float], holders: Sequence[Holder], spans: dict[_Span, list[int]], parts: frozenset[int]
) -> tuple[frozenset[int], float, _Flows] | None:
    """The parts whose holders need most time, that time, and what each span takes of each of them."""
    full = parts
    while True:
        level = _level(amounts, holders, spans, full)
        if level is None:
            return None
        caps = {
            span: sum(holders[number].count * _cap(holders[number], level) for number in mine)
            for span, mine in spans.items()
        }
        flows, short = _poured(amounts, caps, parts)
        if short is None or short == full:
            return full, level, {span: flows[span] for span in spans if any(part in full for part in range(*span))}
        full = short


def _level(
    amounts: Sequence[float], holders: Sequence[Holder], spans: dict[_Span, list[int]], parts: frozenset[int]
) -> float | None:
    amount = sum(amounts[part] for part in parts)
    mine = [holders[n] for span, numbers in spans.items() if any(p in parts for p in range(*span)) for n in numbers]
    if amount <= 0.0:
        return 0.0
    rooms, rates = [one.room * one.count for one in mine], [one.rate * one.count for one in mine]
    filled = fill_water(rooms, rates, amount) if mine else None
    return None if filled is None else max(part / rate for part, rate in zip(filled, rates, strict=True))


def _cap(holder: Holder, level: float) -> float:
    return min(holder.room, holder.rate * level)


def _poured(
    amounts: Sequence[float], caps: dict[_Span, float], parts: frozenset[int]
) -> tuple[_Flows, frozenset[int] | None]:
    """Parts poured into spans by augmenting paths; and the parts that are short of room, or None where all is taken."""
    flows: _Flows = {span: {part: 0.0 for part in range(*span) if part in parts} for span in caps}
    spare = dict(caps)
    nothing = 1e-9 * sum(amounts[part] for part in parts)
    for part in sorted(parts):
        left = amounts[part]
        while left > nothing:
            path, reached = _path(part, flows, spare, nothing)
            if path is None:
                return flows, reached
            # path: part, span, part, span, ...: pour forward, take back between.
            backs = [flows[path[i - 1][1]][path[i][0]] for i in range(1, len(path))]
            amount = min([left, spare[path[-1][1]], *backs])
            for i, (here, span) in enumerate(path):
                flows[span][here] += amount
                if i + 1 < len(path):
                    flows[span][path[i + 1][0]] -= amount
            spare[path[-1][1]] -= amount
            left -= amount
    return flows, None


def _path(
    start: int, flows: _Flows, spare: dict[_Span, float], nothing: float
) -> tuple[list[tuple[int, _Span]] | None, frozenset[int]]:
    """The shortest way from a part to a span with room, over spans that others could leave; or the parts it got to."""
    came: dict[int, tuple[int, _Span] | None] = {start: None}
    seen: set[_Span] = set()
    waiting = [start]
    for part in waiting:
        for span in sorted(flows):
            if span in seen or part not in flows[span]:
                continue
            seen.add(span)
            if spare[span] > nothing:
                path = [(part, span)]
                while (before := came[path[0][0]]) is not None:
                    path.insert(0, before)
                return path, frozenset()
            for other, amount in flows[span].items():
                if other not in came and amount > 0.0:
                    came[other] = (part, span)
                    waiting.append(other)
    return None, frozenset(came)
