"""What to run when devices are lost: drop the pipelines that broke, mend them, or cut everything anew, whichever costs
least.

    absorb     the pipelines that are whole take the ids of those that are not        what they own is cut anew
    repair     idle groups, then those of other broken pipelines, take lost places    their layers move
    re-shape   the best plan for what is left, roles given so that least moves        the difference moves

Each is priced as expected seconds of moving + horizon x seconds of a step; the horizon is how many steps are expected
until the next change. `Outlook` has the best plan for the loss of one node and of one device of every class ready
before either happens.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import islice

from orchestrator.domain.ids import Device, NodeId
from orchestrator.domain.plan import Pipeline, Plan

from .ask import Ask, NoPlan, Planned, Proposal
from .compose import Member
from .cost import Breakdown
from .heirs import fewest_helpers, nearest
from .machines import ClassKey, Machines
from .pipelines import Bench, Track
from .placement import domains_of, place
from .search import Benches, overfull, price, search
from .shares import Pace, share_ids
from .transport import Span, busiest_sender, least_moves

Group = tuple[Device, ...]
FORM_S = 0.2
"""Of any change: settling, forming groups, the first step's pipeline filling again."""


class Rung(StrEnum):
    ABSORB = "absorb"
    REPAIR = "repair"
    RESHAPE = "re-shape"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One way on; `placed` puts it on devices."""

    rung: Rung
    proposal: Proposal
    moved_bytes: float
    move_s: float
    cost_s: float
    """move_s + horizon x step time."""
    kept: tuple[tuple[Pipeline, ...], ...] = ()
    """By member of the proposal: the pipelines that go on, mended or not; none where all is cut anew."""
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Current:
    """What runs. plan.pipelines are in the order of proposal.members and their ids."""

    proposal: Proposal
    plan: Plan
    machines: Machines


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """What is looked up of a plan when something is lost, found out before."""

    tracks: tuple[Track, ...]
    """Of each pipeline."""
    pipelines_on: Mapping[NodeId, frozenset[int]]
    idle: Mapping[ClassKey, tuple[Group, ...]]
    roles: Mapping[ClassKey, list[tuple[Span, int]]]

    @classmethod
    def of(cls, current: Current) -> Index:
        tracks = tuple(member.track for member in current.proposal.members for _ in member.ids)
        on: dict[NodeId, set[int]] = defaultdict(set)
        used: set[Device] = set()
        for number, pipeline in enumerate(current.plan.pipelines):
            for stage in pipeline.stages:
                used.update(stage.devices)
                on[stage.devices[0].node].add(number)
        idle: dict[ClassKey, list[Group]] = defaultdict(list)
        tp = current.proposal.tp
        for machine in current.machines.nodes:
            free = [device for device in machine.devices if device not in used]
            idle[machine.key].extend(tuple(free[i : i + tp]) for i in range(0, len(free) - tp + 1, tp))
        return cls(
            tracks=tracks,
            pipelines_on={node: frozenset(numbers) for node, numbers in on.items()},
            idle={key: tuple(groups) for key, groups in idle.items()},
            roles=_roles(current.proposal, tracks),
        )


@dataclass(slots=True)
class Outlook:
    """Answers held ready: (class, whole node) -> the plan for what is left of the machines after that loss."""

    ask: Ask
    benches: Benches
    ready: dict[tuple[ClassKey, bool], Planned | NoPlan] = field(default_factory=dict)

    def prepare(self) -> None:
        """For the loss of one node, and of one device, of each class."""
        seen: set[ClassKey] = set()
        for machine in self.ask.machines.nodes:
            if machine.key in seen:
                continue
            seen.add(machine.key)
            for whole in (True, False):
                lost = (machine.node,) if whole else ()
                devices = () if whole else (machine.devices[-1],)
                left = self.ask.machines.without(lost, devices)
                self.ready[machine.key, whole] = search(replace(self.ask, machines=left), self.benches)

    def after(self, nodes: Sequence[NodeId], devices: Sequence[Device]) -> Planned | NoPlan | None:
        """The answer, if there is one ready for just this loss."""
        if len(nodes) + len(devices) != 1:
            return None
        node = nodes[0] if nodes else devices[0].node
        key = self.ask.machines.key_of(node)
        return None if key is None else self.ready.get((key, bool(nodes)))


def replan(
    current: Current,
    outlook: Outlook,
    *,
    nodes: Sequence[NodeId] = (),
    devices: Sequence[Device] = (),
    horizon: float = 1000.0,
    index: Index | None = None,
) -> Change | NoPlan:
    """The cheapest way on without these. horizon: steps. index: of `current`, where it is at hand."""
    index = index or Index.of(current)
    loss = _Loss(gone=frozenset(nodes), dead=frozenset(devices), current=current, index=index)
    bench = _bench(current, outlook)
    options = []
    if absorbed := _running(loss, outlook, bench, loss.whole(), Rung.ABSORB, 0.0, 0.0, horizon):
        options.append(absorbed)
    if options and not loss.broken:
        return replace(options[0], reason="nothing that runs was on it; the plan stays as it is")
    if repaired := _repaired(loss, outlook, bench, horizon):
        options.append(repaired)
    bound = min((change.cost_s for change in options), default=float("inf"))
    fresh = outlook.after(nodes, devices)
    if fresh is None:
        left = current.machines.without(nodes, devices)
        fresh = search(replace(outlook.ask, machines=left), outlook.benches, (bound - FORM_S) / horizon)
    if isinstance(fresh, Planned) and FORM_S + horizon * fresh.best.seconds < bound:
        options.append(_reshaped(loss, fresh.best, bench, horizon))
    if not options:
        return fresh if isinstance(fresh, NoPlan) else NoPlan(reason="no way on was found; add a node")
    best = min(options, key=lambda change: (change.cost_s, change.moved_bytes, list(Rung).index(change.rung)))
    return replace(best, reason=_why(best, options, len(loss.broken), len(index.tracks)))


@dataclass(slots=True)
class _Loss:
    gone: frozenset[NodeId]
    dead: frozenset[Device]
    current: Current
    index: Index
    broken: set[int] = field(init=False)
    """Numbers of pipelines."""

    def __post_init__(self) -> None:
        nodes = self.gone | {device.node for device in self.dead}
        near = {number for node in nodes for number in self.index.pipelines_on.get(node, ())}
        pipelines = self.current.plan.pipelines
        self.broken = {number for number in near if any(self.takes(stage.devices) for stage in pipelines[number].stages)}

    def takes(self, group: Group) -> bool:
        return group[0].node in self.gone or any(device in self.dead for device in group)

    def whole(self) -> dict[int, tuple[Track, Pipeline]]:
        """Pipelines that go on, by their number."""
        pairs = zip(self.index.tracks, self.current.plan.pipelines, strict=True)
        return {number: pair for number, pair in enumerate(pairs) if number not in self.broken}


def _bench(current: Current, outlook: Outlook) -> Bench:
    proposal = current.proposal
    ask = replace(outlook.ask, machines=current.machines)
    return outlook.benches.of(ask, proposal.tp, proposal.batch.samples, proposal.recompute)


# --- absorb --------------------------------------------------------------------------------------------------------------


def _running(
    loss: _Loss,
    outlook: Outlook,
    bench: Bench,
    kept: Mapping[int, tuple[Track, Pipeline]],
    rung: Rung,
    moved_bytes: float,
    seconds: float,
    horizon: float,
) -> Change | None:
    """These pipelines, by their number, with the step's ids shared out anew; None where they are too few or do not fit
    memory.
    """
    current = loss.current
    if not kept or (outlook.ask.limits.replicas or len(kept)) != len(kept):
        return None
    by_track: dict[Track, list[Pipeline]] = {}
    for _, (track, pipeline) in sorted(kept.items()):
        by_track.setdefault(track, []).append(pipeline)
    replicas = len(kept)
    network = min(bench.classes[index].kind.network_gb_s for track in by_track for index in set(track.classes))
    after = {track: sum(bench.after(track, replicas, network)) for track in by_track}
    paces = [Pace(track.fill + after[track], track.period, track.depth, len(mine)) for track, mine in by_track.items()]
    shared = share_ids(paces, current.proposal.batch.micro_batches)
    if shared is None:
        return None
    members = tuple(Member(track=track, ids=ids) for track, ids in zip(by_track, shared, strict=True))
    if overfull(bench, members, replicas):
        return None
    breakdown = price(bench, members)
    recut = _given_bytes(bench, sorted(kept), len(current.plan.pipelines)) * current.proposal.tp
    moved_bytes += recut
    slowest = min(bench.classes[index].kind.network_gb_s for track in by_track for index in set(track.classes)) * 1e9
    num_groups = sum(track.depth * len(mine) for track, mine in by_track.items())
    seconds += recut / (slowest * current.proposal.tp * num_groups)
    return Change(
        rung=rung,
        proposal=_with(current.proposal, members, breakdown),
        moved_bytes=moved_bytes,
        move_s=FORM_S + seconds,
        cost_s=FORM_S + seconds + horizon * breakdown.total,
        kept=tuple(tuple(mine) for mine in by_track.values()),
    )


def _given_bytes(bench: Bench, kept: Sequence[int], before: int) -> float:
    """The same as _recut_bytes where what the lost ones owned goes to those around them (heirs.py)."""
    lost, helpers = sorted(set(range(before)) - set(kept)), fewest_helpers(before, len(kept))
    if helpers * len(lost) >= len(kept):
        return _recut_bytes(bench, kept, before)
    moved = 0.0
    for number in lost:
        near = nearest(kept, number, helpers)
        there = sorted([*near, number])
        moved += (1.0 - _stays([there.index(one) for one in near], len(there))) * len(there)
    return bench.params[-1] * bench.rules.owned_bytes * (1 + bench.rules.mirrors) * moved / before


def _recut_bytes(bench: Bench, kept: Sequence[int], before: int) -> float:
    """Master weights and moments of one tp rank's part of the model that change places because fewer pipelines share them
    out, mirrors counted as what they mirror: as if all held the same layers, and owned alike.

    Each owned the part of its number; those that are left own one after another again, in the same order.
    """
    if list(kept) == list(range(before)):
        return 0.0
    return bench.params[-1] * bench.rules.owned_bytes * (1 + bench.rules.mirrors) * (1.0 - _stays(kept, before))


def _stays(kept: Sequence[int], before: int) -> float:
    """Of what all owned, the share whose owner is the same once those that are kept own equal parts in the same order."""
    return sum(
        max(0.0, min((place + 1) / len(kept), (number + 1) / before) - max(place / len(kept), number / before))
        for place, number in enumerate(kept)
    )


def _with(proposal: Proposal, members: tuple[Member, ...], breakdown: Breakdown) -> Proposal:
    return replace(proposal, members=members, breakdown=breakdown, why="")


# --- repair --------------------------------------------------------------------------------------------------------------


def _repaired(loss: _Loss, outlook: Outlook, bench: Bench, horizon: float) -> Change | None:
    """Lost places filled by idle groups of the same class, then by groups of the broken pipelines that have most lost
    places.
    """
    index, plan, keys = loss.index, loss.current.plan, loss.current.proposal.keys
    enough = len(loss.broken) * max((index.tracks[number].depth for number in loss.broken), default=0)
    spare = {
        key: list(islice((group for group in index.idle.get(key, ()) if not loss.takes(group)), enough)) for key in keys
    }
    lost = {n: sum(loss.takes(stage.devices) for stage in plan.pipelines[n].stages) for n in loss.broken}
    waiting = sorted(loss.broken, key=lambda n: (lost[n], n))
    kept, moved, slowest = loss.whole(), 0.0, 0.0
    while waiting:
        number = waiting.pop(0)
        track, pipeline = index.tracks[number], plan.pipelines[number]
        stages = []
        for where, stage in zip(track.classes, pipeline.stages, strict=True):
            mine = spare[keys[where]]
            while loss.takes(stage.devices) and not mine and waiting:
                giver = waiting.pop()
                for other, given in zip(index.tracks[giver].classes, plan.pipelines[giver].stages, strict=True):
                    if not loss.takes(given.devices):
                        spare[keys[other]].append(given.devices)
            if loss.takes(stage.devices):
                if not mine:
                    break
                stage = replace(stage, devices=mine.pop(0))
                each = (bench.params[stage.last] - bench.params[stage.first]) * _state_bytes(bench, len(plan.pipelines))
                moved += each * loss.current.proposal.tp
                slowest = max(slowest, each / (bench.classes[where].kind.network_gb_s * 1e9))
            stages.append(stage)
        else:
            kept[number] = (track, replace(pipeline, stages=tuple(stages)))
    return _running(loss, outlook, bench, kept, Rung.REPAIR, moved, slowest, horizon) if moved else None


def _state_bytes(bench: Bench, replicas: int) -> float:
    """Of a parameter, to a device that has nothing of it: its compute copy, and its part of what is owned."""
    rules = bench.rules
    return rules.copy_bytes / 2 + rules.owned_bytes * (1 + rules.mirrors) / replicas


# --- re-shape ------------------------------------------------------------------------------------------------------------


def _reshaped(loss: _Loss, fresh: Proposal, bench: Bench, horizon: float) -> Change:
    moved, seconds = _to_move(loss, fresh, bench)
    before = len(loss.current.plan.pipelines)
    # Who takes whose place is not known yet: those that go on keep their order, as they would if all were absorbed.
    kept = [*sorted(loss.whole()), *range(before, before + fresh.replicas)][: fresh.replicas]
    recut = _recut_bytes(bench, kept, before) * fresh.tp
    moved += recut
    seconds += recut / (min(one.kind.network_gb_s for one in bench.classes) * 1e9 * fresh.num_devices)
    return Change(
        rung=Rung.RESHAPE,
        proposal=fresh,
        moved_bytes=moved,
        move_s=FORM_S + seconds,
        cost_s=FORM_S + seconds + horizon * fresh.seconds,
    )


def _to_move(loss: _Loss, new: Proposal, bench: Bench) -> tuple[float, float]:
    """(bytes in all, seconds at the slowest receiver or sender). Another tp cuts every line anew: all of it moves."""
    old = loss.current.proposal
    weights = [params * _state_bytes(bench, new.replicas) for params in bench.params]
    before, after = _left(loss), _roles(new, tuple(member.track for member in new.members for _ in member.ids))
    moved, needed = 0.0, [0.0] * (len(bench.params) - 1)
    receiver = 0.0
    slowest = min(one.kind.network_gb_s for one in bench.classes) * 1e9
    for key, roles in after.items():
        # A device of another number of siblings on its node is another class, and still has what it had.
        held = [one for name, one in before.items() if name.name == key.name] if new.tp == old.tp else []
        merged = _merged(held)
        moves = least_moves(merged, roles, weights)
        moved += moves.moved * new.tp
        for (i, j), count in moves.pairs.items():
            span = roles[j][0]
            common = (0, 0) if i is None else (max(merged[i][0][0], span[0]), min(merged[i][0][1], span[1]))
            own = weights[span[1]] - weights[span[0]]
            kept = weights[common[1]] - weights[common[0]] if common[1] > common[0] else 0.0
            receiver = max(receiver, own - kept)
            for layer in range(*span):
                if not common[0] <= layer < common[1]:
                    needed[layer] += (weights[layer + 1] - weights[layer]) * count
    sender = busiest_sender(_merged(list(before.values())), needed)
    return moved, max(receiver, sender) / slowest


def _roles(proposal: Proposal, tracks: Sequence[Track]) -> dict[ClassKey, list[tuple[Span, int]]]:
    """Groups of each class by the layers they hold."""
    counts: dict[ClassKey, dict[Span, int]] = defaultdict(lambda: defaultdict(int))
    for track, number in Counter(tracks).items():
        for stage, index in enumerate(track.classes):
            counts[proposal.keys[index]][track.bounds[stage], track.bounds[stage + 1]] += number
    return {key: sorted(mine.items()) for key, mine in sorted(counts.items())}


def _left(loss: _Loss) -> dict[ClassKey, list[tuple[Span, int]]]:
    """The roles that groups hold which are still there."""
    counts = {key: dict(mine) for key, mine in loss.index.roles.items()}
    keys = loss.current.proposal.keys
    for number in loss.broken:
        for index, stage in zip(loss.index.tracks[number].classes, loss.current.plan.pipelines[number].stages, strict=True):
            if loss.takes(stage.devices):
                counts[keys[index]][stage.first, stage.last] -= 1
    return {key: sorted((span, count) for span, count in mine.items() if count) for key, mine in counts.items()}


def _merged(roles: Iterable[list[tuple[Span, int]]]) -> list[tuple[Span, int]]:
    found: dict[Span, int] = defaultdict(int)
    for mine in roles:
        for span, count in mine:
            found[span] += count
    return sorted(found.items())


# --- placing what was chosen ---------------------------------------------------------------------------------------------


def placed(change: Change, current: Current, nodes: Sequence[NodeId] = (), devices: Sequence[Device] = ()) -> Plan:
    """The plan of a change, on devices. Pipelines that go on keep theirs; cut anew, groups that hold something come
    first.
    """
    if not change.kept:
        used = set(current.plan.devices)
        left = current.machines.without(nodes, devices)
        return place(change.proposal, left, reason=change.reason, prefer=lambda group: group[0] not in used)
    counted = [
        (pipeline, number)
        for mine, member in zip(change.kept, change.proposal.members, strict=True)
        for pipeline, number in zip(mine, member.ids, strict=True)
    ]
    pipelines, first = [], 0
    # In the order they had: who owns what follows from that.
    for pipeline, number in sorted(counted, key=lambda one: _number(one[0], current.plan)):
        pipelines.append(replace(pipeline, micro_batches=tuple(range(first, first + number))))
        first += number
    domains = domains_of(current.machines, pipelines)  # also of nodes that were idle
    return Plan(pipelines=tuple(pipelines), reason=change.reason, domains=domains)


def _number(pipeline: Pipeline, plan: Plan) -> int:
    """Which one it was: the one that most of its devices were in."""
    seats = (plan.seat_of.get(device) for stage in pipeline.stages for device in stage.devices)
    found = Counter(seat.pipeline for seat in seats if seat is not None)
    return min(found, key=lambda number: (-found[number], number), default=len(plan.pipelines))


# --- words ---------------------------------------------------------------------------------------------------------------


def _of_state(moved: float) -> str:
    return f" and {moved / 1e9:.3g} GB of their state" if moved else " and nothing moves"


def _why(best: Change, options: Sequence[Change], broken: int, pipelines: int) -> str:
    others = [
        f"{one.rung} would move {one.moved_bytes / 1e9:.3g} GB and step in {one.proposal.seconds:.3g} s"
        for one in options
        if one.rung is not best.rung
    ]
    what: Mapping[Rung, str] = {
        Rung.ABSORB: f"the others take their ids{_of_state(best.moved_bytes)}",
        Rung.REPAIR: f"lost places are filled and {best.moved_bytes / 1e9:.3g} GB move",
        Rung.RESHAPE: f"everything is cut anew and {best.moved_bytes / 1e9:.3g} GB move",
    }
    said = f"{broken} of {pipelines} pipelines broke: {what[best.rung]}; a step takes {best.proposal.seconds:.3g} s"
    return "; ".join([said, *others])
