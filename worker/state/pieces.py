"""What a device's share of the state is called, element by element: the kinds of numbers and where each interval is kept.

Plain values, for whoever handles state without computing with it and so imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.domain.profile import Interval

KINDS = ("p", "m", "v")
"""What each row of a state is called in checkpoints: master weights, first moments, second moments."""


@dataclass(frozen=True, slots=True)
class Piece:
    """An interval and the column of the state's rows at which it begins."""

    interval: Interval
    offset: int
