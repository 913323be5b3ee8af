"""Faults on purpose: what can be made to fail, where and when, and what became of it.

    asked -> carried out -> explains an incident -> verdict: recovered | harmless | undetected | job failed: why
         `-> refused: why

Values only: who picks the victim (aiming) and who judges (faulting) is the supervisor's business, who does the damage the
worker's.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from .ids import Device, JobId, NodeId, Step

POINTS = (
    "in_evaluation",
    "in_compute",
    "before_reduce",
    "in_reduce",
    "after_reduce",
    "in_mirror",
    "before_vote",
    "in_vote",
    "after_vote",
    "in_update",
    "after_update",
    "in_gather",
    "after_gather",
    "before_snapshot",
    "in_snapshot",
    "after_snapshot",
    "before_report",
    "after_report",
    "in_restore",
    "in_transfer",
)
"""Named instants in a rank, in the order of a step; then those of leaving a generation and of entering the next."""

IN_THE_NEXT_PROCESS = frozenset({"in_restore", "in_transfer"})
"""Points that a rank forked in place of a dead one reaches first: a fault there waits for whoever comes next."""


AROUND_A_SNAPSHOT = frozenset({"before_snapshot", "in_snapshot", "after_snapshot"})
"""Points that only a step reaches after which a checkpoint is due."""


class FaultKind(StrEnum):
    KILL = "kill"
    STOP = "stop"
    SLOW = "slow"
    EXIT = "exit"
    RAISE = "raise"
    GIL_HANG = "gil_hang"
    NAN = "nan"
    BIT_FLIP = "bit_flip"
    CUT_LINK = "cut_link"
    SLOW_LINK = "slow_link"
    NODE_KILL = "node_kill"
    HOST_KILL = "host_kill"
    ZYGOTE_KILL = "zygote_kill"
    SUPERVISOR_KILL = "supervisor_kill"
    REDIS_STALL = "redis_stall"
    CLOCK_JUMP = "clock_jump"

    @classmethod
    def _missing_(cls, value: object) -> FaultKind | None:
        """As the first release called them, in commands that are still on their way and in scripts."""
        return {"kill_rank": cls.KILL, "kill_node": cls.NODE_KILL}.get(str(value))


ON_RANKS = frozenset(
    {
        FaultKind.KILL,
        FaultKind.STOP,
        FaultKind.SLOW,
        FaultKind.EXIT,
        FaultKind.RAISE,
        FaultKind.GIL_HANG,
        FaultKind.NAN,
        FaultKind.BIT_FLIP,
    }
)
"""Happen to one rank, and may wait for a point in it."""
ON_NODES = frozenset(
    {FaultKind.CUT_LINK, FaultKind.SLOW_LINK, FaultKind.NODE_KILL, FaultKind.HOST_KILL, FaultKind.ZYGOTE_KILL}
)
"""Happen to everything a job has on one node."""
ON_CONTROL = frozenset({FaultKind.SUPERVISOR_KILL, FaultKind.REDIS_STALL, FaultKind.CLOCK_JUMP})
"""Happen to the control plane; no training process may notice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultRequested:
    """A person wants to see a fault. Whoever is named by no selector is picked by the seed.

    rank, pipeline, stage and tp are places in the job's current generation. duration_s: of what ends by itself; 0 for the
    kind's own default. factor: how many times slower (slow), or bytes per second and connection (slow_link). jump_s: of the
    supervisor's wall clock. at and step: the first time the rank reaches that point in that or a later step; "" and 0 for
    at once.
    """

    fault: FaultKind
    job: JobId | None = None
    rank: int | None = None
    node: NodeId | None = None
    device: Device | None = None
    pipeline: int | None = None
    stage: int | None = None
    tp: int | None = None
    at: str = ""
    step: Step = Step(0)
    duration_s: float = 0.0
    factor: float = 0.0
    jump_s: float = 0.0
    exit_code: int = 1
    seed: int = 0
    beyond_mirrors: bool = False
    """Also where it would destroy the last copy of something in memory."""
    id: str = ""
    """Given by whoever asks, to find it again; the supervisor gives it a number otherwise."""


class Verdict(StrEnum):
    OPEN = "open"
    RECOVERED = "recovered"
    HARMLESS = "harmless"
    """Nothing had to be done, and the job went on."""
    UNDETECTED = "undetected"
    """It should have been noticed, and was not."""
    JOB_FAILED = "job_failed"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Injected:
    """One fault on purpose and what became of it. Instants are wall clock; durations are seconds."""

    id: str
    asked: FaultRequested
    asked_at: float
    devices: tuple[Device, ...] = ()
    """Whom it was to hit."""
    node: NodeId | None = None
    carried_out_at: float | None = None
    step: Step = Step(0)
    """Committed, or under way in the rank it hit."""
    message: str = ""
    """What was done, in words."""
    heard_at: float | None = None
    """When the supervisor learned that it was carried out, by its own clock, which may not be that of the host."""
    after: int = 0
    """Number of the last incident that was over by then: none up to that one is explained by it."""
    incident: int | None = None
    """Number of the incident that it explains."""
    cause: str = ""
    """What it was detected as."""
    seen: str = ""
    """The evidence, in words."""
    detected_s: float | None = None
    """From the fault to the incident."""
    pause_s: float | None = None
    rolled_back: int = 0
    verdict: Verdict = Verdict.OPEN
    why: str = ""
