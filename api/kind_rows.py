"""Rows of kinds of device as users write them, in a cluster's file and in the service's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field

from orchestrator.domain.kinds import GIB, DeviceKind

from .schemas import Real, Request

Rate = Annotated[Real, Field(gt=0, le=1e6)]


class KindSection(Request):
    """A kind of device that is not known, or other figures for one that is. Dense peaks, GB/s one way."""

    memory_gib: Annotated[Real, Field(gt=0, le=65_536)]
    bf16_tflops: Rate
    memory_gb_s: Rate
    link_gb_s: Rate = 32.0
    network_gb_s: Rate = 12.5


def rows(kinds: Mapping[str, KindSection], source: str) -> tuple[DeviceKind, ...]:
    """source: where they are written, for people."""
    return tuple(
        DeviceKind(
            name=name,
            memory_bytes=int(kind.memory_gib * GIB),
            bf16_tflops=kind.bf16_tflops,
            memory_gb_s=kind.memory_gb_s,
            link_gb_s=kind.link_gb_s,
            network_gb_s=kind.network_gb_s,
            sources=dict.fromkeys(KindSection.model_fields, source),
        )
        for name, kind in sorted(kinds.items())
    )
