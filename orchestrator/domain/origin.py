"""Where the state of a generation comes from: the seed, a checkpoint, or the memory of those who live."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from .checkpoint import CheckpointRef
from .generation import Answer
from .ids import Device, Step
from .layout import Move
from .profile import Interval


@dataclass(frozen=True, slots=True, kw_only=True)
class FromSeed:
    """Step 0: every holder makes its own intervals from the job's seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FromCheckpoint:
    checkpoint: CheckpointRef


@dataclass(frozen=True, slots=True)
class Read:
    """Fill an interval of what a device is to hold from a checkpoint."""

    interval: Interval
    target: Device


@dataclass(frozen=True, slots=True, kw_only=True)
class FromMemory:
    """Survivors bring their state to `step` (applying `answer` where they had not); then the new layout is filled.

    What a device holds already it keeps; `moves` are the rest, between devices. What nobody holds is read from a checkpoint
    of the very same state, where there is one.
    """

    step: Step
    answer: Answer | None
    moves: tuple[Move, ...]
    checkpoint: CheckpointRef | None = None
    """None where nothing is read."""
    reads: tuple[Read, ...] = ()


Restore: TypeAlias = FromSeed | FromCheckpoint | FromMemory
