"""What a host sees of a rank at one instant: where it is in its step, whom it waits for, and what its process does.

Every figure is relative to the instant of looking, so sights of different machines can be laid side by side.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from .ids import Device, Generation, Rank, Step


class Phase(IntEnum):
    IDLE = 0
    FORM = 1
    RESTORE = 2
    COMPUTE = 3
    REDUCE = 4
    VOTE = 5
    UPDATE = 6
    GATHER = 7
    SAVE = 8
    EVALUATE = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """One rank's side of its connection to one peer, in whole messages of this generation."""

    sent: int = 0
    received: int = 0
    awaits: bool = False
    """It waits for something to come from this peer."""
    unsent: bool = False
    """It has something for this peer that the connection does not take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSight:
    """phase and step are of `generation`; a rank that has yet to begin its newest generation shows the one before.

    traffic: of every connection, written once a wait has lasted; empty in short waits, and where the backend does not tell.
    members: of the group it waits on, where it waits on one.
    """

    device: Device
    generation: Generation
    phase: Phase
    step: Step
    still_s: float
    """Since it last showed progress, or since its last message moved."""
    in_wait: bool = False
    group: str = ""
    members: tuple[Rank, ...] = ()
    collective: int = 0
    """Waits begun so far: two sights with the same number are of the same wait."""
    traffic: Mapping[Rank, Traffic] = field(default_factory=dict)
    is_stopped: bool = False
    is_guilty: bool = False
    """Its host has evidence against this very process; a wait, a slow machine or a lack of CPU is none."""
    why: str = ""
    """What its host makes of it, in words; empty where nothing is strange."""

    @property
    def mark(self) -> str:
        """The same for as long as the rank does not move on."""
        return f"{self.generation} {self.phase.name} {self.step} {self.collective}"
