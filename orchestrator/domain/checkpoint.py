"""Checkpoints: which one a job may restore from, and what their manifest says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .generation import Answer
from .ids import Device, Generation, NodeId, Step

CheckpointKind = Literal["base", "journal"]
"""The whole state, or what a base has to be brought forward by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRef:
    """A committed checkpoint: its directory holds a manifest, written last."""

    step: Step
    generation: Generation
    path: str
    answer: Answer | None = None
    """Of the vote that committed `step`; None where an earlier version wrote it."""
    kind: CheckpointKind = "base"
    total_bytes: int | None = None
    """What it holds; None where an earlier version wrote it."""
    new_bytes: int | None = None
    """Of those, what was not on disk before."""
    seconds: float = 0.0
    """From the first snapshot to the manifest; 0.0 where nobody measured it."""
    at: float = 0.0
    """Wall clock, when it was committed."""
    bits: str = ""
    """What the losses' bits belong to: the tp degree and the kinds of device that trained the step after it."""
    after: tuple[float, ...] = ()
    """Loss of each micro-batch of the step after it, once that has passed: what whoever is restored from it must give."""
    is_proven: bool = False
    """A job restored from it gave them."""
    local: tuple[NodeId, ...] = ()
    """Nodes on whose own disks there is another copy of what their devices wrote."""


@dataclass(frozen=True, slots=True, kw_only=True)
class After:
    """What came of the step after one that is being saved: see CheckpointRef.after and bits."""

    losses: tuple[float, ...]
    bits: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRef:
    """One device's part of a checkpoint: the index file it wrote beside its data, and that file's hash."""

    device: Device
    index: str
    sha256: str
    is_local: bool = False
    """Another copy of it is on its node's own disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """What training was restored from, until the first step after it has shown that this is what was saved."""

    checkpoint: CheckpointRef
    failed: str = ""
    """How that step differed; empty until it has."""
