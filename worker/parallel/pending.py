"""Messages posted together: the unit that completes.

A pending knows how many of its messages are still on their way and what to do once all are through. It knows no sockets
and no tensors; the progress loop of `Links` finishes it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable


class Pending:
    """Starts held once by whoever posts, so that it cannot complete before everything is posted; `seal` gives that up.

    then: run in the progress loop when every message is through; it may post messages of another pending.
    """

    __slots__ = ("_left", "_ready", "_then", "done")

    def __init__(self, ready: deque[Pending], then: Callable[[], None] | None = None) -> None:
        self._left = 1
        self._ready = ready
        self._then = then
        self.done = False

    def hold(self) -> None:
        self._left += 1

    def release(self) -> None:
        self._left -= 1
        if not self._left:
            # Not finished here: we may be in the middle of taking a frame apart, and `then` posts more.
            self._ready.append(self)

    @property
    def is_through(self) -> bool:
        """Whether every message is, even where nobody could finish it any more."""
        return not self._left

    def seal(self) -> Pending:
        self.release()
        return self

    def finish(self) -> None:
        then, self._then = self._then, None
        if then is not None:
            then()
        self.done = True
