"""Checkpoints: which one a job may restore from, and what their manifest says."""

from __future__ import annotations

from dataclasses import dataclass

from .generation import Answer
from .ids import Device, Generation, Step


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRef:
    """A committed checkpoint: its directory holds a manifest, written last."""

    step: Step
    generation: Generation
    path: str
    answer: Answer | None = None
    """Of the vote that committed `step`; None where an earlier version wrote it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRef:
    """One device's part of a checkpoint: the index file it wrote beside its data, and that file's hash."""

    device: Device
    index: str
    sha256: str
