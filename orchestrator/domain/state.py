"""The states of a job, each with its own data only; terminal is final.

    Probing -> Queued(reason) -> Starting(g) -> Running(g) -> Stopping(outcome) -> Succeeded | Failed | Cancelled
                                                Running(g) -> Reforming(g, cause) -> Running(g+1)
    Reforming -> Queued where nothing fits; any state that is not terminal -> Stopping on cancel.
    Queued -> Paused; Running -> Stopping(Paused) -> Paused, once everything is saved; Paused -> Queued.

Values here hold no monotonic instants: a new supervisor restarts deadlines. Wall-clock instants are for people.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

from .failure import Fault
from .generation import RankReport, Settlement
from .ids import Device, Generation, NodeId
from .layout import Move
from .plan import Plan


class JobStatus(StrEnum):
    """What the API calls a state: a projection by one table (status.py)."""

    PENDING = "PENDING"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    RECOVERING = "RECOVERING"
    RESIZING = "RESIZING"
    STOPPING = "STOPPING"
    PAUSING = "PAUSING"
    PAUSED = "PAUSED"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"


@dataclass(frozen=True, slots=True, kw_only=True)
class Forming:
    """The next generation: hosts open, seats are prepared, then it is formed and its ranks become ready."""

    generation: Generation
    plan: Plan
    addresses: Mapping[Device, str] = field(default_factory=dict)
    formed: bool = False
    ready: frozenset[Device] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Closing:
    """A generation being settled: who has yet to report, and what the others said."""

    generation: Generation
    awaited: frozenset[Device]
    reports: Mapping[Device, RankReport] = field(default_factory=dict)
    settlement: Settlement | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """Newcomers of a larger plan receive their state while the job trains on.

    Their processes are prepared, then told whom to receive what from (`moves`, also what was meant to come from a source
    that broke off); when all have caught up, the generation is told to stop between two steps.
    """

    generation: Generation
    """Its number, which no generation is formed under."""
    plan: Plan
    addresses: Mapping[Device, str] = field(default_factory=dict)
    idle: frozenset[Device] = frozenset()
    """Newcomers whose processes are older than the join: they may still hold what they held in an earlier plan."""
    moves: tuple[Move, ...] = ()
    attempt: int = 0
    broken: frozenset[Device] = frozenset()
    """Sources that are not asked again."""
    done: frozenset[Device] = frozenset()
    """Newcomers that are waited for no longer: they have caught up, or never will and are filled in the pause."""
    begun: bool = False
    stopping: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Probing:
    """The program is imported and described on one CPU, before any device is held."""


PLANNING = "a plan is being chosen"
"""The reason of a job that has not been planned for yet: a plan is asked for at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Queued:
    """Nothing is held. `reason` is for people and says what would end the wait."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Starting:
    forming: Forming


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    generation: Generation
    plan: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Reforming:
    """One generation closes while the next is planned and prepared; shown as RECOVERING or RESIZING by its fault.

    forming is None until a plan is chosen; lost are devices whose process is gone (their nodes may live). Where nothing
    fits, `waiting` says what would end the wait, and the survivors keep what they hold.
    """

    fault: Fault
    closing: Closing
    forming: Forming | None
    lost: frozenset[Device] = frozenset()
    attempt: int = 1
    waiting: str | None = None
    is_patient: bool = False
    """Silent hosts are waited for longer, because they may hold the only copy of something."""
    is_rested: bool = False
    """The network has been left alone for a while; see recovery/breaker.py."""
    is_stuck: bool = False
    """It has waited for long: what it holds may go to another job that lacks devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Succeeded:
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    at: float
    message: str
    device: Device | None = None
    exit_code: int | None = None
    log_tail: tuple[str, ...] = ()
    verdict: str = ""
    """Which rule ended it, where trying again was given up: repeated_error, no_progress or out_of_attempts; not_started or
    out_of_time, where a deadline of its own has passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancelled:
    at: float
    by: str = ""
    """Name of the token it was cancelled with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Paused:
    """Nothing is held, and nothing is wanted until it is resumed. Not the end: see TERMINAL."""

    at: float


Outcome: TypeAlias = Succeeded | Failed | Cancelled | Paused


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopping:
    """Hosts are being closed; the outcome is already decided."""

    outcome: Outcome
    open_hosts: frozenset[NodeId]


JobState: TypeAlias = Probing | Queued | Starting | Running | Reforming | Stopping | Paused | Succeeded | Failed | Cancelled
TERMINAL = (Succeeded, Failed, Cancelled)
