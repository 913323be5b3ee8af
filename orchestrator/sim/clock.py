"""Virtual time: a queue of what happens when. Equal instants happen in the order they were asked for."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count


class Timer:
    """Something that will happen unless it is cancelled."""

    __slots__ = ("_do",)

    def __init__(self, do: Callable[[], None]) -> None:
        self._do: Callable[[], None] | None = do

    def cancel(self) -> None:
        self._do = None

    def fire(self) -> None:
        do, self._do = self._do, None
        if do is not None:
            do()


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, int, Timer]] = []
        self._numbers = count()

    def after(self, delay_s: float, do: Callable[[], None]) -> Timer:
        timer = Timer(do)
        heapq.heappush(self._queue, (self.now + delay_s if delay_s > 0.0 else self.now, next(self._numbers), timer))
        return timer

    def advance(self) -> bool:
        """Jump to the next thing and let it happen; False where nothing is left."""
        if not self._queue:
            return False
        self.now, _, timer = heapq.heappop(self._queue)
        timer.fire()
        return True
