"""Cordoned nodes while the kernel works on them: what operators asked for, and what has come of it.

It owns the list, which belongs to the cluster. How a job leaves a node that drains is moving.py's, and taking the node away
is its provider's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from orchestrator.domain.cluster import Node, NodeStatus
from orchestrator.domain.cordon import Cordon
from orchestrator.domain.events import CordonRequested
from orchestrator.domain.ids import NodeId

from .deadlines import ASK_AGAIN_S

NONE = frozenset[NodeId]()


class Cordons:
    """Mutable, and alive for one kernel step only."""

    def __init__(self, known: Mapping[NodeId, Cordon], now: float) -> None:
        self._before = dict(known)
        self._known = dict(known)
        self._now = now

    @property
    def known(self) -> Mapping[NodeId, Cordon]:
        return self._known

    @property
    def has_changed(self) -> bool:
        return self._known != self._before

    @property
    def draining(self) -> frozenset[NodeId]:
        """Jobs are to leave these."""
        return frozenset(node for node, one in self._known.items() if one.drains) if self._known else NONE

    def closed_to(self, present: Collection[NodeId]) -> frozenset[NodeId]:
        """Nodes on which a job that is present on some may not be planned."""
        return frozenset(node for node, one in self._known.items() if one.drains or node not in present)

    def cordon(self, asked: CordonRequested) -> bool:
        """Whether that is news. What was asked before is never weakened by it: only lifting the cordon does that."""
        before = self._known.get(asked.node) or Cordon(node=asked.node, since=self._now)
        deadline = before.deadline if asked.deadline_s is None else self._now + asked.deadline_s
        after = replace(
            before,
            drains=before.drains or asked.drain,
            removes=before.removes or asked.remove,
            deadline=deadline,
        )
        self._known[asked.node] = after
        return after != self._before.get(asked.node)

    def lift(self, node: NodeId) -> bool:
        """Whether there was one."""
        return self._known.pop(node, None) is not None

    def settle(self, nodes: Iterable[Node], occupied: Collection[NodeId]) -> tuple[NodeId, ...]:
        """Note which are empty, forget those that have gone; nodes that are to be taken away now."""
        up = {node.id for node in nodes if node.status is not NodeStatus.LOST}
        leaving = []
        for node, one in list(self._known.items()):
            if one.removes and node not in up:
                del self._known[node]
                continue
            now_empty = one.drains and node not in occupied
            is_due = one.deadline is not None and self._now >= one.deadline
            is_asked = one.removed_at and self._now < one.removed_at + ASK_AGAIN_S
            goes = one.removes and (now_empty or is_due) and not is_asked
            self._known[node] = replace(one, is_empty=now_empty, removed_at=self._now if goes else one.removed_at)
            if goes:
                leaving.append(node)
        return tuple(leaving)
