"""What a host tells its supervisor. Versioned: a supervisor reads the previous version too.

Every event is numbered by its host, and is sent again until a supervisor says it has recorded it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from .checkpoint import ShardRef
from .copying import Copying
from .generation import Answer, Evaluation, RankReport
from .ids import Device, Generation, Step
from .sight import RankSight


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOpened:
    """The zygote is warm."""

    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SeatsPrepared:
    generation: Generation
    addresses: Mapping[Device, str]
    pids: Mapping[Device, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReported:
    """A rank left its generation and is waiting for the next one."""

    report: RankReport


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnding:
    """A rank has left for good and its kernel is taking it apart; RankExited follows and says how it ended.

    report: read from its progress page, on which nobody writes any more.
    """

    device: Device
    pid: int
    report: RankReport


@dataclass(frozen=True, slots=True, kw_only=True)
class RankExited:
    """A rank's process is gone. exit_code is negative for a signal; `report` is read from its progress page."""

    device: Device
    pid: int
    exit_code: int
    report: RankReport
    message: str = ""
    """Why, where the rank raised: the exception in one line."""
    log_tail: tuple[str, ...] = ()
    """Its last 50 log lines, where it raised or exited by itself."""
    fault_point: str = ""
    """Where in which step it was killed on purpose; empty otherwise."""
    user_error: bool = False
    """True where the training program itself raised or exited, which another attempt would repeat."""
    seconds_ago: float = 0.0
    stack: tuple[str, ...] = ()
    """Where it was when it was killed, where its stack was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksStalled:
    """A rank shows no progress beyond what this generation has taught its host to expect; said once per stall, and again
    after twice the time. sights: of every rank of this host."""

    generation: Generation
    sights: tuple[RankSight, ...]
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksSeen:
    """looked_s_ago: since this host's watch last looked; a watch that does not run finds no hang."""

    generation: Generation
    number: int
    sights: tuple[RankSight, ...]
    looked_s_ago: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReady:
    """A rank has formed and restored; `phases` are seconds spent (fork, form, build, transfer, gather)."""

    device: Device
    generation: Generation
    phases: Mapping[str, float]
    notes: tuple[str, ...] = ()
    """What people should know of it: pieces of a checkpoint that were damaged in one tier and read from another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsPassed:
    """Votes seen to pass, oldest first; `at` are the host's wall-clock instants of each, for people."""

    generation: Generation
    answers: tuple[Answer, ...]
    at: tuple[float, ...]
    paces: Mapping[Device, float] = field(default_factory=dict)
    """Seconds in which ranks of this host have lately computed one micro-batch, waiting excluded; of those who can say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSaved:
    generation: Generation
    step: Step
    shard: ShardRef


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardNotSaved:
    """A device's part of a checkpoint has not been written and will not be: that step will have none. Training goes on.

    message: why, in words. is_skipped: no rank has handed anything over, and every rank knows.
    """

    device: Device
    generation: Generation
    step: Step
    message: str
    is_skipped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiesSeen:
    """Copies on this host that have lasted for a while, and how far they are; none once the last of them has ended."""

    copies: tuple[Copying, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFinished:
    """A rank has passed the last step and holds the final state, or that of the step after which it was to rest."""

    device: Device
    generation: Generation
    step: Step
    evaluation: Evaluation | None = None
    """Of the final state, where the job evaluates: no later vote could tell of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinerAt:
    """A newcomer has everything and is not behind training any more."""

    device: Device
    generation: Generation
    step: Step


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinFailed:
    """A source gives a newcomer nothing any more."""

    device: Device
    generation: Generation
    source: Device
    attempt: int
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultCarriedOut:
    """An injected fault is about to happen, or cannot. at: the host's wall clock; step: under way in the rank."""

    id: str
    message: str
    at: float
    step: Step = Step(0)
    refused: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfTested:
    """message: what was tried, or what came out wrong."""

    device: Device
    passed: bool
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFailed:
    """The host itself cannot serve (the zygote could not start or died)."""

    message: str
    log_tail: tuple[str, ...] = ()
    exit_code: int = 0
    """Of its zygote, where that ended; negative for a signal."""


HostEvent: TypeAlias = (
    HostOpened
    | SeatsPrepared
    | RankReported
    | RankEnding
    | RankExited
    | RankReady
    | StepsPassed
    | ShardSaved
    | ShardNotSaved
    | CopiesSeen
    | RankFinished
    | JoinerAt
    | JoinFailed
    | FaultCarriedOut
    | SelfTested
    | HostFailed
    | RanksStalled
    | RanksSeen
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """An event with its host's number for it; numbers grow by one and never restart within a host's life."""

    number: int
    event: HostEvent
