"""A job's own folder for temporary files on a node: nobody else looks into it, and it goes with the job's processes.

Programs and libraries find it as TMPDIR. What a host that was killed left behind goes with the next one there.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path

_PREFIX = "everstep-"


def make(job: str, pid: int) -> Path:
    """Only its owner may enter it. pid: of the host, by whose end it is known that it may go. Raises OSError."""
    _sweep(job)
    return Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{_plain(job)}-{pid}-"))


def remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def _sweep(job: str) -> None:
    for left in Path(tempfile.gettempdir()).glob(f"{_PREFIX}{_plain(job)}-*"):
        pid = left.name.split("-")[-2]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            remove(left)


def _plain(job: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "_", job)
