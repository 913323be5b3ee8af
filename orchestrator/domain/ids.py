"""Names for the numbers and strings that must never be mixed up."""

from __future__ import annotations

from typing import NamedTuple, NewType

JobId = NewType("JobId", str)
NodeId = NewType("NodeId", str)
EffectId = NewType("EffectId", str)

Term = NewType("Term", int)
"""Fences supervisors: a host refuses anything that carries a lower term than it has seen."""

Generation = NewType("Generation", int)
"""Fences a job's membership: every change of members or layout makes a new one, starting at 1."""

Rank = NewType("Rank", int)
"""A training process's number within one generation; it may change from one generation to the next."""

Step = NewType("Step", int)
"""Optimizer steps count from 1; step 0 is the state before training."""


class Device(NamedTuple):
    """One accelerator. A process is bound to a device for life, so state is held by devices, not by ranks.

    A tuple, because nothing is hashed and compared as often.
    """

    node: NodeId
    index: int  # type: ignore[assignment]  # nobody looks for values in it

    def __str__(self) -> str:
        return f"{self.node}/{self.index}"
