"""One recovery or resize as people read it: what was seen, chosen and why, and where the time went."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .failure import Fault
from .ids import Generation, Step
from .rungs import Option, Rung


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """One recovery or resize: what was seen, what was chosen and why, and where the time went (seconds)."""

    number: int
    fault: Fault
    generation: Generation
    """The one that ended."""
    next_generation: Generation | None = None
    decision: str = ""
    source: str = ""
    """memory, checkpoint or seed."""
    committed: Step = Step(0)
    rolled_back: int = 0
    """Committed steps that are run again."""
    moved_elements: int = 0
    phases: Mapping[str, float] = field(default_factory=dict)
    pause_s: float | None = None
    """Fault to next committed step, less one undisturbed step."""
    rung: Rung | None = None
    """The way out that was taken; None for a resize."""
    predicted_pause_s: float | None = None
    """What it was expected to cost when it was chosen, and in which phases."""
    predicted: Mapping[str, float] = field(default_factory=dict)
    options: tuple[Option, ...] = ()
    """All of them, the cheapest first, the impossible ones last."""
    closed_at: float | None = None
    formed_at: float | None = None
    attempts: int = 1
    stack: tuple[str, ...] = ()
    """Where the process that was killed for it stood."""
