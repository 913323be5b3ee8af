"""Who may be planned on, while the kernel works on it: nodes are checked when they come and when a fault accuses them.

It owns the list, which belongs to the cluster and outlives jobs and supervisors. What a check's outcome means is
recovery/admission.py's, how it is made a provider's. Where nodes are not checked (`checks` is off), nothing is kept.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from orchestrator.domain.admission import Admission, Admittance
from orchestrator.domain.cluster import Node, NodeStatus
from orchestrator.domain.effects import CheckNode
from orchestrator.domain.events import NodeChecked
from orchestrator.domain.failure import Cause
from orchestrator.domain.ids import NodeId
from orchestrator.domain.incident import Incident
from orchestrator.domain.kinds import Kinds
from orchestrator.recovery import admission
from orchestrator.recovery.admission import ASK_AGAIN_S, CHECK_S, parole_s

from .draft import Draft

ACCUSING = frozenset({Cause.HANG, Cause.LINK_LOST, Cause.NODE_LOST})
"""Faults that a node may be the reason of; a device that computes wrongly is doubting.py's."""


class Admissions:
    """Mutable, and alive for one kernel step only."""

    def __init__(self, known: Mapping[NodeId, Admission], now: float, checks: bool) -> None:
        self._before: Mapping[NodeId, Admission] = known if checks else {}
        self._known = dict(self._before)
        self._touched: set[NodeId] = set()
        """Only these can have changed: the others of a large cluster need not be looked at."""
        self._now = now
        self._unfit: frozenset[NodeId] | None = None
        self.checks = checks

    @property
    def known(self) -> Mapping[NodeId, Admission]:
        return self._known

    @property
    def has_changed(self) -> bool:
        return any(self._known.get(node) != self._before.get(node) for node in self._touched)

    @property
    def refused(self) -> frozenset[NodeId]:
        """Jobs are to leave these where they can."""
        unfit = self.unfit
        return frozenset(node for node in unfit if self._known[node].standing is Admittance.REFUSED) if unfit else unfit

    @property
    def newly_refused(self) -> tuple[Admission, ...]:
        return tuple(
            self._known[node]
            for node in sorted(self.refused & self._touched)
            if node not in self._before or self._before[node].standing is not Admittance.REFUSED
        )

    @property
    def newly_admitted(self) -> tuple[Admission, ...]:
        """Those that had been refused, or accused."""
        return tuple(
            one
            for node in sorted(self._touched)
            if (one := self._known.get(node)) is not None
            and one.standing is Admittance.ADMITTED
            and (before := self._before.get(node)) is not None
            and before.standing is not Admittance.ADMITTED
            and (before.was_admitted or before.strikes)
        )

    @property
    def awaits_checks(self) -> bool:
        """Some nodes will be known to be fit, or not, in a moment."""
        return any(_is_awaited(self._known[node], self._now) for node in self.unfit)

    @property
    def unfit(self) -> frozenset[NodeId]:
        """Nodes on which nothing new may be placed; what a job has there is not taken away."""
        if self._unfit is None:
            fit = Admittance.ADMITTED
            self._unfit = frozenset(node for node, one in self._known.items() if one.standing is not fit)
        return self._unfit

    def see(self, nodes: Iterable[Node], occupied: Collection[NodeId], leaving: Collection[NodeId]) -> None:
        """The cluster as it is now. occupied: what a job trains on is fit as far as anybody knows.

        leaving: nodes that were to be taken away; that they go is no fault.
        """
        if not self.checks:
            return
        here = {node.id: node for node in nodes}
        for id, node in here.items():
            known = self._known.get(id)
            if node.status is NodeStatus.UP:
                if known is None:
                    self._put(id, admission.is_new(id, node.life, self._now))
                    if id in occupied:
                        self._put(id, replace(self._known[id], standing=Admittance.ADMITTED, why=""))
                elif not known.is_here or (node.life and known.life != node.life):
                    self._put(id, admission.came_back(known, node.life, self._now))
            elif known is not None:
                self._put(id, admission.went_away(known, node.status is NodeStatus.LOST, self._now))
        for id, known in list(self._known.items()):
            if id not in here:
                known = admission.went_away(known, True, self._now)
                self._put(id, known)
            if known.is_lost and (id in leaving or admission.is_forgettable(known, self._now)):
                self._drop(id)

    def accuse(self, incident: Incident) -> None:
        """A recovery is over, so that checking disturbs nobody; of what a node may be the reason of, it is asked."""
        fault = incident.fault
        nodes = tuple(sorted({device.node for device in fault.devices} | ({fault.node} if fault.node else set())))
        for node in nodes if self.checks and fault.cause in ACCUSING else ():
            if node in self._known:
                others = tuple(other for other in nodes if other != node)
                why = f"a fault points at it: {fault.message}"
                self._put(node, admission.accused(self._known[node], why, others, self._now))

    def hear(self, said: NodeChecked, kinds: Mapping[NodeId, str], table: Kinds) -> None:
        known = self._known.get(said.node)
        if known is None or known.standing is not Admittance.CHECKING or known.number != said.number:
            return  # told again, or of a check that is not waited for any more
        if known.asked_at is None:
            return
        kind = kinds.get(said.node, "")
        peers = [
            one.product_s
            for node, one in self._known.items()
            if node != said.node and one.standing is Admittance.ADMITTED and one.product_s and kinds.get(node) == kind
        ]
        tried = {*known.failed, known.peer}
        others = any(node not in tried for node in self._peers(said.node))
        self._put(said.node, admission.answered(known, said.found, kind, peers, others, self._now, table))

    def release(self, node: NodeId) -> bool:
        """An operator vouches for a node: nothing is held against it any more, but it is checked. Whether anything was."""
        known = self._known.get(node)
        if known is None or not (known.strikes or known.ends or known.standing is Admittance.REFUSED):
            return False
        fresh = admission.checking(replace(known, strikes=0, ends=()), "an operator released it", self._now)
        self._put(node, fresh if known.standing is Admittance.REFUSED else replace(known, strikes=0, ends=()))
        return True

    def due(self) -> tuple[CheckNode, ...]:
        """Checks to ask for now."""
        asked = []
        for node in sorted(self.unfit):
            known = self._known[node]
            if not known.is_here:
                continue
            if known.standing is Admittance.REFUSED and not 0 <= self._now - known.since < parole_s(known):
                known = admission.checking(known, f"it was refused because {known.why}", self._now)
            if known.asked_at is not None and not 0 <= self._now - known.asked_at < ASK_AGAIN_S:
                known = admission.unanswered(known, self._now)
            if known.standing is Admittance.CHECKING and known.asked_at is None:
                left = [peer for peer in self._peers(node) if peer not in known.failed]
                first = [peer for peer in left if peer in known.suspects]
                peer = next(iter([*first, *left]), None)
                known = replace(known, number=known.number + 1, asked_at=self._now, peer=peer)
                asked.append(CheckNode(node=node, number=known.number, peer=peer))
            self._put(node, known)
        return tuple(asked)

    def _put(self, node: NodeId, one: Admission) -> None:
        if one is not self._known.get(node):
            self._known[node] = one
            self._touched.add(node)
            self._unfit = None

    def _drop(self, node: NodeId) -> None:
        del self._known[node]
        self._touched.add(node)
        self._unfit = None

    def _peers(self, node: NodeId) -> list[NodeId]:
        """Those that could take part, the fit ones first: each has another one to begin with."""
        here = [id for id, one in self._known.items() if one.is_here and one.standing is not Admittance.REFUSED]
        ordered = sorted(here)
        after = [other for other in ordered if other > node] + [other for other in ordered if other < node]
        return sorted(after, key=lambda other: self._known[other].standing is not Admittance.ADMITTED)


def tell(draft: Draft, refused: Iterable[Admission], admitted: Iterable[Admission]) -> None:
    """What a job is told of nodes it is on."""
    for one in refused:
        if one.node in draft.record.hosts:
            draft.say("node_refused", f"{one.node} is kept out of new plans: {one.why}", node=one.node, strikes=one.strikes)
    for one in admitted:
        if one.node in draft.record.hosts:
            draft.say("node_checked", f"{one.node} is fit to be used: {one.said}", node=one.node)


def _is_awaited(one: Admission, now: float) -> bool:
    is_new = one.standing is Admittance.CHECKING and not one.was_admitted and one.is_here
    return is_new and (one.asked_at is None or 0 <= now - one.asked_at < CHECK_S) and not one.unanswered
