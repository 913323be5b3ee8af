"""What a supervisor asks of a host. Versioned: a host reads the previous version too.

Every request travels with (term, effect id); a host refuses a lower term and answers a repeated id with its first outcome.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from .checkpoint import Pacing
from .faults import FaultRequested
from .ids import Device, EffectId, Generation, JobId, NodeId, Step
from .layout import Move
from .origin import Restore
from .plan import Plan
from .profile import Profile
from .spec import JobSpec

PROTOCOL_VERSION = 1


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
    """Of the sight that was judged: who has moved on since is spared, and whoever its host holds nothing against by now."""


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
