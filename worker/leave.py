"""How long a rank that was told to leave a generation may take: its own time, not what a busy machine withheld from it.

Pure: the caller tells the time and what the system says of the process. Killing a rank that was only given no CPU costs
what it holds, and on a busy machine it would not be the only one.
"""

from __future__ import annotations

from .watch import Process

STARVED_S = 1.2
"""Allowed beyond leave_s at most; the supervisor gives up whoever has not been heard of 1.5 s beyond it."""
LEAST_S = 0.02
"""Too short a time to look again after."""


class Leave:
    """Begins when the rank is told. leave_s: seconds it may take of its own."""

    def __init__(self, leave_s: float, now: float, process: Process | None) -> None:
        self._until = now + leave_s + STARVED_S
        self._starved_s = process.starved_s if process else 0.0

    def more_s(self, now: float, process: Process | None) -> float:
        """Seconds to look again after, called when the last of them are over; 0.0 where its time is up."""
        if process is None or process.is_stopped:
            return 0.0
        starved_s, self._starved_s = process.starved_s - self._starved_s, process.starved_s
        more_s = min(starved_s, self._until - now)
        return more_s if more_s >= LEAST_S else 0.0
