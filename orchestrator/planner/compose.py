"""How many pipelines of which classes, so that all ids of a step are done as early as can be.

For a trial time every pipeline does as many ids as it has time for, and the question is only which pipelines the
devices make: a knapsack. Bisection finds the least time at which all ids fit. Few devices: every pipeline of every
mixture of classes is in the knapsack, so the answer is exact. Many: pipelines of one class each, in bulk, with an exact
knapsack for the rest, and one mixed pipeline of what is left over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import permutations, product
from math import prod

from .pipelines import Bench, Track
from .shares import Pace, share_ids

MAX_PAIRS = 4000
"""(devices left, pipeline) pairs up to which the knapsack over all classes is solved whole."""
MAX_COUNTED = 2500
"""The same times pipelines, up to which it is also solved for every number of pipelines at most."""
MAX_ORDERS = 6
MAX_LEFT = 64
"""tp groups left over, above which a class is idle because it is of no use."""
MAX_DEPTHS = 9
"""Tried of one class."""
FEW = 24
"""tp groups in all, up to which every order of the classes in a pipeline is tried."""
CLOSE = 1e-4
"""Relative; below it bisection gives way to steps from one solution to the next better one."""
MAX_STEPS = 60
POLISH = 1.03
"""What a mixed pipeline of the leftovers may make of a composition, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """Pipelines alike but for their number of ids."""

    track: Track
    ids: tuple[int, ...]
    """The most first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the job allows."""

    least_depth: int = 1
    most_depth: int = 1 << 30
    replicas: int | None = None
    min_devices: int = 1
    max_devices: int = 0
    """0: no limit."""


After = Callable[[Track], float]
"""Seconds of a step once a pipeline's ids are done."""
Found = list[tuple[Track, int]]
"""Pipelines, and how many of each."""
Fitting = tuple[int, int]
"""A pipeline's index, and how far back the state without its groups is."""


def compose(
    bench: Bench,
    groups: Sequence[int],
    ids: int,
    limits: Limits,
    replicas: int,
    after: After,
    below: float = float("inf"),
    owners: int = 0,
) -> tuple[Member, ...]:
    """The members of the fastest composition found; none where no pipeline fits, or nothing gets below so many seconds.

    replicas: about so many pipelines, which share out state; owners: as if so many did, where that is another number.
    """
    owners = owners or replicas
    most = min(limits.most_depth, len(bench.model.layers), ids)
    if limits.replicas is not None:
        # A number of pipelines is asked for: alike in depth.
        least = max(limits.least_depth, -(-limits.min_devices // (bench.tp * limits.replicas)))
        options = [
            found
            for depth in range(least, min(most, ids // limits.replicas, sum(groups) // limits.replicas) + 1)
            if (found := _of_depth(bench, groups, depth, limits.replicas, owners))
        ]
        return _best([_shared(option, ids, after) for option in options], after)
    depths = range(limits.least_depth, most + 1)
    pairs = _pairs(groups, most)
    if pairs <= MAX_PAIRS:
        is_counted = pairs * min(replicas, sum(groups)) <= MAX_COUNTED
        if not is_counted and sum(groups) <= FEW:
            # About `replicas` pipelines, by leaving out those so short that more would be made.
            depths = range(max(limits.least_depth, sum(groups) // (replicas + 1)), most + 1)
        solver: _Solver = _Whole(bench, groups, depths, owners, after, replicas if is_counted else 0)
    else:
        solver = _Bulk(bench, groups, depths, owners, after)
    return _bisected(solver, ids, after, below)


def alike(
    bench: Bench, groups: Sequence[int], ids: int, limits: Limits, after_of: Callable[[int], After]
) -> Iterator[tuple[Member, ...]]:
    """Compositions of pipelines alike in depth, for every depth and number of them: what `compose` must not be worse
    than.
    """
    total = sum(groups)
    for replicas in range(1, min(total, ids) + 1):
        for depth in range(limits.least_depth, min(limits.most_depth, len(bench.model.layers), total // replicas) + 1):
            if depth * replicas <= ids:
                yield _shared(_of_depth(bench, groups, depth, replicas, replicas), ids, after_of(replicas))


def time_of(members: Iterable[Member], after: After) -> float:
    return max(m.track.fill + m.track.period * m.ids[0] + after(m.track) for m in members)


# --- bisection on the time -----------------------------------------------------------------------------------------------


class _Solver:
    """paces: of the pipelines it may choose."""

    tracks: list[Track]
    paces: list[Pace]

    def most_ids(self, within: list[int]) -> tuple[int, Found]:
        raise NotImplementedError

    def polished(self, found: Found) -> Found:
        return found


def _bisected(solver: _Solver, ids: int, after: After, below: float) -> tuple[Member, ...]:
    if not solver.tracks:
        return ()
    if (
        below < float("inf")
        and solver.most_ids([min(ids, pace.ids_within(below * POLISH)) for pace in solver.paces])[0] < ids
    ):
        return ()
    best: tuple[Member, ...] = ()
    known: dict[tuple[int, ...], tuple[int, Found]] = {}
    low, high = 0.0, float("inf")
    trial = min(pace.start + pace.period * pace.least for pace in solver.paces)
    for _ in range(MAX_STEPS):
        within = [min(ids, pace.ids_within(trial)) for pace in solver.paces]
        if (numbers := tuple(within)) not in known:  # times that are close give the same numbers
            known[numbers] = solver.most_ids(within)
        reached, found = known[numbers]
        if reached >= ids:
            found = _spared(found, ids, trial, after)
        members = _shared(found, ids, after) if reached >= ids else ()
        if members:
            best, high = members, min(time_of(members, after), trial)
        else:
            low = trial
        if high == float("inf"):
            trial *= max(1.05, min(2.0, ids / reached)) if reached else 2.0
        elif high - low > CLOSE * high:
            trial = (low + high) / 2
        elif members or trial < high * (1 - 1e-6):
            trial = high * (1 - 1e-9)
            if not members:
                break
        else:
            break
    polished = solver.polished([(member.track, len(member.ids)) for member in best])
    return _best([best, _shared(polished, ids, after)], after)


def _spared(found: Found, ids: int, trial: float, after: After) -> Found:
    """Without pipelines that there are no ids for: those that would do least, first."""
    needed = sum(track.depth * count for track, count in found)
    if needed <= ids:
        return found
    left = dict(found)
    for track in sorted(left, key=lambda track: (_pace(track, after).ids_within(trial), -track.depth, track.classes)):
        gone = min(left[track], -(-(needed - ids) // track.depth))
        left[track] -= gone
        needed -= gone * track.depth
        if needed <= ids:
            break
    return [(track, count) for track, count in left.items() if count]


def _shared(found: Found, ids: int, after: After) -> tuple[Member, ...]:
    """With ids shared out; none where there are too few."""
    if not found:
        return ()
    ordered = sorted(found, key=lambda one: (one[0].classes, one[0].bounds))
    paces = [_pace(track, after, count) for track, count in ordered]
    shared = share_ids(paces, ids)
    if shared is None:
        return ()
    return tuple(Member(track=track, ids=mine) for (track, _), mine in zip(ordered, shared, strict=True))


def _pace(track: Track, after: After, count: int = 1) -> Pace:
    return Pace(track.fill + after(track), track.period, track.depth, count)


def _best(options: Iterable[tuple[Member, ...]], after: After) -> tuple[Member, ...]:
    return min((members for members in options if members), key=lambda members: time_of(members, after), default=())


# --- every mixture -------------------------------------------------------------------------------------------------------


def _pairs(groups: Sequence[int], depth: int) -> int:
    """At most. A pipeline of one stage is of one class; there are as many states all the same."""
    if depth == 1:
        return len(groups) * prod(number + 1 for number in groups)
    return prod((number + 1) * (number + 2) // 2 for number in groups)


class _Whole(_Solver):
    """A knapsack over all classes at once: states are tp groups left of each class."""

    def __init__(
        self, bench: Bench, groups: Sequence[int], depths: range, replicas: int, after: After, most: int = 0
    ) -> None:
        """most: pipelines; 0 for any number."""
        self.most = most
        self.tracks = []
        for counts in product(*(range(number + 1) for number in groups)):
            if sum(counts) not in depths:
                continue
            track = _quickest(bench, counts, replicas, MAX_ORDERS if sum(groups) <= FEW else 2)
            if track is not None:
                self.tracks.append(track)
        self.paces = [_pace(track, after) for track in self.tracks]
        self._units, self._fitting = _table(tuple(groups), tuple(tuple(track.counts) for track in self.tracks))

    def most_ids(self, within: list[int]) -> tuple[int, Found]:
        rounds = self.most or 1
        nothing = [0] * len(self._units)
        best, took = [nothing], [[-1] * len(nothing)]
        for _ in range(rounds):
            # Counted: of one pipeline fewer; uncounted: of the same table, so that any number may follow.
            value, choice = self._round(within, best[-1] if self.most else None)
            best.append(value)
            took.append(choice)
            if value == best[-2]:
                break  # one pipeline more is of no use, and so are all after it
        counts: dict[int, int] = {}
        offsets = dict(self._fitting[-1])
        state, level, last = len(nothing) - 1, rounds, len(best) - 1
        while level and best[min(level, last)][state]:
            choice_here = took[min(level, last)][state]
            if choice_here < 0:
                state += choice_here + 1
                continue
            counts[choice_here] = counts.get(choice_here, 0) + 1
            state -= offsets[choice_here]
            level -= bool(self.most)
        return best[-1][-1], [(self.tracks[index], count) for index, count in sorted(counts.items())]

    def _round(self, within: list[int], before: list[int] | None) -> tuple[list[int], list[int]]:
        best, took = [0] * len(self._units), [-1] * len(self._units)
        source = best if before is None else before
        for state, units in enumerate(self._units):
            value, choice = 0, -1
            for index, offset in self._fitting[state]:
                ids = within[index]
                if ids and source[state - offset] + ids > value:
                    value, choice = source[state - offset] + ids, index
            for unit in units:
                if best[state - unit] >= value and best[state - unit]:
                    value, choice = best[state - unit], -unit - 1
            best[state], took[state] = value, choice
        return best, took


@lru_cache(maxsize=64)
def _table(groups: tuple[int, ...], counts: tuple[tuple[int, ...], ...]) -> tuple[list[list[int]], list[list[Fitting]]]:
    """For every number of groups left of each class: steps to one group fewer, and pipelines for which that is enough."""
    radix = [1]
    for number in groups:
        radix.append(radix[-1] * (number + 1))
    offsets = [sum(number * step for number, step in zip(one, radix, strict=False)) for one in counts]
    units: list[list[int]] = []
    fitting: list[list[Fitting]] = []
    for state in product(*(range(number + 1) for number in reversed(groups))):
        left = state[::-1]
        units.append([radix[i] for i, number in enumerate(left) if number])
        enough = (all(a <= b for a, b in zip(one, left, strict=True)) for one in counts)
        fitting.append([(index, offsets[index]) for index, is_enough in enumerate(enough) if is_enough])
    return units, fitting


def _quickest(bench: Bench, counts: Sequence[int], replicas: int, most_orders: int = 2) -> Track | None:
    """The best order of the classes, each class's stages together."""
    present = [index for index, number in enumerate(counts) if number]
    found = (
        bench.track(tuple(index for index in order for _ in range(counts[index])), replicas)
        for order in _orders(bench, present, most_orders)
    )
    return min((track for track in found if track), key=lambda track: (track.period, track.fill), default=None)


def _orders(bench: Bench, present: list[int], most: int) -> Iterator[tuple[int, ...]]:
    """Large memory first, because a first stage holds the most micro-batches; the reverse; then others, while few."""
    first = tuple(sorted(present, key=lambda index: (-bench.classes[index].kind.memory_bytes, index)))
    orders = [first, first[::-1], *(permutations(first) if most > 2 else ())]
    return iter(list(dict.fromkeys(orders))[:most])


# --- many devices --------------------------------------------------------------------------------------------------------


class _Bulk(_Solver):
    """Class by class: bulk of the pipeline that does most ids per device, an exact knapsack for what that leaves."""

    def __init__(self, bench: Bench, groups: Sequence[int], depths: range, replicas: int, after: After) -> None:
        self.bench, self.groups, self.replicas = bench, groups, replicas
        self.depths = depths
        self.tracks = []
        self._mine: list[list[int]] = []
        for index, number in enumerate(groups):
            mine = []
            for depth in _worthwhile(bench, index, number, depths, replicas):
                track = bench.track((index,) * depth, replicas)
                if track is not None:
                    mine.append(len(self.tracks))
                    self.tracks.append(track)
            self._mine.append(mine)
        if not self.tracks:
            mixed = _quickest(bench, _roomiest(bench, groups, depths.stop - 1), replicas)
            self.tracks = [mixed] if mixed is not None and mixed.depth in depths else []
            self._mine = [[]]
        self.paces = [_pace(track, after) for track in self.tracks]

    def most_ids(self, within: list[int]) -> tuple[int, Found]:
        if self._mine == [[]]:
            return within[0], [(self.tracks[0], 1)]
        reached = 0
        found: Found = []
        for number, mine in zip(self.groups, self._mine, strict=True):
            useful = [(self.tracks[i].depth, within[i], i) for i in mine if within[i] and self.tracks[i].depth <= number]
            if not useful:
                continue
            depth, each, primary = max(useful, key=lambda one: (one[1] / one[0], -one[0]))
            bulk = max(0, number // depth - 1)
            counts = {primary: bulk} if bulk else {}
            rest = number - bulk * depth
            best, took = [0] * (rest + 1), [-1] * (rest + 1)
            for left in range(1, rest + 1):
                best[left] = best[left - 1]
                for size, value, index in useful:
                    if size <= left and best[left - size] + value > best[left]:
                        best[left], took[left] = best[left - size] + value, index
            reached += bulk * each + best[rest]
            while rest > 0:
                if took[rest] < 0:
                    rest -= 1
                    continue
                counts[took[rest]] = counts.get(took[rest], 0) + 1
                rest -= self.tracks[took[rest]].depth
            found.extend((self.tracks[index], count) for index, count in sorted(counts.items()))
        return reached, found

    def polished(self, found: Found) -> Found:
        """With one more pipeline, of the classes' leftovers together."""
        left = list(self.groups)
        for track, count in found:
            for index, number in enumerate(track.counts):
                left[index] -= number * count
        over = sum(left) - (self.depths.stop - 1)
        if sum(1 for number in left if number) < 2 or sum(left) < self.depths.start or over > MAX_LEFT:
            return found
        for _ in range(over):
            left[max(range(len(left)), key=lambda index: (left[index], index))] -= 1
        mixed = _quickest(self.bench, left, self.replicas)
        return found if mixed is None else [*found, (mixed, 1)]


def _roomiest(bench: Bench, groups: Sequence[int], most: int) -> list[int]:
    """At most so many tp groups, those with most memory first."""
    counts = [0] * len(groups)
    for index in sorted(range(len(groups)), key=lambda index: (-bench.rooms[index], index)):
        counts[index] = min(groups[index], most)
        most -= counts[index]
    return counts


def _worthwhile(bench: Bench, index: int, number: int, depths: range, replicas: int) -> list[int]:
    """Depths to try on a class: the least that fits memory, a few above it, and then ever sparser."""
    most = min(number, depths.stop - 1)
    low, high = depths.start, most
    while low < high:  # what fits on some stages fits on more
        middle = (low + high) // 2
        if bench.track((index,) * middle, replicas) is None:
            low = middle + 1
        else:
            high = middle
    found: list[int] = []
    while low <= most:
        found.append(low)
        if len(found) == MAX_DEPTHS:
            break
        step = max(1, len(found) // 2)
        low += step
    return found


# --- so many pipelines, alike in depth -----------------------------------------------------------------------------------


def _of_depth(bench: Bench, groups: Sequence[int], depth: int, wanted: int, replicas: int) -> Found:
    """`wanted` pipelines of one depth: each class alone as far as it goes, the fastest first, then of what is left."""
    alone = [bench.track((index,) * depth, replicas) for index in range(len(groups))]
    order = sorted(range(len(groups)), key=lambda i: (track.period if (track := alone[i]) else float("inf"), i))
    found: Found = []
    missing, left = wanted, list(groups)
    for index in order:
        track = alone[index]
        count = min(missing, left[index] // depth) if track else 0
        if track and count:
            found.append((track, count))
            left[index] -= count * depth
            missing -= count
    while missing:
        counts, need = [0] * len(groups), depth
        for index in order:
            counts[index] = min(need, left[index])
            need -= counts[index]
        mixed = None if need else _quickest(bench, counts, replicas)
        if mixed is None:
            return []
        left = [a - b for a, b in zip(left, counts, strict=True)]
        found.append((mixed, 1))
        missing -= 1
    merged: dict[Track, int] = {}
    for track, count in found:
        merged[track] = merged.get(track, 0) + count
    return list(merged.items())
