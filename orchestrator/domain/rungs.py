"""The ways out of a fault, from the cheapest to the dearest, and what each was thought to cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Rung(StrEnum):
    FORK = "fork"
    """The same plan: what died is forked again on its own host."""
    SPARE = "spare"
    """The same plan: warm spares take the places of what is lost."""
    REPLAN_WARM = "replan_warm"
    """Another plan, on hosts that are warm."""
    REPLAN_ALL = "replan_all"
    """Another plan, on everything usable: hosts have to be opened first."""
    CHECKPOINT = "checkpoint"
    """Nobody alive holds everything: back to the newest checkpoint, wherever that fits best."""
    WAIT = "wait"
    """Nothing fits: survivors keep what they hold until a node comes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One rung, priced in seconds of training at full strength.

    pause_s: expected, from the fault to the next committed step; phases: where it goes. price_s: that, and what slower
    training costs until it is back at full strength. Both are None where the rung is not possible; why says it in words.
    """

    rung: Rung
    why: str
    price_s: float | None = None
    pause_s: float | None = None
    phases: Mapping[str, float] = field(default_factory=dict)
    place: Rung | None = None
    """Where a checkpoint is restored to: on the devices that this rung would use."""

    @property
    def is_possible(self) -> bool:
        return self.price_s is not None
