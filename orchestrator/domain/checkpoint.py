"""Checkpoints: which one a job may restore from, and what their manifest says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from .generation import Answer
from .ids import Device, Generation, NodeId, Step
from .spec import CheckpointSpec

CheckpointKind = Literal["base", "journal"]
"""The whole state, or what a base has to be brought forward by."""

FIRST_EVERY = 25
"""Steps from one whole state to the next where nothing is known yet of what they cost."""
LONGEST_JOURNAL = 64
"""Entries from one base to the next at most: bounds how long a restore replays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pacing:
    """What is saved how often. every: steps from one whole state to the next, 0 for none; between them each step's gradient
    where `is_journal`."""

    every: int
    is_journal: bool = False

    @staticmethod
    def asked_for(spec: CheckpointSpec) -> Pacing:
        """What a job begins with: what its file says, and before anything has been measured whole states now and then."""
        every = FIRST_EVERY if spec.every == "auto" else spec.every
        is_journal = spec.policy == "journal" and every > 0
        return Pacing(every=min(every, LONGEST_JOURNAL) if is_journal else every, is_journal=is_journal)

    def is_due(self, step: Step, last: Step) -> bool:
        return self.every > 0 and step > 0 and (self.is_journal or step % self.every == 0 or step == last)

    def describe(self) -> str:
        if not self.every:
            return "none"
        return f"every step, a base every {self.every}" if self.is_journal else f"every {self.every} steps"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRef:
    """A committed checkpoint: its directory holds a manifest, written last."""

    step: Step
    generation: Generation
    path: str
    answer: Answer | None = None
    """Of the vote that committed `step`; None where an earlier version wrote it."""
    kind: CheckpointKind = "base"
    depth: int = 0
    """Entries from its base to it: of the steps before it, in the same generation."""
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
    kind: CheckpointKind = "base"
    write_s: float = 0.0
    """For which its host was at it, until it was on disk."""
    stall_s: float = 0.0
    """For which training waited."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """What training was restored from, until the first step after it has shown that this is what was saved."""

    checkpoint: CheckpointRef
    failed: str = ""
    """How that step differed; empty until it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveCost:
    """What one save took, in seconds: training waited for `stall_s`; the slowest host wrote for `write_s`."""

    kind: CheckpointKind
    stall_s: float
    write_s: float

    @staticmethod
    def of(shards: Sequence[ShardRef]) -> SaveCost:
        """A host writes one after the other; training waits for whoever waits longest."""
        by_node: dict[NodeId, float] = {}
        for shard in shards:
            by_node[shard.device.node] = by_node.get(shard.device.node, 0.0) + shard.write_s
        return SaveCost(kind=shards[0].kind, stall_s=max(shard.stall_s for shard in shards), write_s=max(by_node.values()))
