"""Devices that have become slow, and what was changed because of it: as values."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from .ids import Step
from .plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A device that is slower than it was and than others of its kind, or was not long ago.

    usual_s: seconds that a layer of a micro-batch takes it when it is well; factor: how many times that it takes. since:
    wall clock of when it was last found slow, or well again. times: how often it was found slow: every time it takes longer
    to be believed.
    """

    usual_s: float
    factor: float
    since: float
    is_slow: bool = True
    times: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTime:
    """What layers first..last-1 have been seen to take on a kind of device, one tp rank of `tp`: seconds for a micro-batch,
    both ways, waiting excluded; the median of devices that are not slow.
    """

    kind: str
    tp: int
    first: int
    last: int
    seconds: float


class Remedy(StrEnum):
    """In the order in which they are tried: what each costs."""

    IDS = "ids"
    """Micro-batches are shared out anew: nothing moves."""
    LAYERS = "layers"
    """Stages are cut anew, and micro-batches shared out: state moves."""
    SPARE = "spare"
    """A node that stands by takes the place of one with a slow device: everything that was there moves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebalance:
    """A change of the plan because of how fast its devices are, until it is known what it came to.

    before_s, expected_s: of a step. pause_s: that it was expected to cost. from_step: committed when it had begun to be
    trained; None before.
    """

    remedy: Remedy
    plan: Plan
    why: str
    before_s: float
    expected_s: float
    pause_s: float
    from_step: Step | None = None
