"""A rank's log file: opened for appending, turned over when large and nobody lives who writes to it, read from its end.

One that somebody writes to is bounded where it lies: its oldest bytes are given back to the disk, and every byte that is
left keeps its place, so that readers who come back by places notice nothing.
"""

from __future__ import annotations

import ctypes
import os
import shutil
from pathlib import Path

MAX_LOG_BYTES = 32 << 20
LIVING_LOG_BYTES = 256 << 20
"""Of a log that is being written to; an eighth more before anything is done about it."""
_PUNCH_HOLE = 0x01 | 0x02
"""FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE: of Linux, on ext4, xfs, btrfs, tmpfs and NFS 4.2."""
_BLOCK = 4096
TAIL_LINES = 50
_TAIL_BYTES = 1 << 16


def open_log(path: Path) -> int:
    """A descriptor that appends to `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)


def turn_over(path: Path) -> None:
    """The end of a log that has grown past MAX_LOG_BYTES becomes `<name>.1`, and it begins anew.

    In place, not by another name: who stands by to take over has had it open for long.
    """
    if not path.exists() or path.stat().st_size <= MAX_LOG_BYTES:
        return
    with path.open("rb") as file, path.with_name(path.name + ".1").open("wb") as old:
        file.seek(-MAX_LOG_BYTES, os.SEEK_END)
        shutil.copyfileobj(file, old, 1 << 20)
    os.truncate(path, 0)


def bound(path: Path, most: int = LIVING_LOG_BYTES) -> None:
    """Of a log that takes more of the disk, let the last `most` bytes stay. Raises OSError, also where its disk cannot."""
    found = path.stat()
    if found.st_blocks * 512 <= most + most // 8:
        return
    file = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        length = (found.st_size - most) // _BLOCK * _BLOCK
        if length > 0 and _libc().fallocate(file, _PUNCH_HOLE, 0, length):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
    finally:
        os.close(file)


def _libc() -> ctypes.CDLL:
    found = ctypes.CDLL(None, use_errno=True)
    found.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return found


def tail(path: Path, *, since: int = 0, num_lines: int = TAIL_LINES) -> tuple[str, ...]:
    """The last lines of a log, none from before byte `since`; empty where there is no log."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(since, size - _TAIL_BYTES))
            text = file.read(_TAIL_BYTES).decode(errors="replace")
    except FileNotFoundError:
        return ()
    return tuple(text.splitlines()[-num_lines:])
