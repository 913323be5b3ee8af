"""A rank's log file: opened for appending, turned over when large and nobody lives who writes to it, read from its end."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

MAX_LOG_BYTES = 32 << 20
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
