"""What can come of testing a device, as the test says it and whoever asked reads it. It imports no torch."""

from __future__ import annotations

from enum import StrEnum


class Outcome(StrEnum):
    PASSED = "passed"
    WRONG = "wrong"
    """It computes or remembers wrongly, or breaks off."""
    BUSY = "busy"
    """It was not tested, because jobs use its memory: that says nothing of it."""
    UNUSABLE = "unusable"
    """It was not tested, and nothing that starts now could use it either; that does not make it broken."""
