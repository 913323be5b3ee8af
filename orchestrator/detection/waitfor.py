"""Who holds everybody up: one look at every rank, made into the graph of who waits for whom, and read.

    A waits for B, and B ...                                      then
    ... does not wait                                             B has yet to come: an edge
    ... waits too, and has sent A no more than A has received     B has yet to send: an edge
    ... waits too, and has sent A what A never received           the link from B to A has lost it
    ... waits too, and does not take what A has for it            the link from A to B has lost it
    ... cannot be asked                                           an edge to a silent node

Whoever waits is never the culprit; neither is a rank that merely takes long: its own host must have evidence against it.
Where a backend does not tell whom a wait is for, it is for those members of its group that do not wait in that group.
Pure; everything is judged from sights that hold no instants.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from orchestrator.domain.ids import Device, Generation, NodeId, Rank
from orchestrator.domain.sight import Phase, RankSight

STILL_S = 0.3
"""Who has moved more recently than this does not stand still."""
LONELY_S = 15.0
"""A guilty rank that nobody waits for may still come: everybody may be fetching something from the same slow place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Culprits:
    """Others wait for them, they wait for nobody, and there is evidence against each."""

    devices: tuple[Device, ...]
    still_s: float
    message: str
    where: str = ""
    """The phase in which the program itself hung; empty where somebody stopped its process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesSilent:
    """Everybody who can be asked waits, in the end for ranks on these nodes."""

    nodes: tuple[NodeId, ...]
    still_s: float
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LinksLost:
    """Messages that were sent never arrived, between these."""

    pairs: tuple[tuple[Device, Device], ...]
    still_s: float
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Circle:
    """Ranks wait for each other and nothing is on its way: the program does not call the same everywhere."""

    devices: tuple[Device, ...]
    still_s: float
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Standstill:
    """Everybody waits, and for whom cannot be told."""

    still_s: float
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AtWork:
    """Somebody still works or has yet to be heard; it is too early to say more."""

    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Moving:
    """Nothing stands still: the alarm was false."""

    message: str


Diagnosis: TypeAlias = Culprits | NodesSilent | LinksLost | Circle | Standstill | AtWork | Moving


def diagnose(
    ranks: Mapping[Rank, Device], generation: Generation, sights: Mapping[Device, RankSight], silent: Collection[NodeId]
) -> Diagnosis:
    """ranks: members and donors; silent: nodes that have not answered for long. Sights of other nodes may be missing."""
    return _Look(ranks, generation, sights, frozenset(silent)).diagnose()


def fingerprint(sights: Mapping[Device, RankSight]) -> tuple[str, ...]:
    """The same twice only where nobody has moved on in between."""
    return tuple(f"{device} {sight.mark}" for device, sight in sorted(sights.items()))


class _Look:
    def __init__(
        self,
        ranks: Mapping[Rank, Device],
        generation: Generation,
        sights: Mapping[Device, RankSight],
        silent: frozenset[NodeId],
    ) -> None:
        self._device = ranks
        self._rank = {device: rank for rank, device in ranks.items()}
        self._sights = {device: sight for device, sight in sights.items() if device in self._rank}
        self._silent = silent
        self._generation = generation
        self._waiting = {d: s for d, s in self._sights.items() if s.in_wait and not s.is_guilty and self._has_begun(s)}
        self._lost: set[tuple[Device, Device]] = set()
        self._edges = {device: self._waits_for(device) for device in self._waiting}

    def diagnose(self) -> Diagnosis:
        if (found := self._culprits()) is not None:
            return found
        working = [d for d, s in self._sights.items() if d not in self._waiting and not self._is_idle(s)]
        unheard = [d for d in self._rank if d not in self._sights and d.node not in self._silent]
        still_s = min((self._sights[device].still_s for device in (*self._waiting, *working)), default=0.0)
        if unheard:
            return AtWork(message=f"{_some(unheard)} could not be looked at")
        if still_s < STILL_S:
            return Moving(message="every rank has moved on by now")
        if working:
            return AtWork(message=f"{self._where(working[0])} is at work, as far as its host can tell")
        if self._lost:
            return self._lost_links(still_s)
        if (gone := self._silent_nodes(still_s)) is not None:
            return gone
        return self._circle(still_s)

    # --- verdicts ---------------------------------------------------------------------------------------------------------

    def _culprits(self) -> Culprits | None:
        found = []
        for device, sight in sorted(self._sights.items()):
            # A stopped process is as good as dead. Of any other we want to know that it is in somebody's way.
            if sight.is_guilty and (sight.is_stopped or self._waiters(device) or sight.still_s >= LONELY_S):
                found.append(device)
        if not found:
            return None
        told = [f"{self._where(device)} {self._sights[device].why}{self._blocked(device)}" for device in found]
        still_s = max(self._sights[device].still_s for device in found)
        phases = [self._sights[device].phase.name for device in found if not self._sights[device].is_stopped]
        where = phases[0] if phases else ""
        return Culprits(devices=tuple(found), still_s=still_s, message="; ".join(told), where=where)

    def _lost_links(self, still_s: float) -> LinksLost:
        pairs = tuple(sorted({(min(pair), max(pair)) for pair in self._lost}))
        told = [f"{self._name(a)} and {self._name(b)}" for a, b in pairs]
        message = (
            f"messages between {'; between '.join(told)} were sent and never arrived, and nothing moved for {still_s:.1f} s"
        )
        return LinksLost(pairs=pairs, still_s=still_s, message=message)

    def _silent_nodes(self, still_s: float) -> NodesSilent | None:
        waited_for = {d for edges in self._edges.values() for d in edges if d not in self._sights}
        nodes = tuple(sorted({device.node for device in waited_for} & self._silent))
        if not nodes:
            return None
        message = (
            f"{_some(nodes)} does not answer, and {len(self._waiting)} ranks have waited {still_s:.1f} s or more "
            f"in {self._groups(self._waiting)} for {_some(sorted(waited_for))}"
        )
        return NodesSilent(nodes=nodes, still_s=still_s, message=message)

    def _circle(self, still_s: float) -> Circle | Standstill:
        told = all(sight.traffic for sight in self._waiting.values())
        path = _circle_in(self._edges) if told else ()
        if not path:
            message = f"all {len(self._waiting)} ranks wait and nothing has moved for {still_s:.1f} s; none can be blamed"
            return Standstill(still_s=still_s, message=message)
        steps = [
            f"{self._name(device)} waits in {self._sights[device].group} for {self._name(then)}"
            for device, then in zip(path, (*path[1:], path[0]), strict=True)
        ]
        message = (
            f"ranks wait for each other in a circle: {', '.join(steps)}; nothing is lost on the way, so the program does "
            "not call the same collectives in the same order everywhere; compare what these ranks call"
        )
        return Circle(devices=path, still_s=still_s, message=message)

    # --- the graph --------------------------------------------------------------------------------------------------------

    def _waits_for(self, device: Device) -> frozenset[Device]:
        """Whom it cannot go on without; notes links that have lost something on the way."""
        sight, me = self._sights[device], self._rank[device]
        if not sight.traffic:
            return self._waits_for_in_group(device)
        found = set()
        for peer, mine in sight.traffic.items():
            other = self._device.get(peer)
            if other is None or not (mine.awaits or mine.unsent):
                continue
            they = self._waiting.get(other)
            theirs = they.traffic.get(me) if they else None
            if they and sight.phase is Phase.FORM is they.phase:
                self._lost.add((device, other))  # each is there, and they do not find each other
            elif theirs is None:
                found.add(other)
            elif mine.unsent:
                self._lost.add((device, other))
            elif theirs.sent > mine.received or theirs.unsent:
                self._lost.add((other, device))
            else:
                found.add(other)
        return frozenset(found)

    def _waits_for_in_group(self, device: Device) -> frozenset[Device]:
        sight = self._sights[device]
        others = [self._device[rank] for rank in sight.members if rank in self._device and self._device[rank] != device]
        return frozenset(d for d in others if d not in self._waiting or self._sights[d].group != sight.group)

    def _waiters(self, device: Device) -> frozenset[Device]:
        """Everybody who waits for it, be it through others."""
        found: set[Device] = set()
        fresh = {device}
        while fresh:
            fresh = {waiter for waiter, edges in self._edges.items() if edges & fresh} - found - {device}
            found |= fresh
        return frozenset(found)

    def _has_begun(self, sight: RankSight) -> bool:
        return sight.generation == self._generation and sight.phase is not Phase.IDLE

    def _is_idle(self, sight: RankSight) -> bool:
        """It has finished; one that has yet to begin shows an earlier generation."""
        return sight.generation == self._generation and sight.phase is Phase.IDLE

    # --- words ------------------------------------------------------------------------------------------------------------

    def _name(self, device: Device) -> str:
        return f"rank {self._rank[device]} on {device}"

    def _where(self, device: Device) -> str:
        sight = self._sights[device]
        if sight.generation != self._generation:
            return f"{self._name(device)} (yet to begin generation {self._generation})"
        return f"{self._name(device)} (in {sight.phase.name} of step {sight.step})"

    def _blocked(self, device: Device) -> str:
        waiters = len(self._waiters(device))
        return f"; {waiters} rank{'s wait' if waiters > 1 else ' waits'} for it" if waiters else ""

    def _groups(self, devices: Collection[Device]) -> str:
        return _some(sorted({self._sights[device].group for device in devices}))


def _circle_in(edges: Mapping[Device, frozenset[Device]]) -> tuple[Device, ...]:
    """A shortest circle, the same one every time; empty where there is none."""
    best: tuple[Device, ...] = ()
    for start in sorted(edges):
        paths: dict[Device, tuple[Device, ...]] = {start: (start,)}
        queue = [start]
        for device in queue:
            for then in sorted(edges.get(device, ())):
                if then == start and (not best or len(paths[device]) < len(best)):
                    best = paths[device]
                if then not in paths:
                    paths[then] = (*paths[device], then)
                    queue.append(then)
    return best


def _some(items: Collection[object]) -> str:
    shown = [str(item) for item in items]
    return ", ".join(shown[:4]) + (f" and {len(shown) - 4} more" if len(shown) > 4 else "")
