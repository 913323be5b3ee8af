"""What each kind of failure strikes, with which signal, and how the cluster is made whole again before the next.

It knows processes and nodes; what a job makes of their loss is measured elsewhere.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from api.client import Client
from api.views import JobView, NodeView, SeatView
from deploy.local import LocalCluster, NodeSpec
from orchestrator.adapters.processes import ProcessId

from .cluster import NODES, NotMeasured, processes_of, ranks_of

REPAIR_S = 120.0
SPARE = NodeSpec("H100", 2)
_POLL_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """signal: SIGKILL, or SIGSTOP for silence: sockets stay open, nothing is reset, nobody answers.

    A whole node is every process of it: raylet, host, zygote and ranks. Where whole nodes are struck one more stands by,
    because the pause is measured to full strength.
    """

    name: str
    signal: signal.Signals
    whole_node: bool = False

    @property
    def spares(self) -> int:
        return int(self.whole_node)

    @property
    def nodes(self) -> tuple[NodeSpec, ...]:
        return (*NODES, *(SPARE,) * self.spares)


KINDS = {
    kind.name: kind
    for kind in (
        Kind(name="rank_kill", signal=signal.SIGKILL),
        Kind(name="node_kill_spare", signal=signal.SIGKILL, whole_node=True),
        Kind(name="rank_stop", signal=signal.SIGSTOP),
        Kind(name="power_loss", signal=signal.SIGSTOP, whole_node=True),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """at: the instant just before the first signal, wall clock, s."""

    at: float
    whom: str
    node: NodeView | None
    processes: tuple[ProcessId, ...]


class Victims:
    def __init__(self, kind: Kind, cluster: LocalCluster, client: Client, random: Random) -> None:
        self.kind = kind
        self._cluster = cluster
        self._client = client
        self._random = random

    def strike(self, view: JobView, after_s: float) -> Strike:
        """One rank of the running plan, or its node, after `after_s`. Raises NotMeasured where a rank is missing."""
        assert view.plan is not None
        ranks, seat = ranks_of(view), self._random.choice(view.plan.seats)
        if self.kind.whole_node:
            node = self._node(node_of(seat))
            at, struck = send_to_all(lambda: processes_of(self._cluster, node.id), self.kind.signal, after_s)
            return Strike(at=at, whom=f"node {node.id}", node=node, processes=struck)
        at, struck = send_to_all(lambda: (ranks[seat.rank],), self.kind.signal, after_s)
        return Strike(at=at, whom=f"rank {seat.rank}", node=None, processes=struck)

    def end(self, strike: Strike) -> None:
        """What was struck and still exists."""
        for process in strike.processes:
            process.send(signal.SIGKILL)

    def repair(self, strike: Strike) -> None:
        """Add such a node for one that was lost, and wait until it is up; it is the next spare. Raises NotMeasured."""
        if strike.node is None:
            return
        self._cluster.kill_node(strike.node.id)  # also whatever appeared while it was struck
        name = self._cluster.add_node(strike.node.kind, strike.node.num_devices)
        deadline = time.monotonic() + REPAIR_S
        while not any(node.id == name and node.status == "UP" for node in self._client.nodes()):
            if time.monotonic() > deadline:
                raise NotMeasured(f"node {name} is not up after {REPAIR_S:g} s; look at its raylet's log")
            time.sleep(_POLL_S)

    def _node(self, name: str) -> NodeView:
        found = next((node for node in self._client.nodes() if node.id == name), None)
        if found is None:
            raise NotMeasured(f"node {name} of the plan is not among the cluster's nodes; wait until it is re-formed")
        return found


def send_to_all(
    find: Callable[[], Sequence[ProcessId]], number: signal.Signals, after_s: float
) -> tuple[float, tuple[ProcessId, ...]]:
    """The instant (wall clock, s) before the first signal, and who got one.

    They are looked for before the wait, so that all are struck within a millisecond, and again until there is nobody new:
    one of them may have forked meanwhile.
    """
    found = find()
    time.sleep(after_s)
    at, struck = time.time(), dict.fromkeys(found)
    while found:
        for process in found:
            process.send(number)
        struck.update(dict.fromkeys(found))
        found = [process for process in find() if process not in struck]
    return at, tuple(struck)


def node_of(seat: SeatView) -> str:
    return seat.device.rpartition("/")[0]
