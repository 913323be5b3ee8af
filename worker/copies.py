"""Copies of state on one host that last: saves that are being written, and state on its way into ranks' memory.

Nothing is told of what is over within LONG_S. It reads pages and slots; it refuses to know who copies what, and why.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from orchestrator.domain.copying import Copied, Copying
from orchestrator.domain.host_events import CopiesSeen
from orchestrator.domain.ids import Device, Step

from .checkpoint.slot import Slot
from .seat import Seat

EVERY_S = 1.0
"""Between two looks."""
LONG_S = 2.0
"""What lasts longer is told of, at each look."""


class Copies:
    """Looks at instants of one monotonic clock."""

    def __init__(self) -> None:
        self._since: dict[tuple[Device, Copied, Step], float] = {}
        self._has_told = False

    def look(self, now: float, at: Mapping[Device, Seat], saves: Iterable[tuple[Device, Slot]]) -> CopiesSeen | None:
        """What is to be told now. saves: what is being written, or waits to be."""
        found = [*self._arriving(now, at), *self._saving(now, saves)]
        since = {(one.device, one.what, one.step): now - one.seconds for one in found}
        self._since = since
        told = tuple(one for one in found if one.seconds >= LONG_S)
        if not told and not self._has_told:
            return None
        self._has_told = bool(told)
        return CopiesSeen(copies=told)

    def _arriving(self, now: float, at: Mapping[Device, Seat]) -> Iterable[Copying]:
        for device, seat in sorted(at.items()):
            copying = seat.page.copying() if seat.is_living and seat.is_forked else None
            if copying is not None:
                what, done, total = copying
                step = seat.page.glance().step
                yield Copying(
                    device=device,
                    what=what,
                    step=step,
                    done_bytes=done,
                    total_bytes=total,
                    seconds=now - self._since.get((device, what, step), now),
                )

    def _saving(self, now: float, saves: Iterable[tuple[Device, Slot]]) -> Iterable[Copying]:
        for device, slot in saves:
            done, total = slot.written
            yield Copying(
                device=device,
                what="saving",
                step=slot.step,
                done_bytes=done,
                total_bytes=total,
                seconds=now - self._since.get((device, "saving", slot.step), now),
            )
