"""The search: every degree of tensor parallelism, micro-batch size and recomputing, best bound first, until none can win.

For each of them `compose` finds the pipelines; here they are priced as they would run, checked device by device against
memory, ranked, and told apart in words. Work grows with classes of nodes and degrees, never with the number of nodes,
and the same question gives the same answer to the last bit.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from math import ceil

from .ask import Ask, Batch, NoPlan, Planned, Proposal, gib
from .compose import FEW, After, Limits, Member, alike, compose
from .cost import Breakdown
from .machines import Machines, NodeClass
from .memory import usable
from .pipelines import Bench, Track
from .uneven import UNCOUNTED, is_tight, memory_of
from .words import listed, lost_by

KEPT = 3
TELLS_APART = 0.03
"""Of a step's time: below it the model's order of two plans of one shape is no better than chance."""
WORTH = 0.02
"""Share of a step's time that unequal shares of the state must save."""
COARSE = (12, 16, 24, 32, 48, 64)
"""Guesses are rounded down to these, the last of them at most: what each replica owns hardly changes between them."""


@dataclass(slots=True)
class Benches:
    """Prices that outlive a question: a re-plan asks about the same model on nearly the same classes."""

    known: dict[tuple[object, ...], Bench] = field(default_factory=dict)

    def of(self, ask: Ask, tp: int, samples: int, recompute: bool) -> Bench:
        classes = tuple(one for one in ask.machines.classes if one.devices >= tp)
        figures = tuple(one.key for one in classes)
        key = (id(ask.model), figures, tp, samples, recompute, ask.rules, ask.constants, id(ask.measured))
        if key not in self.known:
            self.known[key] = Bench(
                model=ask.model,
                classes=classes,
                tp=tp,
                samples=samples,
                recompute=recompute,
                rules=replace(ask.rules, recompute=recompute),
                constants=ask.constants,
                measured=ask.measured,
            )
        return self.known[key]


@dataclass(frozen=True, slots=True)
class _Way:
    least_s: float
    tp: int
    batch: Batch
    recompute: bool
    bench: Bench
    groups: tuple[int, ...]
    network_gb_s: float
    """Of the slowest class that may be used: gradients go through all of them."""

    @property
    def words(self) -> str:
        """`tp2, micro-batches of 4, recomputing, on B200 and H100 alone`."""
        again = ", recomputing" if self.recompute else ""
        names = [dict.fromkeys(one.kind.name for one in self._classes(is_used)) for is_used in (True, False)]
        alone = f", on {listed(list(names[0]))} alone" if set(names[1]) - set(names[0]) else ""
        return f"tp{self.tp}, micro-batches of {self.batch.samples}{again}{alone}"

    def _classes(self, is_used: bool) -> list[NodeClass]:
        return [one for one, number in zip(self.bench.classes, self.groups, strict=True) if bool(number) is is_used]


def _order(way: _Way) -> tuple[float, ...]:
    return way.least_s, way.tp, way.batch.samples, way.recompute, way.network_gb_s


def search(ask: Ask, benches: Benches | None = None, below: float = float("inf")) -> Planned | NoPlan:
    """below: seconds that a plan must beat to be of interest."""
    found: list[Proposal] = []
    losers: list[str] = []
    tried = 0
    for way in sorted(_ways(ask, benches or Benches()), key=_order):
        if way.least_s >= below or (len(found) >= KEPT and way.least_s >= found[0].seconds):
            losers.append(f"{way.words}: at least {way.least_s:.3g} s, were all its devices computing all the time")
            continue
        tried += 1
        limit = min(below, found[0].seconds) if len(found) >= KEPT else below
        proposal = _proposal(way, ask, limit)
        if isinstance(proposal, str):
            losers.append(proposal)
            continue
        if any(one.members == proposal.members and one.tp == proposal.tp for one in found):
            continue
        found.append(proposal)
        found.sort(key=lambda one: (one.seconds, one.num_devices, one.tp, one.batch.samples, one.recompute))
    if not found:
        return _none(ask, losers)
    best = found[0]
    found = [best, *(replace(one, why=lost_by(one, best)) for one in found[1:])]
    kept = three([(one.seconds, (one.tp, one.depths, one.recompute), one.batch.samples) for one in found])
    bound = bound_s(ask)
    proposals = tuple(replace(found[index], bound_s=bound) for index in kept)
    others = (f"{one.shape()}: {one.why}" for index, one in enumerate(found) if index not in kept)
    return Planned(proposals=proposals, losers=tuple(dict.fromkeys([*others, *losers])), tried=tried)


def three(found: Sequence[tuple[float, Hashable, int]]) -> tuple[int, ...]:
    """Which to keep of what was found, fastest first, as (seconds, shape, samples): the fastest, then other shapes.

    A second one of the same shape would be wrong where the first is. Of another shape's micro-batches that the model
    can't tell apart the smallest is kept: it leaves memory free, and more ids to deal out.
    """
    best_of: dict[Hashable, float] = {}
    for seconds, shape, _ in found:
        best_of.setdefault(shape, seconds)
    kept = [0]
    for shape in list(best_of)[1:KEPT]:
        alike = [i for i, one in enumerate(found) if one[1] == shape and one[0] <= best_of[shape] * (1 + TELLS_APART)]
        kept.append(min(alike, key=lambda i: (found[i][2], i)))
    rest = (i for i in range(len(found)) if i not in kept)
    return tuple(sorted([*kept, *islice(rest, max(0, KEPT - len(kept)))]))


def bound_s(ask: Ask) -> float:
    """Seconds below which no plan gets: the model's operations at the rate that all devices reach in a large product.

    Where the time of every kind was seen, what was seen counts.
    """
    batch = ask.batches[0]
    seen = [ask.measured.layers.get((one.kind.name, 1, batch.samples)) for one in ask.machines.classes]
    factors = [ask.measured.factors.get(one.kind.name, 1.0) for one in ask.machines.classes]
    if seen and None not in seen:
        times = [
            factor * sum((one[0] + one[1]) * ask.measured.skew_of(layer) for layer, one in enumerate(layers or ()))
            for layers, factor in zip(seen, factors, strict=True)
        ]
        passes = sum(
            number * one.key.speed / seconds
            for number, one, seconds in zip(_usable(ask, [1 / s for s in times]), ask.machines.classes, times, strict=True)
        )
        return batch.micro_batches / passes
    flops = ask.model.flops(batch.samples * ask.model.sequence) * batch.micro_batches
    least = min((1.0, *ask.measured.skew))
    rates = [
        one.kind.bf16_tflops * 1e12 / min(1.0, factor * least)
        for one, factor in zip(ask.machines.classes, factors, strict=True)
    ]
    rate = sum(number * each for number, each in zip(_usable(ask, rates), rates, strict=True))
    return flops / (rate * ask.constants.product_share) if rate else float("inf")


def _usable(ask: Ask, rates: Sequence[float]) -> list[int]:
    """Devices of each class that a plan may have at most, the fastest first."""
    numbers = [one.nodes * one.devices for one in ask.machines.classes]
    return _first(numbers, ask.limits.max_devices or sum(numbers), sorted(range(len(rates)), key=lambda i: -rates[i]))


def _first(numbers: Sequence[int], most: int, order: Iterable[int]) -> list[int]:
    """At most so many, by class, those of the classes that come first in the order."""
    taken = [0] * len(numbers)
    for index in order:
        taken[index] = min(numbers[index], most)
        most -= taken[index]
    return taken


def _ways(ask: Ask, benches: Benches) -> Iterator[_Way]:
    island = max((one.devices for one in ask.machines.classes), default=0)
    for tp in ask.model.degrees(island):
        if ask.tp is not None and tp != ask.tp:
            continue
        for batch in ask.batches:
            for recompute in ask.recompute:
                bench = benches.of(ask, tp, batch.samples, recompute)
                numbers = {one.key: one.groups(tp) for one in ask.machines.classes}
                groups = [numbers[one.key] for one in bench.classes]
                for used in dict.fromkeys(_choices(bench, groups, ask.limits)):
                    network = min(one.kind.network_gb_s for one, number in zip(bench.classes, used, strict=True) if number)
                    least = _least_s(bench, used, batch.micro_batches)
                    yield _Way(least, tp, batch, recompute, bench, used, network)


def _choices(bench: Bench, groups: Sequence[int], limits: Limits) -> Iterator[tuple[int, ...]]:
    """Groups of each class that may be used together: those with a network as fast as some class's, and of them no more
    than a job may have, the fastest or those with most memory.
    """
    indices = range(len(groups))
    most = limits.max_devices // bench.tp if limits.max_devices else sum(groups)
    orders = (
        sorted(indices, key=lambda i: (bench.seconds[i][-1], i)),
        sorted(indices, key=lambda i: (-bench.rooms[i], bench.seconds[i][-1], i)),
    )
    networks = [one.kind.network_gb_s for one in bench.classes]
    for network in sorted(set(networks)):
        fast = [number if mine >= network else 0 for number, mine in zip(groups, networks, strict=True)]
        for order in orders:
            used = _first(fast, most, order)
            if sum(used) and sum(used) * bench.tp >= limits.min_devices:
                yield tuple(used)


def _least_s(bench: Bench, groups: Sequence[int], ids: int) -> float:
    """No composition is faster. A pipeline of depth p does at most p (T / w - 1) + 1 ids in T seconds, where w is what all
    layers take, and p is at least what its copy of the model needs.
    """
    copy = bench.params[-1] * bench.rules.copy_bytes
    rows = [
        (number, seconds[-1], 1.0 - 1.0 / max(1.0, ceil(copy / room)))
        for number, seconds, room in zip(groups, bench.seconds, bench.rooms, strict=True)
        if number and room > 0
    ]
    least = float("inf")
    while rows:
        rate = sum(number / whole for number, whole, _ in rows)
        least = (ids + sum(number * idle for number, _, idle in rows)) / rate
        useful = [row for row in rows if least > row[1] * row[2]]
        if len(useful) == len(rows):
            break
        rows = useful
    return least


def _proposal(way: _Way, ask: Ask, below: float) -> Proposal | str:
    """The best of one way, or why there is none."""
    bench, ids = way.bench, way.batch.micro_batches
    least = -(-ask.limits.min_devices // way.tp)
    network = way.network_gb_s
    members = tuple[Member, ...]()
    for guess in _guesses(way, ask):
        if members and way.least_s + bench.least_after(guess, network) >= price(bench, members).total:
            continue
        found = compose(bench, way.groups, ids, ask.limits, guess, _after(bench, guess, network), below)
        if not found and sum(way.groups) > FEW:
            break  # fewer to share out state would need more memory still
        if not found or overfull(bench, found, sum(len(member.ids) for member in found)):
            continue
        if not members or price(bench, found).total < price(bench, members).total:
            members = found
        if sum(way.groups) > FEW:
            break
    if sum(way.groups) <= FEW and ask.limits.replicas is None:
        for found in alike(bench, way.groups, ids, ask.limits, lambda number: _after(bench, number, network)):
            if found and _is_better(bench, found, members, least):
                members = found
    memory, is_uneven = _memory(bench, members) if members else {}, False
    # Of many replicas each owns next to nothing, and who owns how much of that matters little.
    is_few = sum(way.groups) <= FEW
    if ask.uneven and is_few and (other := _uneven(way, ask, members, below)) and _groups_of(other[0]) >= least:
        members, memory = other
        is_uneven = True
    if not members:
        return f"{way.words}: {_why_none(way, ask, below)}"
    if _groups_of(members) < least:
        return f"{way.words}: has use for {_groups_of(members) * way.tp} devices, min_devices is {ask.limits.min_devices}"
    return Proposal(
        tp=way.tp,
        batch=way.batch,
        recompute=way.recompute,
        keys=tuple(one.key for one in bench.classes),
        members=members,
        breakdown=price(bench, members),
        memory=memory,
        is_uneven=is_uneven,
    )


def _groups_of(members: Sequence[Member]) -> int:
    """tp groups they take."""
    return sum(member.track.depth * len(member.ids) for member in members)


def _is_better(bench: Bench, found: tuple[Member, ...], members: tuple[Member, ...], least: int) -> bool:
    """Faster, where both take as many groups as the job asks for; what takes too few is no plan."""
    if not members or _groups_of(found) < least or _groups_of(members) < least:
        return not members or _groups_of(members) < min(least, _groups_of(found))
    return price(bench, found).total < price(bench, members).total


def _uneven(
    way: _Way, ask: Ask, members: tuple[Member, ...], below: float
) -> tuple[tuple[Member, ...], dict[str, tuple[float, float]]] | None:
    """Pipelines faster than these that fit where those with more memory own more of the state, and what they need."""
    bench = way.bench
    bound = min(below, price(bench, members).total * (1 - WORTH) if members else below)
    if way.least_s >= bound or not is_tight(bench, min(ask.limits.most_depth, len(ask.model.layers))):
        return None
    guess = _guesses(way, ask)[0]
    after = _after(bench, guess, way.network_gb_s)
    found = compose(bench, way.groups, way.batch.micro_batches, ask.limits, guess, after, bound, owners=UNCOUNTED)
    memory = memory_of(bench, found) if found and price(bench, found).total < bound else None
    return None if memory is None else (found, memory)


def _guesses(way: _Way, ask: Ask) -> list[int]:
    """How many replicas may share out state, the likeliest first; a plan that turns out to have fewer must still fit."""
    if ask.limits.replicas is not None:
        return [ask.limits.replicas]
    most = min(_most_replicas(way), way.batch.micro_batches)
    if sum(way.groups) <= FEW:
        return list(range(most, 0, -1))
    first = _coarse(most)
    return [first, *(one for one in reversed((*range(1, COARSE[0]), *COARSE)) if one < first)]


def _most_replicas(way: _Way) -> int:
    """About as many as there can be, from what a model's copy needs of each class's memory."""
    bench, found = way.bench, 0.0
    whole = bench.params[-1] * bench.rules.copy_bytes
    for number, room in zip(way.groups, bench.rooms, strict=True):
        found += number / max(1.0, whole / room) if room > 0 else 0.0
    return max(1, int(found))


def _coarse(replicas: int) -> int:
    return replicas if replicas < COARSE[0] else max(one for one in COARSE if one <= replicas)


def _after(bench: Bench, replicas: int, network_gb_s: float) -> After:
    known: dict[int, float] = {}

    def seconds(track: Track) -> float:
        if id(track) not in known:
            known[id(track)] = sum(bench.after(track, replicas, network_gb_s)) + bench.constants.step_s
        return known[id(track)]

    return seconds


def price(bench: Bench, members: tuple[Member, ...]) -> Breakdown:
    """Of the pipeline that ends last, with as many replicas and as slow a network as there are."""
    replicas = sum(len(member.ids) for member in members)
    network = min(bench.classes[index].kind.network_gb_s for member in members for index in member.track.classes)
    worst: tuple[float, Member] | None = None
    for member in members:
        end = member.track.fill + member.track.period * member.ids[0] + sum(bench.after(member.track, replicas, network))
        if worst is None or end > worst[0]:
            worst = (end, member)
    assert worst is not None, "a plan has pipelines"
    track, ids = worst[1].track, worst[1].ids[0]
    slow = max(range(track.depth), key=lambda stage: (track.times[stage], stage))
    mine = bench.times[track.classes[slow]][track.layers(slow)]
    compute, tp = sum(time.forward + time.backward for time in mine), sum(time.tp for time in mine)
    dp, optimizer = bench.after(track, replicas, network)
    return Breakdown(
        compute=ids * compute,
        tp=ids * tp,
        bubble=track.fill,
        p2p=ids * (track.period - compute - tp),
        dp=dp,
        optimizer=optimizer + bench.constants.step_s,
    )


def _memory(bench: Bench, members: tuple[Member, ...]) -> dict[str, tuple[float, float]]:
    replicas = sum(len(member.ids) for member in members)
    found: dict[str, tuple[float, float]] = {}
    for member in members:
        for stage, index in enumerate(member.track.classes):
            kind = bench.classes[index].kind
            used = bench.bytes_of(member.track, stage, member.ids[0], replicas)
            found[kind.name] = max(found.get(kind.name, (0.0, 0.0)), (used, float(kind.memory_bytes)))
    return dict(sorted(found.items()))


def overfull(bench: Bench, members: tuple[Member, ...], replicas: int) -> bool:
    return any(
        bench.bytes_of(member.track, stage, member.ids[0], replicas) > usable(bench.classes[index].kind) * (1 + 1e-9)
        for member in members
        for stage, index in enumerate(member.track.classes)
    )


# --- why not -------------------------------------------------------------------------------------------------------------


def _why_none(way: _Way, ask: Ask, below: float) -> str:
    bench, limits = way.bench, ask.limits
    if below < float("inf"):
        return f"does not get below {below:.3g} s"
    replicas, ids = limits.replicas or 1, way.batch.micro_batches
    total = sum(way.groups)
    if limits.least_depth * replicas > total:
        what = "devices" if way.tp == 1 else f"groups of {way.tp} devices on a node"
        return f"needs {limits.least_depth * replicas} {what}, {total} {'is' if total == 1 else 'are'} there"
    if limits.least_depth * replicas > ids:
        return f"{ids} micro-batches are fewer than the stages of its pipelines"
    depth = min(limits.most_depth, len(ask.model.layers), total // replicas, ids // replicas)
    least = min(
        (bench.params[-1] / depth * (ask.rules.copy_bytes + ask.rules.owned_bytes / max(1, total // depth)), one.kind)
        for one in sorted(bench.classes, key=lambda one: -one.kind.memory_bytes)[:1]
    )[0]
    kind = max((one.kind for one in bench.classes), key=lambda kind: kind.memory_bytes)
    return (
        f"needs about {gib(least)} and its activations on a {kind.name} at {depth} stages, {gib(usable(kind))} are usable"
    )


def _none(ask: Ask, losers: list[str]) -> NoPlan:
    machines: Machines = ask.machines
    if not machines.classes:
        return NoPlan(reason="needs devices, none are usable; add a node")
    if not losers:
        island = max(one.devices for one in machines.classes)
        limits, most = ask.limits, ask.limits.max_devices
        if ask.tp is not None and ask.model.divisor % ask.tp:
            return NoPlan(reason=f"tp {ask.tp} does not divide {ask.model.divisor}; choose a divisor", forever=True)
        if ask.tp is not None and island < ask.tp:
            said = f"tp {ask.tp} needs {ask.tp} devices on one node, the largest has {island}"
            return NoPlan(reason=f"{said}; lower tp or wait for a node")
        if most and most < (ask.tp or 1):
            return NoPlan(reason=f"tp {ask.tp} needs {ask.tp} devices, max_devices is {most}; raise it or lower tp")
        usable = f"{machines.num_devices} are usable"
        return NoPlan(reason=f"needs {limits.min_devices} devices, {usable}; lower min_devices or wait for a node")
    best = losers[0]
    if "min_devices" in best:
        return NoPlan(reason=f"{best}; lower it, or raise train.micro_batches")
    if "micro-batches are fewer" in best:
        return NoPlan(reason=f"{best}; lower pp or dp")
    return NoPlan(reason=f"{best}; {_more_memory(ask)}")


def _more_memory(ask: Ask) -> str:
    """What would help, of what was not tried."""
    island = max(one.devices for one in ask.machines.classes)
    can = ["add nodes" if not ask.limits.max_devices else "raise max_devices or add nodes"]
    if ask.tp is not None and any(tp > ask.tp for tp in ask.model.degrees(island)):
        can.append("raise tp")
    if ask.limits.most_depth < min(len(ask.model.layers), ask.machines.num_devices):
        can.append("raise pp")
    if True not in ask.recompute:
        can.append("recompute activations (train.activation_checkpointing)")
    return listed(can, "or")
