"""Nodes and the kinds of device they carry."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache

from .ids import Device, NodeId
from .kinds import KINDS, DeviceKind, speed_of

EMULATED_FORWARD = 1 / 3
"""Of a layer's time where a job pretends; the backward pass does twice the work (Narayanan et al. 2021, appendix)."""


DOMAIN_LABELS = ("rack", "switch")
"""Labels that name what several nodes lose together, the one that counts first."""


class NodeStatus(StrEnum):
    UP = "UP"
    UNREACHABLE = "UNREACHABLE"
    """Silent, which is no evidence: what trains there trains on, nothing new is placed there."""
    LOST = "LOST"


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A machine as the cluster reports it."""

    id: NodeId
    kind: str
    num_devices: int
    status: NodeStatus = NodeStatus.UP
    address: str = "127.0.0.1"
    labels: dict[str, str] = field(default_factory=dict)
    life: str = ""
    """Another one each time it is started; "" where nobody knows."""
    leaving: bool = False
    """It has asked to be emptied, then to end."""

    @property
    def domain(self) -> str | None:
        """The failure domain it shares with others, as `rack=r1`; None where no label says so: then it stands alone."""
        return next((f"{name}={self.labels[name]}" for name in DOMAIN_LABELS if self.labels.get(name)), None)

    def devices(self) -> tuple[Device, ...]:
        return _devices(self.id, self.num_devices)


@lru_cache(maxsize=1 << 16)
def _devices(node: NodeId, count: int) -> tuple[Device, ...]:
    # Asked for by every job in every step of the kernel.
    return tuple(Device(node, index) for index in range(count))


__all__ = ["DOMAIN_LABELS", "KINDS", "DeviceKind", "Node", "NodeStatus", "speed_of"]
