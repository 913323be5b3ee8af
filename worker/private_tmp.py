"""A job's own folder for temporary files on a node: nobody else looks into it, and it goes with the job's processes.

Programs and libraries find it as TMPDIR. What a host that was killed left behind goes with the next one there, of any job.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path

_PREFIX = "everstep-"


def make(job: str, pid: int) -> Path:
    """Only its owner may enter it. pid: of the host, by whose end it is known that it may go. Raises OSError."""
    _sweep()
    return Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{_plain(job)}-{_namespace()}-{pid}-"))


def remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def _sweep() -> None:
    """Of hosts that have ended. Who shares this folder and not our processes' numbers, as containers may, is let be."""
    of_ours = re.compile(rf"{_PREFIX}[A-Za-z0-9_-]+-{_namespace()}-(\d+)-[a-z0-9_]+")
    for left in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        found = of_ours.fullmatch(left.name)
        if found and not Path(f"/proc/{found[1]}").exists():
            remove(left)


def _namespace() -> int:
    """In which a process's number names it."""
    return Path("/proc/self/ns/pid").stat().st_ino


def _plain(job: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "_", job)
