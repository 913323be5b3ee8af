"""When what stands in a rank's log was first seen there, so that logs of many ranks can be merged and searched by time.

A program prints lines without times, and nothing stands between it and its file. So whoever looks around on a node notes
each log's size now and then, beside it: `<name>.times`, pairs of (wall clock, bytes), and keeps it from filling the disk.
It refuses to know what is in a log.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from .logs import bound

EVERY_S = 1.0
MAX_NOTES = 1 << 16
"""Of one log; beyond it every second one goes, so that a long job's times get coarser instead of many."""
NOTE = struct.Struct("<dQ")


class LogTimes:
    def __init__(self, every_s: float = EVERY_S) -> None:
        self._every_s = every_s
        self._due = 0.0
        self._sizes: dict[Path, int] = {}
        self._counts: dict[Path, int] = {}

    def note(self, logs: Iterable[Path], now: float) -> None:
        """now: wall clock. A disk that refuses costs times and nothing else."""
        if now < self._due:
            return
        self._due = now + self._every_s
        for log in logs:
            with suppress(OSError):
                self._note(log, now)
                bound(log)

    def _note(self, log: Path, now: float) -> None:
        size, beside = log.stat().st_size, log.with_suffix(".times")
        if log not in self._sizes:
            known = beside.read_bytes() if beside.exists() else b""
            self._counts[log] = len(known) // NOTE.size
            self._sizes[log] = NOTE.unpack_from(known, len(known) - NOTE.size)[1] if len(known) >= NOTE.size else 0
        before = self._sizes[log]
        if size == before:
            return
        if size < before:  # it has been turned over
            beside.unlink(missing_ok=True)
            self._counts[log] = 0
        with beside.open("ab") as file:
            file.write(NOTE.pack(now, size))
        self._sizes[log] = size
        self._counts[log] += 1
        if self._counts[log] > MAX_NOTES:
            self._thin(beside, log)

    def _thin(self, beside: Path, log: Path) -> None:
        notes = list(NOTE.iter_unpack(beside.read_bytes()))
        partial = beside.with_suffix(".times.partial")
        # The newest one stays: it is what the next one is compared with.
        kept = notes[::-2][::-1]
        partial.write_bytes(b"".join(NOTE.pack(*note) for note in kept))
        partial.replace(beside)
        self._counts[log] = len(kept)
