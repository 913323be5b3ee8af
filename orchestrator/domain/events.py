"""What the kernel is told (inputs), and what it tells people (history).

Inputs are observations in the past tense, and may arrive late, twice or in another order. History entries are what users
see under a job's events: each carries cause and evidence in words.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

from .access import Submitter
from .admission import Checked
from .checkpoint import CheckpointRef
from .cluster import Node
from .faults import FaultRequested
from .generation import Answer
from .host_events import HostEvent
from .ids import Device, EffectId, Generation, JobId, NodeId, Step
from .plan import Infeasible, Plan
from .profile import Profile
from .size import Size
from .spec import JobSpec

# --- commands of users ---------------------------------------------------------------------------------------------------
# by: the name of the token with which something was asked of a job, for people; it is no part of what was asked.


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSubmitted:
    job: JobId
    spec: JobSpec
    at: float
    by: Submitter | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelRequested:
    job: JobId
    by: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointNow:
    """A person wants a checkpoint without waiting for the next one that is due."""

    job: JobId
    by: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRequested:
    """A person wants more nodes of a kind."""

    kind: str
    num_devices: int
    labels: Mapping[str, str] = field(default_factory=dict)
    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseRequested:
    """A person has looked at a node: its devices are to be used again, and nothing is held against them."""

    node: NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class ResizeRequested:
    """A person wants a job to be larger, smaller, or bounded otherwise."""

    job: JobId
    size: Size
    by: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseRequested:
    """A person wants a job to be saved and to hold no device until it is resumed."""

    job: JobId
    by: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeRequested:
    """A person wants a paused job to go on, or one that is to pause to do so no longer."""

    job: JobId
    by: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class PriorityRequested:
    """A person wants a job to come earlier, or later."""

    job: JobId
    priority: int
    by: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaRequested:
    """A person sets how many devices a project's jobs may have together. What is there already stays."""

    project: str
    max_devices: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CordonRequested:
    """A person wants nothing new placed on a node. drain: and jobs to leave it; remove: and then the node to go.

    deadline_s: from when the command is read; the node goes then in any case.
    """

    node: NodeId
    drain: bool = False
    remove: bool = False
    deadline_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UncordonRequested:
    """A node may be used again, and jobs need not leave it."""

    node: NodeId


JobCommand: TypeAlias = (
    CancelRequested | CheckpointNow | ResizeRequested | PauseRequested | ResumeRequested | PriorityRequested
)
Command: TypeAlias = (
    JobSubmitted
    | JobCommand
    | FaultRequested
    | NodeRequested
    | ReleaseRequested
    | QuotaRequested
    | CordonRequested
    | UncordonRequested
)

# --- outcomes and observations -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramProbed:
    """start: what the job is to begin with, where it asked for a checkpoint; None for its seed."""

    job: JobId
    profile: Profile
    start: CheckpointRef | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramRefused:
    job: JobId
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanChosen:
    job: JobId
    generation: Generation
    result: Plan | Infeasible


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointCommitted:
    job: JobId
    checkpoint: CheckpointRef


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFailed:
    job: JobId
    step: Step
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointsPruned:
    """condemnable: packs that no kept checkpoint names, or that hold little of the newest. deleted: packs that are gone."""

    job: JobId
    condemnable: tuple[str, ...]
    deleted: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSaid:
    """An event of a host, at least once."""

    job: JobId
    node: NodeId
    event: HostEvent


class Contact(StrEnum):
    GONE = "gone"
    """Positive evidence: its process is known to have ended."""
    UNREACHABLE = "unreachable"
    """Only silence: nobody answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLost:
    job: JobId
    node: NodeId
    contact: Contact
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HostHeard:
    """It answers, for the first time or after a silence, whether or not it has anything to tell."""

    job: JobId
    node: NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class HostClosed:
    """CloseHost was carried out, or there was nothing to close."""

    job: JobId
    node: NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesSeen:
    """The whole cluster, whenever it changes."""

    nodes: tuple[Node, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStruck:
    """A node that was to be killed on purpose is dead, or could not be killed."""

    node: NodeId
    refused: str = ""
    """Why it was not, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeChecked:
    """A node's check has come back; one that nobody answered never does."""

    node: NodeId
    number: int
    found: Checked


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectDone:
    """An effect was carried out (whatever its outcome) and need not be repeated by a successor."""

    job: JobId
    effect: EffectId


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlinePassed:
    """A deadline named by `deadlines(state)` ran out without the state having left it."""

    job: JobId
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class InstantCame:
    """An instant named by `instants(state)` has come: what hangs on it is looked at, whether or not there is other news."""

    key: str


Input: TypeAlias = (
    Command
    | ProgramProbed
    | ProgramRefused
    | PlanChosen
    | CheckpointCommitted
    | CheckpointFailed
    | CheckpointsPruned
    | HostSaid
    | HostLost
    | HostHeard
    | HostClosed
    | NodesSeen
    | NodeStruck
    | NodeChecked
    | EffectDone
    | DeadlinePassed
    | InstantCame
)

# --- history -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryEntry:
    """One line of a job's history. `type` is a closed vocabulary in snake case; data holds its figures."""

    job: JobId
    at: float
    type: str
    message: str
    status: str
    generation: Generation = Generation(0)
    step: Step = Step(0)
    data: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One committed step of the loss curve; each step of a job is recorded once per time it was committed."""

    job: JobId
    generation: Generation
    at: float
    answer: Answer
    tokens: int
    seconds: float | None = None
    """Since the previous step of the same generation."""
    busy: Mapping[Device, float] = field(default_factory=dict)
    """Seconds of a step in which ranks compute, waiting excluded, as they told lately: of some steps, and of a large plan
    only the slowest and the quickest."""
