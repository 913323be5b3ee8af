"""What a program says of itself for another library: its configuration, and the name and form of each tensor there.

The seam by which programs are exported: one that has a method `foreign` can be. It holds no values, and knows neither where
those are kept nor how they are written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch

from orchestrator.domain.spec import JobSpec


def as_it_is(values: torch.Tensor) -> torch.Tensor:
    return values


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignTensor:
    """turn: from the line's own shape to `shape`, without changing a value."""

    name: str
    line: str
    shape: tuple[int, ...]
    turn: Callable[[torch.Tensor], torch.Tensor] = as_it_is


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """config: of config.json, the type of numbers apart. tensors: in the order in which they are written."""

    config: Mapping[str, object]
    tensors: tuple[ForeignTensor, ...]
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Small ones to go beside them, by name: a tokenizer."""


@runtime_checkable
class Exportable(Protocol):
    def foreign(self, spec: JobSpec) -> Foreign:
        """Raises Refused where these settings mean something that the other library has no word for."""
        ...
