"""A blocking call that nobody can end: the thread inside it can be given up, and finds that out when it comes out.

Only a thread that is inside can be given up, so one that computes or updates is never overtaken by its successor.
"""

from __future__ import annotations

import threading
from typing import Self


class Replaced(BaseException):
    """Another thread does this one's work now: unwind, change nothing, say nothing. No Exception, so nobody handles it."""


class Guard:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._given_up = False

    def give_up(self) -> bool:
        """Whether the training thread is inside; it never gets past this guard again. Any thread, any number of times."""
        with self._lock:
            self._given_up = self._given_up or self._inside > 0
            return self._given_up

    def __enter__(self) -> Self:
        with self._lock:
            if self._given_up:
                raise Replaced
            self._inside += 1
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._given_up:
                raise Replaced
