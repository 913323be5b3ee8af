"""What a rank has given its device and is not done yet; waiting for it so that the wait can be ended.

An accelerator works behind a queue. A rank that had given it a whole step would wait for that inside a call that no abort
ends, and when a fault closes the generation it would be killed with all that it holds. So it stays a micro-batch ahead of
its device, no more, and waits by looking. It sleeps between two looks, and says why: whoever watches it would take it for
one that hangs. On a processor nothing is behind: it only looks whether it shall go on.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch

from .progress import Progress

AHEAD = 1
"""Micro-batches that may be under way when the next one is given: enough that the device is never without work."""
LOOK_S = 0.0005


class Backlog(Protocol):
    def given(self) -> None:
        """One micro-batch more."""
        ...

    def wait(self, most: int, proceed: Callable[[], None]) -> None:
        """Until at most so many are under way. proceed: called at least once, and may raise."""
        ...


class NoBacklog:
    def given(self) -> None:
        pass

    def wait(self, most: int, proceed: Callable[[], None]) -> None:
        proceed()


class Mark(Protocol):
    """A place in a device's queue, as torch.cuda.Event."""

    def record(self) -> None: ...
    def query(self) -> bool:
        """Whether the device has come to it."""
        ...


class DeviceBacklog:
    """make: a mark that is not recorded yet; they are used again."""

    def __init__(self, make: Callable[[], Mark], progress: Progress) -> None:
        self._make = make
        self._progress = progress
        self._under_way: deque[Mark] = deque()
        self._free: list[Mark] = []

    def given(self) -> None:
        mark = self._free.pop() if self._free else self._make()
        mark.record()
        self._under_way.append(mark)

    def wait(self, most: int, proceed: Callable[[], None]) -> None:
        proceed()
        self._forget_passed()
        if len(self._under_way) <= most:
            return
        self._progress.behind(True)
        try:
            while len(self._under_way) > most:
                time.sleep(LOOK_S)
                proceed()
                self._forget_passed()
        finally:
            self._progress.behind(False)

    def _forget_passed(self) -> None:
        while self._under_way and self._under_way[0].query():
            self._free.append(self._under_way.popleft())


def backlog_of(device: torch.device, progress: Progress) -> Backlog:
    return DeviceBacklog(torch.cuda.Event, progress) if device.type == "cuda" else NoBacklog()


class Landing(Protocol):
    """What is on its way between ranks, as a session posts it."""

    def wait(self) -> object: ...


class Landed:
    """`posted`, waited for until all of it is in this device's memory, and has left it.

    A carrier that works inside the device is through with waiting once it has told the device to wait.
    """

    def __init__(self, posted: Landing, backlog: Backlog, proceed: Callable[[], None]) -> None:
        self._posted = posted
        self._backlog = backlog
        self._proceed = proceed

    def wait(self) -> None:
        """Raises Aborted, PeerLost."""
        self._posted.wait()
        self._backlog.given()
        self._backlog.wait(0, self._proceed)
