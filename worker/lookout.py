"""A host's eyes on its ranks: pages and processes in, sights and stalls out.

It joins the pure watch to what it watches. It refuses to know what a stall means for others: that needs the sights of every
host, and somebody who has them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from orchestrator.domain.host_events import RanksStalled
from orchestrator.domain.ids import Device, Generation
from orchestrator.domain.sight import RankSight

from .page.reader import members_in
from .processes import look_at
from .seat import Seat
from .watch import CALM_LOOK_S, LOOK_S, Process, Watch, in_words


class Lookout:
    """tells_waits, waits_inside, hang_s: see Watch. `looks` counts, so that a lookout that has fallen asleep is seen."""

    def __init__(self, *, tells_waits: bool, waits_inside: bool = False, hang_s: float = 0.0) -> None:
        self._tells_waits = tells_waits
        self._waits_inside = waits_inside
        self._hang_s = hang_s
        self.begin(Generation(0))
        self.looks = 0

    @property
    def looked_s_ago(self) -> float:
        return time.monotonic() - self._watch.looked_at

    @property
    def look_again_s(self) -> float:
        """Soon where a rank has not moved since the last look; while all do, a look costs more than it shows."""
        return LOOK_S if self._watch.sees_stillness else CALM_LOOK_S

    def begin(self, generation: Generation) -> None:
        """What was learned belongs to the generation before, and goes with it."""
        self._watch = Watch(
            generation,
            time.monotonic(),
            tells_waits=self._tells_waits,
            waits_inside=self._waits_inside,
            hang_s=self._hang_s,
        )

    def look(self, at: Mapping[Device, Seat]) -> RanksStalled | None:
        """What is to be told now. Only ranks that were told to form this generation are watched."""
        watched = {device: seat for device, seat in at.items() if self._is_watched(seat)}
        self.looks += 1

        def process_of(device: Device) -> Process | None:
            return look_at(watched[device].pid)

        stalled = self._watch.look(
            time.monotonic(), {device: seat.page.glance() for device, seat in watched.items()}, process_of
        )
        if not stalled:
            return None
        why = in_words((device, self._watch.opinion(device)) for device in stalled)
        return RanksStalled(generation=self._watch.generation, sights=self.sights(watched), why=why)

    def sights(self, at: Mapping[Device, Seat]) -> tuple[RankSight, ...]:
        return tuple(self.sight(device, seat) for device, seat in sorted(at.items()) if self._is_watched(seat))

    def _is_watched(self, seat: Seat) -> bool:
        return seat.is_living and seat.is_forked and seat.formed == self._watch.generation > 0

    def sight(self, device: Device, seat: Seat) -> RankSight:
        opinion, seen = self._watch.opinion(device), seat.page.look()
        waits_inside = self._waits_inside and opinion.in_wait
        return RankSight(
            device=device,
            generation=seen.generation,
            phase=seen.phase,
            step=seen.step,
            still_s=opinion.still_s,
            in_wait=waits_inside or self._watch.is_waiting(seat.page.glance(), time.monotonic()),
            group=seen.group,
            members=members_in(seen.group),
            collective=seen.collective,
            traffic=seen.traffic,
            is_stopped=opinion.is_stopped,
            is_guilty=opinion.is_guilty,
            why=opinion.why,
        )
