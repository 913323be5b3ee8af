"""Numbers that cannot be right: what a rank raises when it sees them, with what it will report.

Raised by every rank that sees it; whoever raises one of these leaves its generation and stays alive to report.
"""

from __future__ import annotations

from orchestrator.domain.errors import EverstepError
from orchestrator.domain.generation import Finding


class Found(EverstepError):
    """Something is wrong with the numbers; the generation cannot go on."""

    def __init__(self, finding: Finding, message: str) -> None:
        super().__init__(message)
        self.finding = finding


class Corrupted(Found):
    """This rank and another have different bits of the same thing."""


class NotRestored(Found):
    """The checkpoint cannot be read, or is not what was written."""


class TrainingDiverged(Found):
    """A loss or gradient is not finite. Where running the step again gives the same, it is the training itself."""
