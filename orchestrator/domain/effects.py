"""What the kernel wants done in the world. Each is committed to an outbox before it is carried out, and may be repeated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from .balance import StageTime
from .checkpoint import CheckpointRef, ShardRef
from .faults import FaultRequested
from .ids import Device, Generation, JobId, NodeId, Step
from .kinds import DeviceKind, Kinds, table
from .plan import Plan
from .profile import Profile
from .requests import HostRequest
from .spec import JobSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeProgram:
    """Import and describe the program on one CPU; answered by ProgramProbed or ProgramRefused."""

    job: JobId
    spec: JobSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoosePlan:
    """Plan the job on these devices; answered by PlanChosen with the same generation."""

    job: JobId
    generation: Generation
    spec: JobSpec
    profile: Profile
    devices: tuple[tuple[Device, str], ...]
    """Usable devices and their kinds."""
    keep: tuple[Device, ...] = ()
    """Devices whose processes are alive and hold state: preferred."""
    domains: Mapping[NodeId, str] = field(default_factory=dict)
    """Failure domains that nodes of these devices share with others."""
    running: Plan | None = None
    """What ran until something was lost, where it is to be gone on from."""
    lost: tuple[tuple[Device, str], ...] = ()
    """Its devices and their kinds, whether they are usable or not."""
    horizon_steps: float = 0.0
    """How many steps the next plan is expected to last."""
    speeds: Mapping[NodeId, float] = field(default_factory=dict)
    """Of nodes whose devices are slower than their kind: what they reach of it."""
    measured: tuple[StageTime, ...] = ()
    """What stages of this job have been seen to take."""
    rows: tuple[DeviceKind, ...] = ()
    """Kinds that are not known to everybody, or have other figures here."""

    @property
    def table(self) -> Kinds:
        return table(self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallHost:
    job: JobId
    node: NodeId
    request: HostRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitCheckpoint:
    """Write the manifest, last; answered by CheckpointCommitted or CheckpointFailed."""

    job: JobId
    step: Step
    generation: Generation
    shards: tuple[ShardRef, ...]
    spec: JobSpec
    profile: Profile
    condemned: tuple[str, ...] = ()
    """Packs that no checkpoint may name any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoteCheckpoint:
    """Keep beside a checkpoint what is known of it since, for whoever finds it without this record."""

    job: JobId
    checkpoint: CheckpointRef
    folder: str = ""
    """Of the job's own; "" where an earlier version asks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneCheckpoints:
    """Remove every checkpoint but these, and what is left of unfinished ones older than the newest of them.

    condemned: packs that writers are to be told of; doomed: those of them that may go. Answered by CheckpointsPruned where
    packs go or should, and never where it fails: it is tried again with the next checkpoint.
    """

    job: JobId
    keep: tuple[CheckpointRef, ...]
    condemned: tuple[str, ...] = ()
    doomed: tuple[str, ...] = ()
    folder: str = ""
    """Of the job's own; "" where an earlier version asks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KillNode:
    """End every process of a node that nobody uses: it is to go, or it is to be tried what happens then."""

    node: NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class StrikeNode:
    """End every process of a node that jobs use, to try what happens then; answered by NodeStruck.

    In an outbox, so that a supervisor's end does not make it come to nothing; the second time harms nobody.
    """

    job: JobId
    """Which has it in its outbox."""
    node: NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class AddNode:
    kind: str
    num_devices: int
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckNode:
    """Find out whether a node is fit to be used: products of matrices, a sum with `peer`, its disk. See NodeChecked.

    peer: None where there is no other node to do it with.
    """

    node: NodeId
    number: int
    peer: NodeId | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sabotage:
    """Make the control plane itself fail, to try it: one of faults.ON_CONTROL."""

    fault: FaultRequested


Loose: TypeAlias = KillNode | AddNode | CheckNode | Sabotage
"""Concern no job, and may be lost."""

OnDisk: TypeAlias = NoteCheckpoint | PruneCheckpoints
"""Housekeeping: what fails is tried again with the next checkpoint."""

Effect: TypeAlias = ProbeProgram | ChoosePlan | CallHost | CommitCheckpoint | OnDisk | StrikeNode | Loose
