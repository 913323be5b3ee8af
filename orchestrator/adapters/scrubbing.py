"""Taking a value out of logs that hold it, where they lie: so many stars in its place, and every other byte where it was.

For a secret whose value is replaced or removed: from then on nobody who reads a log would know what to cover.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from orchestrator.domain.secrecy import Veil

_PIECE = 1 << 20


def logs_under(state_dir: Path) -> list[Path]:
    """Of every job, turned over ones too."""
    return [path for path in sorted((state_dir / "jobs").glob("*/logs/*.log*")) if path.is_file()]


def scrub(logs: Iterable[Path], value: str) -> int:
    """How many logs held it. Others may append meanwhile. Raises OSError for one that cannot be written."""
    veil = Veil([value])
    return sum(_scrub(log, veil) for log in logs)


def _scrub(log: Path, veil: Veil) -> bool:
    """Whole values only: a piece of one at the end of what is there may be anything."""
    found = False
    with suppress(FileNotFoundError):  # its job was forgotten meanwhile
        fd = os.open(log, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            at = 0
            while data := os.pread(fd, _PIECE + veil.reach, at):
                for place, length in veil.places(data):
                    there = os.pread(fd, length, at + place)
                    if there == data[place : place + length]:  # not turned over since
                        os.pwrite(fd, b"*" * length, at + place)
                        found = True
                at += _PIECE
        finally:
            os.close(fd)
    return found
