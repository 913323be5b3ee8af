"""Processes that outlive the one that started them: known by (pid, start time), found by a mark in their environment.

A pid alone is never trusted: it may have been given to somebody else. Linux only (/proc, pidfd).
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

_POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class ProcessId:
    """started: clock ticks after boot."""

    pid: int
    started: int

    @property
    def is_alive(self) -> bool:
        """A zombie is not: it holds nothing and does nothing."""
        return _look(self.pid) == (self.started, True)

    def send(self, number: signal.Signals) -> None:
        """To this very process; nothing where it has ended."""
        with suppress(ProcessLookupError):
            fd = os.pidfd_open(self.pid)
            try:
                if _look(self.pid)[0] == self.started:  # the descriptor cannot come to mean another one from here on
                    signal.pidfd_send_signal(fd, number)
            finally:
                os.close(fd)


def identify(pid: int) -> ProcessId | None:
    """None where there is no such process."""
    started, _ = _look(pid)
    return ProcessId(pid, started) if started else None


def marked(marks: Mapping[str, str | None]) -> tuple[ProcessId, ...]:
    """Every process whose environment has all of these (any value where None), this one excepted."""
    wanted = [f"{name}={'' if value is None else value}".encode() for name, value in marks.items()]
    exact = [value is not None for value in marks.values()]
    found = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        variables = _environment(entry.name)
        if all(
            any(one == mark if whole else one.startswith(mark) for one in variables)
            for mark, whole in zip(wanted, exact, strict=True)
        ):
            identity = identify(int(entry.name))
            if identity and identity.is_alive:
                found.append(identity)
    return tuple(found)


def end(processes: Iterable[ProcessId], grace_s: float) -> bool:
    """SIGTERM, then SIGKILL after grace_s; whether all have ended."""
    processes = tuple(processes)
    for process in processes if grace_s > 0 else ():
        process.send(signal.SIGTERM)
    if grace_s > 0 and wait_for_end(processes, grace_s):
        return True
    for process in processes:
        process.send(signal.SIGKILL)
    return wait_for_end(processes, 5.0)


def wait_for_end(processes: Iterable[ProcessId], timeout_s: float) -> bool:
    left, deadline = list(processes), time.monotonic() + timeout_s
    while left := [process for process in left if not _reaped(process)]:
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


# --- files that say what runs ---------------------------------------------------------------------------------------------


def write_private(path: Path, content: str) -> None:
    """Whole or not at all, readable by its owner only."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write(content)
    partial.replace(path)


def write_pid(path: Path, process: ProcessId) -> None:
    write_private(path, json.dumps(asdict(process)))


def read_pid(path: Path) -> ProcessId | None:
    """None where there is no such file or it says nothing."""
    try:
        found: Mapping[str, int] = json.loads(path.read_text())
        return ProcessId(int(found["pid"]), int(found["started"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


@contextmanager
def exclusively(path: Path) -> Iterator[None]:
    """One process at a time; the lock goes with the process."""
    import fcntl

    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _look(pid: int) -> tuple[int, bool]:
    """(start time, whether it runs); (0, False) for none."""
    try:
        fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return 0, False
    try:
        stat = os.read(fd, 4096)
    except OSError:
        return 0, False
    finally:
        os.close(fd)
    fields = stat[stat.rindex(b")") + 2 :].split()
    return int(fields[19]), fields[0] not in (b"Z", b"X")


def _environment(pid: str) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # not ours, or gone
        return []


def _reaped(process: ProcessId) -> bool:
    """Whether it has ended; takes the exit status where it was a child of this process."""
    if not process.is_alive:
        with suppress(ChildProcessError, OSError):
            os.waitpid(process.pid, os.WNOHANG)
        return True
    return False
