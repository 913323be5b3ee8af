"""A bounded number of seconds to spend on a server that does not answer, in growing steps with jitter."""

from __future__ import annotations

import asyncio
import random
import time

FIRST_S = 0.05
LONGEST_S = 1.0


class Budget:
    """Spent from the first failure on; success gives all of it back."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.reset()

    def reset(self) -> None:
        self._deadline: float | None = None
        self._pause_s = FIRST_S

    def pause(self) -> bool:
        """Sleep before the next try; False at once when the budget is spent."""
        seconds = self._next()
        if seconds is None:
            return False
        time.sleep(seconds)
        return True

    async def rest(self) -> bool:
        """The same, for whoever awaits."""
        seconds = self._next()
        if seconds is None:
            return False
        await asyncio.sleep(seconds)
        return True

    def _next(self) -> float | None:
        now = time.monotonic()
        if self._deadline is None:
            self._deadline = now + self._seconds
        left = self._deadline - now
        if left <= 0:
            return None
        seconds = min(left, self._pause_s * random.uniform(0.5, 1.0))
        self._pause_s = min(LONGEST_S, self._pause_s * 2)
        return seconds
