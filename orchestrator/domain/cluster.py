"""Nodes and the kinds of device they carry."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from .ids import Device, NodeId

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceKind:
    """A kind of accelerator. Figures are vendor data sheets, dense; the planner corrects them by measurement."""

    name: str
    memory_bytes: int
    bf16_tflops: float
    memory_gb_s: float


KINDS: dict[str, DeviceKind] = {
    kind.name: kind
    for kind in (
        DeviceKind(name="A100", memory_bytes=80 * GIB, bf16_tflops=312, memory_gb_s=2039),
        DeviceKind(name="H100", memory_bytes=80 * GIB, bf16_tflops=989, memory_gb_s=3350),
        DeviceKind(name="H200", memory_bytes=141 * GIB, bf16_tflops=989, memory_gb_s=4800),
        DeviceKind(name="B200", memory_bytes=180 * GIB, bf16_tflops=2250, memory_gb_s=8000),
        DeviceKind(name="cpu", memory_bytes=4 * GIB, bf16_tflops=0.05, memory_gb_s=20),
    )
}


def speed_of(kind: str) -> float:
    """By dense bf16 rate, of an A100's; 1.0 of a processor, which stands for nothing, and of a kind nobody knows."""
    known = KINDS.get(kind)
    return known.bf16_tflops / KINDS["A100"].bf16_tflops if known and kind != "cpu" else 1.0


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

    @property
    def domain(self) -> str | None:
        """The failure domain it shares with others, as `rack=r1`; None where no label says so: then it stands alone."""
        return next((f"{name}={self.labels[name]}" for name in DOMAIN_LABELS if self.labels.get(name)), None)

    def devices(self) -> tuple[Device, ...]:
        return tuple(Device(self.id, index) for index in range(self.num_devices))
