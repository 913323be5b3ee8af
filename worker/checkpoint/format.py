"""Which pieces a device's state is stored as: its intervals, cut on the fixed CHUNK grid of their lines.

Piece boundaries never depend on the plan except at the edges of owned intervals, so most of what one plan stored is found
again, by its content, when another one saves. What becomes of the pieces is `coding`'s and `writer`'s business.
"""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.domain.profile import CHUNK, Interval


def chunks(interval: Interval) -> Iterator[Interval]:
    """The interval cut on the grid of its line."""
    start = interval.start
    while start < interval.stop:
        stop = min(interval.stop, (start // CHUNK + 1) * CHUNK)
        yield Interval(interval.line, start, stop)
        start = stop
