"""A rank's log file: opened for appending, turned over when large, and read from its end."""

from __future__ import annotations

import os
from pathlib import Path

MAX_LOG_BYTES = 32 << 20
TAIL_LINES = 50
_TAIL_BYTES = 1 << 16


def open_log(path: Path) -> int:
    """A descriptor that appends to `path`; a file that has grown past MAX_LOG_BYTES becomes `<name>.1` first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and path.stat().st_size > MAX_LOG_BYTES:
        path.replace(path.with_name(path.name + ".1"))
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)


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
