"""Kinds of accelerator: dense peaks, memory and bandwidths, each figure with where it comes from.

Figures are those of data sheets, dense only: the larger numbers beside them there (1979 for an H100 in bf16, 242 for an L4)
are with structured sparsity, which training does not have. What a device really reaches is the planner's constants.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceKind:
    """A kind of accelerator. GB/s are 1e9 bytes a second, TFLOP/s 1e12 operations a second."""

    name: str
    memory_bytes: int
    bf16_tflops: float
    """Dense tensor peak in bf16; in fp16 where the kind has no bf16."""
    memory_gb_s: float
    link_gb_s: float = 32.0
    """To a device of the same node, one way."""
    network_gb_s: float = 12.5
    """To another node, one way, per device: what such nodes usually have; a cluster file may say otherwise."""
    sources: dict[str, str] = field(default_factory=dict, hash=False, compare=False)
    """Figure -> where it is written."""
    is_corrected: bool = False
    """By what nodes of this kind were measured to reach."""


def _sheet(name: str, **more: str) -> dict[str, str]:
    return {
        "memory_bytes": name,
        "bf16_tflops": name,
        "memory_gb_s": name,
        "link_gb_s": f"{name}, half of its bidirectional figure",
        "network_gb_s": "one 100 Gb/s adapter a device",
    } | more


_NVIDIA_400 = {"network_gb_s": "one 400 Gb/s adapter a device, as in the vendor's reference systems"}
_A100_80 = _sheet("NVIDIA A100 data sheet, 80 GB SXM", network_gb_s="one 200 Gb/s adapter a device, as in DGX A100")

KINDS: dict[str, DeviceKind] = {
    kind.name: kind
    for kind in (
        DeviceKind(
            name="V100",
            memory_bytes=16 * GIB,
            bf16_tflops=125,
            memory_gb_s=900,
            link_gb_s=150,
            sources=_sheet(
                "NVIDIA V100 data sheet, SXM2 16 GB", bf16_tflops="NVIDIA V100 data sheet: fp16, it has no bf16"
            ),
        ),
        DeviceKind(
            name="T4",
            memory_bytes=16 * GIB,
            bf16_tflops=65,
            memory_gb_s=320,
            link_gb_s=16,
            network_gb_s=6.25,
            sources=_sheet(
                "NVIDIA T4 data sheet",
                bf16_tflops="NVIDIA T4 data sheet: fp16, it has no bf16",
                link_gb_s="PCIe 3.0 x16",
                network_gb_s="one 50 Gb/s share a device",
            ),
        ),
        DeviceKind(
            name="L4",
            memory_bytes=24 * GIB,
            bf16_tflops=121,
            memory_gb_s=300,
            link_gb_s=32,
            network_gb_s=6.25,
            sources=_sheet(
                "NVIDIA L4 data sheet",
                bf16_tflops="NVIDIA L4 data sheet: 242 with sparsity, halved",
                link_gb_s="PCIe 4.0 x16",
                network_gb_s="one 50 Gb/s share a device",
            ),
        ),
        DeviceKind(
            name="A100-40",
            memory_bytes=40 * GIB,
            bf16_tflops=312,
            memory_gb_s=1555,
            link_gb_s=300,
            sources=_sheet("NVIDIA A100 data sheet, 40 GB SXM"),
        ),
        DeviceKind(
            name="A100",
            memory_bytes=80 * GIB,
            bf16_tflops=312,
            memory_gb_s=2039,
            link_gb_s=300,
            network_gb_s=25,
            sources=_A100_80,
        ),
        DeviceKind(
            name="A100-80",
            memory_bytes=80 * GIB,
            bf16_tflops=312,
            memory_gb_s=2039,
            link_gb_s=300,
            network_gb_s=25,
            sources=_A100_80,
        ),
        DeviceKind(
            name="H100",
            memory_bytes=80 * GIB,
            bf16_tflops=989,
            memory_gb_s=3350,
            link_gb_s=450,
            network_gb_s=50,
            sources=_sheet("NVIDIA H100 data sheet, SXM5", bf16_tflops="NVIDIA H100 data sheet: 1979 with sparsity, halved")
            | _NVIDIA_400,
        ),
        DeviceKind(
            name="H200",
            memory_bytes=141 * GIB,
            bf16_tflops=989,
            memory_gb_s=4800,
            link_gb_s=450,
            network_gb_s=50,
            sources=_sheet("NVIDIA H200 data sheet, SXM", bf16_tflops="NVIDIA H200 data sheet: 1979 with sparsity, halved")
            | _NVIDIA_400,
        ),
        DeviceKind(
            name="B200",
            memory_bytes=180 * GIB,
            bf16_tflops=2250,
            memory_gb_s=8000,
            link_gb_s=900,
            network_gb_s=50,
            sources=_sheet(
                "NVIDIA HGX B200 data sheet", bf16_tflops="NVIDIA HGX B200 data sheet: 4500 with sparsity, halved"
            )
            | _NVIDIA_400,
        ),
        DeviceKind(
            name="cpu",
            memory_bytes=4 * GIB,
            bf16_tflops=0.05,
            memory_gb_s=20,
            link_gb_s=5,
            network_gb_s=1,
            sources=dict.fromkeys(
                ("memory_bytes", "bf16_tflops", "memory_gb_s", "link_gb_s", "network_gb_s"),
                "a share of one core, as emulated nodes have; not a data sheet",
            ),
        ),
    )
}

Kinds: TypeAlias = Mapping[str, DeviceKind]


def table(rows: Iterable[DeviceKind] = ()) -> Kinds:
    """Everybody's rows, and these besides or instead of those of the same name."""
    return KINDS | {row.name: row for row in rows}


def row_of(kind: str, kinds: Kinds = KINDS) -> DeviceKind:
    """A kind that nobody knows counts as a processor."""
    return kinds.get(kind) or replace(kinds["cpu"], name=kind)


def speed_of(kind: str, kinds: Kinds = KINDS) -> float:
    """By dense bf16 rate, of an A100's; 1.0 of a processor, which stands for nothing, and of a kind nobody knows."""
    known = kinds.get(kind)
    return known.bf16_tflops / KINDS["A100"].bf16_tflops if known and kind != "cpu" else 1.0
