"""What a job would run as, before it does: the question, about a cluster that may not be there, and the answer in
figures and words.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .kinds import DeviceKind
from .profile import Profile
from .spec import JobSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSketch:
    """Nodes alike. None: what their kind usually has."""

    kind: str
    count: int
    devices: int
    name: str = ""
    network_gb_s: float | None = None
    link_gb_s: float | None = None
    speed: float = 1.0
    """What their devices reach of what their kind should."""
    domain: str = ""
    """The failure domain that all of them share."""
    domain_nodes: int = 0
    """So many after another share a failure domain; 0: each stands alone, or all are in `domain`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSketch:
    nodes: tuple[NodeSketch, ...]
    kinds: tuple[DeviceKind, ...] = ()
    """Besides the known ones, or instead of those of the same name."""
    is_here: bool = False
    """Its nodes are this server's: what they are called is what they are, or what processors stand for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanQuestion:
    spec: JobSpec
    profile: Profile
    cluster: ClusterSketch


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRow:
    """Nodes that do the same. layers, stages: what each of their tp groups does, in words."""

    kind: str
    nodes: int
    first: str
    """Name of one of them,"""
    last: str
    """and of another, the same where there is one."""
    devices: int
    used: int
    """Of each node's devices."""
    work: tuple[str, ...]
    memory_bytes: float
    """Of its fullest device,"""
    memory_limit_bytes: float
    """and what that has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    shape: str
    step_s: float | None
    """None where it cannot run, or was not followed to its end."""
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    shape: str
    reason: str
    step_s: float
    causes: Mapping[str, float]
    """compute, tp, bubble, p2p, dp, optimizer: seconds, adding up to step_s."""
    bound_s: float
    """No plan on these devices is faster."""
    devices: int
    idle: int
    rows: tuple[NodeRow, ...]
    alternatives: tuple[Alternative, ...]
    survival: str
    advice: tuple[str, ...] = ()
    """Settings of the job that would make it faster."""
    pipelines: int = 1
    ids: tuple[int, ...] = field(default=())
    """Micro-batches of each kind of pipeline, the most first, without repeats."""
