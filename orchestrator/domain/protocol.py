"""What a supervisor and a host say to each other. Versioned: a supervisor reads the previous version too.

Every request travels with (term, effect id); a host refuses a lower term and answers a repeated id with its first outcome.
Every event is numbered by its host, and is sent again until a supervisor says it has recorded it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from .checkpoint import CheckpointRef, Pacing, ShardRef
from .copying import Copying
from .faults import FaultRequested
from .generation import Answer, Evaluation, RankReport
from .ids import Device, EffectId, Generation, JobId, NodeId, Step
from .layout import Move
from .plan import Plan
from .profile import Interval, Profile
from .sight import RankSight
from .spec import JobSpec

PROTOCOL_VERSION = 1

# --- where a generation's state comes from -------------------------------------------------------------------------------


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

# --- supervisor -> host --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenHost:
    """First request: what this host is for. Starts the zygote and warms it; answered when ranks can be forked."""

    job: JobId
    node: NodeId
    num_devices: int
    spec: JobSpec
    profile: Profile
    checkpoint_dir: str
    log_dir: str
    kind: str = ""
    """Of the node's devices."""
    speed: float = 0.0
    """Of that kind, of an A100's, for jobs that pretend; 0.0: what everybody knows of it."""
    secrets_dir: str = ""
    """Where the values are that the job's `secrets` name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareSeats:
    """Have a living rank with a bound listener on each of these devices; answered by SeatsPrepared.

    stand_by: the plan that runs, where these are to stand by for a place in it: each is built as far as it can be before
    its role is known.
    """

    generation: Generation
    devices: tuple[Device, ...]
    stand_by: Plan | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FormGeneration:
    """Join `generation`: connect, restore, train. addresses: device -> host:port of that rank's listener.

    donors hold state the plan's members need and have no seat: they take ranks world_size, world_size + 1, ... while
    they send their moves, and then go idle. Whoever has neither a seat nor anything to give is ended.
    """

    generation: Generation
    plan: Plan
    addresses: Mapping[Device, str]
    restore: Restore
    committed: Step
    donors: tuple[Device, ...] = ()
    pacing: Pacing | None = None
    """Of its checkpoints, until SetPacing; None where an earlier version asks: as the job's file says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseGeneration:
    """Every rank of this or an earlier generation stops where it is and reports once."""

    generation: Generation


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginJoin:
    """Newcomers receive what `plan` gives them while generation `of` trains on: `moves`, kept current step by step.

    generation numbers the join, and is formed by nobody. addresses: newcomer -> host:port of its listener. A later attempt
    names other sources for what one that broke off was to give. Answered by JoinerAt or JoinFailed.
    """

    generation: Generation
    of: Generation
    plan: Plan
    moves: tuple[Move, ...]
    addresses: Mapping[Device, str]
    attempt: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StopAfter:
    """Every rank of the generation stops between two steps, all after the same one, and reports."""

    generation: Generation


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveSoon:
    """Every rank of the generation saves its state after the same step, the next one that can be agreed on.

    device: the rank that is told, and tells the others in its vote. rests: that step is the last one they make, until the
    generation is closed; each says RankFinished.
    """

    generation: Generation
    device: Device
    rests: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SetPacing:
    """Every rank of the generation saves at this pace from the same step on, the next one that can be agreed on.

    device: the rank that is told, and tells the others in its vote.
    """

    generation: Generation
    device: Device
    pacing: Pacing


@dataclass(frozen=True, slots=True, kw_only=True)
class EndJoin:
    """Training has stopped: newcomers report what they have of its last step, at once or nearly."""

    generation: Generation


@dataclass(frozen=True, slots=True, kw_only=True)
class KillRank:
    """SIGKILL the rank on a device. why: what its end is explained with; dump: read its stack first."""

    device: Device
    why: str = "killed by request"
    dump: bool = False
    pid: int = 0
    """The process that is meant; 0 means whichever is there."""
    mark: str = ""
    """Of the sight that was judged: who has moved on since is spared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LookAround:
    """Say at once what every rank is doing; answered by RanksSeen with the same number."""

    generation: Generation
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class InjectFault:
    """Make something fail, to try it; answered by FaultCarriedOut when it has come to that, unless it ends the host.

    device: the rank it happens to; None for a fault of the whole host, or of each rank's links.
    """

    fault: FaultRequested
    device: Device | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfTest:
    """Have a new process find out whether a device computes and remembers rightly; answered by SelfTested."""

    device: Device


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseHost:
    """End every rank and the zygote; the last request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Together:
    """Requests that travel in one message and are carried out in this order, each under its own effect id."""

    requests: Mapping[EffectId, HostRequest]


HostRequest: TypeAlias = (
    OpenHost
    | PrepareSeats
    | FormGeneration
    | CloseGeneration
    | BeginJoin
    | StopAfter
    | SaveSoon
    | SetPacing
    | EndJoin
    | KillRank
    | LookAround
    | InjectFault
    | SelfTest
    | CloseHost
)
HostMessage: TypeAlias = HostRequest | Together

# --- host -> supervisor --------------------------------------------------------------------------------------------------


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
