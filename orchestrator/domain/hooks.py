"""Webhooks: whom to tell of what, and what has become of each telling.

A hook's own secret is no part of these values: it is kept beside them, and only what signs a message ever reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

MAX_ATTEMPTS_KEPT = 20


class Occasion(StrEnum):
    """What people may be told of; a closed list. Of jobs first, as their history has it, then of the cluster."""

    JOB_SUBMITTED = "job.submitted"
    JOB_QUEUED = "job.queued"
    JOB_RUNNING = "job.running"
    """A generation trains: at the start, after a fault, after a change of size."""
    JOB_INTERRUPTED = "job.interrupted"
    """By a fault, and no change of size that was wanted."""
    JOB_RECOVERED = "job.recovered"
    """The first step after a fault is committed."""
    JOB_AT_RISK = "job.at_risk"
    """One more failure could cost committed steps,"""
    JOB_MIRRORED = "job.mirrored"
    """and that is over."""
    JOB_ROLLED_BACK = "job.rolled_back"
    JOB_STRAGGLER = "job.straggler"
    JOB_CHECKPOINT_FAILED = "job.checkpoint_failed"
    JOB_PAUSED = "job.paused"
    JOB_SUCCEEDED = "job.succeeded"
    JOB_FAILED = "job.failed"
    JOB_CANCELLED = "job.cancelled"
    NODE_LOST = "node.lost"
    NODE_REFUSED = "node.refused"
    PING = "ping"
    """What a test sends. Nobody asks for it by name."""

    @property
    def is_of_cluster(self) -> bool:
        return self in (Occasion.NODE_LOST, Occasion.NODE_REFUSED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hook:
    """occasions, projects, labels: what it is told of; of these, none means any. Instants are wall clock."""

    id: str
    name: str
    url: str
    created_at: float
    created_by: str = ""
    occasions: tuple[Occasion, ...] = ()
    projects: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_narrowed(self) -> bool:
        """To some jobs: what is about the whole cluster is none of its business."""
        return bool(self.projects or self.labels)


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How a hook fares. failures: deliveries in a row that were given up. paused_at: since when nothing is sent."""

    failures: int = 0
    paused_at: float | None = None
    why: str = ""
    delivered_at: float | None = None


class Fate(StrEnum):
    PENDING = "pending"
    DELIVERED = "delivered"
    FAILED = "failed"
    """Given up: it was tried as often as is tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """code: the HTTP status that was answered, None where none was. error: why it did not count, "" where it did."""

    at: float
    seconds: float
    code: int | None = None
    error: str = ""

    @property
    def is_good(self) -> bool:
        return not self.error


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """One telling. id: the same for the same thing told to the same hook, so that whoever hears twice can know it.

    body: the very text that is sent. tries: since it was last asked for. due_at: of the next one, None where there is none.
    """

    id: str
    hook: str
    occasion: Occasion
    at: float
    body: str
    fate: Fate = Fate.PENDING
    tries: int = 0
    due_at: float | None = None
    attempts: tuple[Attempt, ...] = ()
    """The newest twenty, oldest first."""
