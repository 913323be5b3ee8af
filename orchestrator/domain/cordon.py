"""A node that operators keep new work off, and may have emptied: it outlives jobs and supervisors."""

from __future__ import annotations

from dataclasses import dataclass

from .ids import NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class Cordon:
    """Nothing new is placed on the node; what trains there trains on, unless it drains. since, deadline: wall clock."""

    node: NodeId
    since: float
    drains: bool = False
    """Jobs move their state off it, then leave."""
    removes: bool = False
    """The node goes once it is empty,"""
    deadline: float | None = None
    """or at this instant, however far jobs have come."""
    is_empty: bool = False
    """No job has anything there any more."""
    removed_at: float = 0.0
    """When the provider was last asked to take it away."""
