"""Processes that were forked before anybody needs them: one for each rank of a host, to take its place when it ends.

It owns who stands by and when another is forked; nobody but their host knows of them. It refuses to know how a process is
forked, what it rehearses and why a rank has ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping

from orchestrator.domain.ids import Device, Generation

from .seat import Seat

MAX_LOST = 5
"""Before none is forked any more: something here keeps ending them, and ranks are forked when they are needed."""


PATIENCE_S = 60.0
"""For one to stand by: one that hangs in its rehearsal keeps all others from theirs."""


class Understudies:
    """fork: starts a process for this device that rehearses, and then says that it stands by."""

    def __init__(self, fork: Callable[[Device], Seat]) -> None:
        self._fork = fork
        self._at: dict[Device, Seat] = {}
        self._num_lost = 0

    @property
    def ready(self) -> Mapping[Device, int]:
        """Pids of those that could take over now."""
        return {device: seat.pid for device, seat in self._at.items() if seat.is_living and seat.stands_by}

    def keep(self, wanted: Collection[Device]) -> None:
        """Have one for each of these devices and no other. Each call forks one more, once the one before has rehearsed."""
        for device in self._at.keys() - set(wanted):
            self._at.pop(device).kill("nobody will need it")
        rehearsing = [seat for seat in self._at.values() if not seat.stands_by]
        for seat in rehearsing:
            if time.monotonic() - seat.requested_at > PATIENCE_S:
                seat.kill(f"did not stand by within {PATIENCE_S:g} s")
        if self._num_lost >= MAX_LOST or rehearsing:
            return
        for device in wanted:
            if device not in self._at:
                self._at[device] = self._fork(device)
                return

    def take(self, device: Device, generation: Generation) -> Seat | None:
        """The one of this device, which is none any more; None where nobody is ready."""
        if device not in self.ready:
            return None
        seat = self._at.pop(device)
        seat.take_over(generation)
        return seat

    def lose(self, seat: Seat) -> None:
        """It has ended."""
        if self._at.get(seat.device) is seat:
            del self._at[seat.device]
            self._num_lost += 1
