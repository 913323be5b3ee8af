"""A bad link, on purpose: what one rank's connections to some peers do for a while.

    cut    nothing is read or written: the peer sees a connection that is open and silent, as behind a pulled cable
    slow   after each burst the connection rests for as long as its bytes would have taken at the given rate

It owns who rests until when; it refuses to know frames and why anybody wants that. One training process cuts only its own
ends, so that several nodes of one machine can be told apart without being root.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from orchestrator.domain.ids import Rank


class Line(Protocol):
    """A connection, as far as it can be made to rest."""

    moved: int
    """Bytes read and written so far."""

    def rest(self, resting: bool) -> None: ...


@dataclass(slots=True, kw_only=True)
class BadLink:
    """peers: whom it is about. until: monotonic seconds. bytes_per_s: per connection; 0 for a cut."""

    peers: frozenset[Rank]
    until: float
    bytes_per_s: float = 0.0
    _seen: dict[Rank, int] = field(default_factory=dict)
    _resting: dict[Rank, float] = field(default_factory=dict)

    def is_over(self, now: float) -> bool:
        return now >= self.until

    def apply(self, lines: Mapping[Rank, Line], timeout_s: float) -> float:
        """Have each line rest or go on, as of now; how long the caller may wait before asking again (-1: for ever)."""
        now = time.monotonic()
        next_at = self.until
        for peer in self.peers & lines.keys():
            line = lines[peer]
            wakes_at = self._wakes_at(peer, line, now)
            line.rest(wakes_at > now)
            if wakes_at > now:
                next_at = min(next_at, wakes_at)
        left = max(0.0, next_at - now) if not self.is_over(now) else -1.0
        return left if timeout_s < 0 else min(timeout_s, left) if left >= 0 else timeout_s

    def _wakes_at(self, peer: Rank, line: Line, now: float) -> float:
        if self.is_over(now):
            return now
        if not self.bytes_per_s:
            return self.until
        moved = line.moved - self._seen.get(peer, line.moved)
        self._seen[peer] = line.moved
        if moved:
            self._resting[peer] = min(now + moved / self.bytes_per_s, self.until)
        return self._resting.get(peer, now)
