"""Who holds which interval of which line under a plan, and what must move when the plan changes.

`buckets` groups the lines that are reduced together; `layout` says which device owns and which mirrors each interval;
`transfers` is interval intersection with a choice of source. Recovery, resizing and restoring are all these functions;
they are pure and are used by real workers and by the simulator alike.

    bucket address space      |-- line a, part --|pad|-- line b, part --|pad|
    cut between its members   |    member 0    |      member 1      | member 2 |   (by their shares, block-aligned)
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate

from .ids import Device, NodeId, Rank
from .plan import Pipeline, Plan, Seat
from .profile import BLOCK, Interval, Profile


@dataclass(frozen=True, slots=True)
class Part:
    """An interval of a line and where it starts in its bucket."""

    interval: Interval
    offset: int


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Lines with the same users, laid end to end (each padded to a block) and cut into one range per member, as long as
    its share.

    `members` reduce into and gather from each other, in this fixed order: pipelines first, then stages, then tp.
    `cuts` has one more entry than `members`; member j owns addresses cuts[j]..cuts[j+1]-1.
    """

    layers: tuple[int, ...]
    split: bool
    decay: bool
    parts: tuple[Part, ...]
    members: tuple[Rank, ...]
    cuts: tuple[int, ...]

    @property
    def size(self) -> int:
        """Elements, padding included."""
        return self.cuts[-1]

    @cached_property
    def shares(self) -> dict[Rank, tuple[int, int]]:
        """rank -> the addresses it owns."""
        return {rank: (self.cuts[j], self.cuts[j + 1]) for j, rank in enumerate(self.members)}

    def intervals(self, start: int, stop: int) -> Iterator[Part]:
        """The pieces of lines at addresses start..stop-1, each with its address."""
        for part in self.parts:
            low = max(start, part.offset)
            high = min(stop, part.offset + len(part.interval))
            if low < high:
                shift = part.interval.start - part.offset
                yield Part(Interval(part.interval.line, low + shift, high + shift), low)


def buckets(plan: Plan, profile: Profile) -> tuple[Bucket, ...]:
    """Every bucket of a plan, ordered by layer, split lines first, then by tp index."""
    return _buckets(plan.pipelines, profile)


@lru_cache(maxsize=32)
def _buckets(pipelines: tuple[Pipeline, ...], profile: Profile) -> tuple[Bucket, ...]:
    # Remembered, because a recovery asks for the same plan's buckets several times in every process.
    plan = Plan(pipelines=pipelines)
    lines = defaultdict(list)
    for line in profile.lines:
        lines[line.layers, not line.split, not line.decay].append(line)
    made = []
    for (layers, whole, plain), members_of in sorted(lines.items()):
        for tp in (None,) if whole else range(plan.tp):
            parts, offset = [], 0
            for line in members_of:
                width = line.numel if tp is None else line.numel // plan.tp
                start = 0 if tp is None else tp * width
                parts.append(Part(Interval(line.name, start, start + width), offset))
                offset += _padded(width)
            members = _users(plan, layers, tp)
            made.append(
                Bucket(
                    layers=layers,
                    split=not whole,
                    decay=not plain,
                    parts=tuple(parts),
                    members=members,
                    cuts=_cuts(offset, _weights(plan, layers, members)),
                )
            )
    return tuple(made)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """device -> intervals, for owners and for mirrors. Owners partition every line; a mirror is on another device."""

    owned: Mapping[Device, tuple[Interval, ...]]
    mirrored: Mapping[Device, tuple[Interval, ...]]

    def held(self, device: Device) -> tuple[Interval, ...]:
        return self.owned.get(device, ()) + self.mirrored.get(device, ())


def layout(plan: Plan, profile: Profile, *, mirrors: int) -> Layout:
    """Owned and mirrored intervals under a plan; `mirrors` is 0 or 1."""
    whole = _owned(plan.pipelines, profile)
    partner = partners(plan) if mirrors else {}
    return Layout(owned=whole, mirrored={partner[device]: whole[device] for device in partner})


@lru_cache(maxsize=32)
def _owned(pipelines: tuple[Pipeline, ...], profile: Profile) -> Mapping[Device, tuple[Interval, ...]]:
    plan = Plan(pipelines=pipelines)
    owned: dict[Device, list[Interval]] = {device: [] for device in plan.devices}
    for bucket in _buckets(pipelines, profile):
        for rank, (start, stop) in bucket.shares.items():
            owned[plan.seats[rank].device].extend(part.interval for part in bucket.intervals(start, stop))
    return {device: tuple(intervals) for device, intervals in owned.items()}


def partners(plan: Plan) -> dict[Device, Device]:
    """owner -> the device that mirrors it: in another failure domain where that is possible, else on another node.

    A bijection, so that every device mirrors exactly one other; empty for a single device. A mirror shares its owner's
    domain (its node) only where one domain (one node) holds more than half of the devices, and no more often than it must.
    It follows from places in the plan, not from names: who takes a lost node's place takes its partners too.
    """
    ring = _ring(plan)
    count = len(ring)
    if count < 2:
        return {}
    by_node = Counter(device.node for device in ring)
    by_domain = Counter(_domain(plan, device.node) for device in ring)
    largest_node, largest_domain = max(by_node.values()), max(by_domain.values())
    # Whoever may fail together stands together, so a shift by the size of a block that is at most half leaves it behind.
    # Of a larger block, all that do not fit elsewhere stay inside, shifted by what is outside or by the largest node.
    shift = largest_domain if 2 * largest_domain <= count else max(largest_node, count - largest_domain)
    if shift == count:  # one node
        shift = 1
    return {device: ring[(i + shift) % count] for i, device in enumerate(ring)}


def _ring(plan: Plan) -> list[Device]:
    """By rank, but with domains together, and nodes in them."""
    first_in_domain: dict[str, Rank] = {}
    first_on_node: dict[NodeId, Rank] = {}
    for seat in plan.seats:
        first_in_domain.setdefault(_domain(plan, seat.device.node), seat.rank)
        first_on_node.setdefault(seat.device.node, seat.rank)

    def place(seat: Seat) -> tuple[Rank, Rank, Rank]:
        return first_in_domain[_domain(plan, seat.device.node)], first_on_node[seat.device.node], seat.rank

    return [seat.device for seat in sorted(plan.seats, key=place)]


def _domain(plan: Plan, node: NodeId) -> str:
    return plan.domains.get(node, f"node={node}")


@dataclass(frozen=True, slots=True)
class Move:
    """Copy the state (master weight and both moments) of an interval from one device to another.

    source == target means the device keeps what it has in its own memory.
    """

    interval: Interval
    source: Device
    target: Device


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfers:
    moves: tuple[Move, ...]
    lacking: tuple[tuple[Device, Interval], ...] = ()
    """Intervals nobody alive holds, and who is to hold them."""

    @property
    def missing(self) -> tuple[Interval, ...]:
        return tuple(interval for _, interval in self.lacking)


def transfers(
    sources: Mapping[Device, tuple[Interval, ...]],
    targets: Layout,
    arrived: Mapping[Device, tuple[Interval, ...]] | None = None,
) -> Transfers:
    """How every interval of `targets` is filled from `sources` (whole, living holders only).

    Each element of each target is moved exactly once: from the device's own memory, else from a holder on the same node,
    else from the holder that has least to send so far. `arrived` is what a transfer that was cut short had brought: its
    devices need not be sent it again, and others get it from there only where no holder is left, because a device
    that was being filled may be far from everybody.
    """
    by_line: dict[str, list[_Source]] = defaultdict(list)
    for last_resort, holdings in ((False, sources), (True, arrived or {})):
        for device in sorted(holdings):
            for interval in holdings[device]:
                by_line[interval.line].append(_Source(interval, device, last_resort))
    load: dict[Device, int] = defaultdict(int)
    moves: list[Move] = []
    lacking: list[tuple[Device, Interval]] = []
    for device in sorted(set(targets.owned) | set(targets.mirrored)):
        own = frozenset(sources.get(device, ()))
        for target in targets.held(device):
            if target in own:  # as for nearly everything, after most failures
                moves.append(Move(target, device, device))
                continue
            here = [s for s in by_line[target.line] if s.interval.start < target.stop and s.interval.stop > target.start]
            position = target.start
            while position < target.stop:
                covering = [s for s in here if s.interval.start <= position < s.interval.stop]
                if not covering:
                    ahead = [s.interval.start for s in here if s.interval.start > position]
                    stop = min([target.stop, *ahead])
                    lacking.append((device, Interval(target.line, position, stop)))
                    position = stop
                    continue
                source = min(covering, key=lambda s: (*s.rank_for(device), load[s.holder], s.holder))
                holder = source.holder
                stop = min(source.interval.stop, target.stop)
                if holder != device:  # a better one may begin before this one ends
                    better = [s.interval.start for s in here if s.rank_for(device)[:2] < source.rank_for(device)[:2]]
                    stop = min([stop, *(start for start in better if position < start)])
                    load[holder] += stop - position
                moves.append(Move(Interval(target.line, position, stop), holder, device))
                position = stop
    return Transfers(moves=tuple(moves), lacking=tuple(lacking))


@dataclass(frozen=True, slots=True)
class _Source:
    interval: Interval
    holder: Device
    last_resort: bool

    def rank_for(self, device: Device) -> tuple[bool, bool, bool]:
        """Least is best: its own, a holder, one on the same node."""
        return self.holder != device, self.last_resort, self.holder.node != device.node


def _users(plan: Plan, layers: tuple[int, ...], tp: int | None) -> tuple[Rank, ...]:
    return tuple(
        plan.rank_at[p, s, t]
        for p, pipeline in enumerate(plan.pipelines)
        for s, stage in enumerate(pipeline.stages)
        if any(stage.first <= layer < stage.last for layer in layers)
        for t in (range(len(stage.devices)) if tp is None else (tp,))
    )


def _weights(plan: Plan, layers: tuple[int, ...], members: tuple[Rank, ...]) -> list[int]:
    """What each member owns against the others; all alike where not every stage says."""
    stages = [plan.stage_at(plan.seats[rank]) for rank in members]
    # Of a tied line a stage may use any: it counts by the first that it holds.
    held = [next(layer for layer in layers if stage.first <= layer < stage.last) for stage in stages]
    weights = [stage.share_of(layer) for stage, layer in zip(stages, held, strict=True)]
    return weights if all(stage.shares for stage in stages) and any(weights) else [1] * len(members)


def _cuts(size: int, weights: list[int]) -> tuple[int, ...]:
    num_blocks, total = size // BLOCK, sum(weights)
    return tuple(num_blocks * reached // total * BLOCK for reached in accumulate(weights, initial=0))


def _padded(width: int) -> int:
    return -(-width // BLOCK) * BLOCK
