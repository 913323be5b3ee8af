"""Why a generation ended, and what is remembered of that until the job has got further."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from .ids import Device, Generation, NodeId, Step


class Cause(StrEnum):
    """Why a generation ended."""

    RANK_LOST = "rank_lost"
    NODE_LOST = "node_lost"
    LINK_LOST = "link_lost"
    HANG = "hang"
    CORRUPTION = "corruption"
    """Two devices have different bits of the same thing."""
    NOT_FINITE = "not_finite"
    """A loss or gradient is NaN or infinite."""
    CHECKPOINT = "checkpoint"
    """What it was restored from is not what was saved."""
    GROW = "grow"
    SHRINK = "shrink"
    PAUSE = "pause"
    """Training stopped for a pause that came to nothing."""
    BALANCE = "balance"
    """Its work is shared out anew, by how fast its devices are."""
    CONTACT_LOST = "contact_lost"
    """Nobody could be reached in time: the control plane's trouble, never charged to the job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What ended a generation, with the evidence in words. `at` is wall clock, as near the fault as anybody saw it.

    signature: the error, without what differs from one time to the next, where the program or the machinery failed by
    itself and might do so again; the same one twice at the same step ends the job. is_external: it was done to the job
    (a signal, a lost node, an injected fault).
    """

    cause: Cause
    message: str
    at: float
    devices: tuple[Device, ...] = ()
    signature: str = ""
    is_external: bool = False
    node: NodeId | None = None
    """Where a whole host is what failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A generation that a fault ended, kept until the step it was making is committed.

    step: the one it was making. ranks: those at fault, in words. counts: no step at all was committed since, so it is
    charged to the budget of its cause.
    """

    fault: Fault
    generation: Generation
    step: Step
    was_formed: bool
    ranks: tuple[str, ...] = ()
    has_committed: bool = False
    counts: bool = True

    @property
    def is_barren(self) -> bool:
        """It was formed and ended without a committed step, for a reason of its own."""
        return self.was_formed and not self.has_committed and not self.fault.is_external
