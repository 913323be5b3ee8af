"""What Ray's own tables say of nodes and actors. Its calls block, and ask a GCS that may be away: they are for threads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.domain.cluster import Node, NodeStatus
from orchestrator.domain.ids import NodeId

from .mailbox import leaving_nodes
from .ray_environment import DEVICES_LABEL, KIND_LABEL, own_labels


@dataclass(frozen=True, slots=True)
class Raylet:
    """A row of Ray's table: one life of a node. id: Ray's, another one after each restart."""

    id: str
    node: Node
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """raylets: of nodes of ours, oldest lives first where it says so.

    is_homeless: the raylet this driver came with has ended and another head has taken its place. Ray asks the raylet of an
    actor's owner where the actor could go; without it, any node that it takes for living, also one that nobody reaches.
    """

    raylets: tuple[Raylet, ...] = ()
    is_homeless: bool = False


def read_table() -> Table:
    ray = _ray()
    home: str = ray.get_runtime_context().get_node_id()
    rows: list[Mapping[str, Any]] = sorted(ray.nodes(), key=lambda row: bool(row["Alive"]))
    living = [row for row in rows if row["Alive"]]
    leaving = leaving_nodes()
    has_head = any(KIND_LABEL not in _labels(row) for row in living)
    return Table(
        raylets=tuple(_raylet(row, leaving) for row in rows if KIND_LABEL in _labels(row)),
        is_homeless=has_head and all(row["NodeID"] != home for row in living),
    )


def is_placed(actor: Any) -> bool:
    """Whether Ray has ever had it on a node; what has ended counts."""
    from ray._private.state import actors

    found: Mapping[str, Any] = actors(actor._actor_id.hex())
    return found.get("State") not in ("DEPENDENCIES_UNREADY", "PENDING_CREATION")


def _raylet(row: Mapping[str, Any], leaving: frozenset[NodeId]) -> Raylet:
    labels = _labels(row)
    node = Node(
        id=NodeId(row["NodeName"]),
        kind=labels[KIND_LABEL],
        num_devices=int(labels[DEVICES_LABEL]),
        status=NodeStatus.UP if row["Alive"] else NodeStatus.LOST,
        address=row["NodeManagerAddress"],
        labels=own_labels(labels),
        life=row["NodeID"],
        leaving=row["NodeName"] in leaving,
    )
    return Raylet(row["NodeID"], node, int(row["NodeManagerPort"]))


def _labels(row: Mapping[str, Any]) -> Mapping[str, str]:
    return row.get("Labels") or {}


def _ray() -> Any:
    """Imported late: it reads the environment when it is."""
    import ray

    return ray
