"""What the system tells of a process from outside: whether it is stopped, what CPU it had, and where it stands.

It reads /proc and asks a process for its stack; it refuses to know why anybody asks. A process that has ended is told as
None or as nothing, never as an error.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from .watch import Process

DUMP_S = 0.3
"""Asking for a stack takes no longer than this."""
QUICK_S = 0.15
"""Within this a process that handles signals has written its stack."""
MAX_LINES = 80
_POLL_S = 0.01
_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
_BEGINNINGS = ("Thread 0x", "Current thread 0x")


def look_at(pid: int) -> Process | None:
    try:
        stat, scheduled = _read(f"/proc/{pid}/stat"), _read(f"/proc/{pid}/schedstat")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()  # the name before it may hold anything
    return Process(
        is_stopped=fields[0] == "T",
        is_in_disk=fields[0] == "D",
        cpu_s=(int(fields[11]) + int(fields[12])) * _TICK_S,
        starved_s=int(scheduled.split()[1]) / 1e9,
    )


def _read(path: str) -> str:
    """A small file of the system's; without the layers of objects between, because hosts do this many times a second."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, 4096).decode(errors="replace")
    finally:
        os.close(fd)


async def stack_of(pid: int, pidfd: int, log: Path) -> tuple[str, ...]:
    """Where every thread of the process stands: SIGUSR1 has faulthandler write it to `log`, without the process's help.

    A stopped one is continued for it, so ask only about a process that is to be killed. Where it handles no signals py-spy
    is asked instead, if it is installed.
    """
    head = _state_in_words(pid)
    start = log.stat().st_size if log.exists() else 0
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGUSR1)
        signal.pidfd_send_signal(pidfd, signal.SIGCONT)
    lines: Sequence[str] = ()
    for _ in range(int(QUICK_S / _POLL_S)):
        await asyncio.sleep(_POLL_S)
        before, lines = lines, _dumped(log, start)
        if lines and len(lines) == len(before):
            break
    if not lines:
        lines = await _spied(pid)
    return (*head, *lines)[:MAX_LINES]


def _dumped(log: Path, start: int) -> list[str]:
    """What faulthandler has written since, without what the program itself printed before it."""
    if not log.exists():
        return []
    with log.open("rb") as file:
        file.seek(start)
        lines = file.read(1 << 16).decode(errors="replace").splitlines()
    threads: list[list[str]] = []
    for line in lines:
        if line.startswith(_BEGINNINGS):
            threads.append([])
        if threads and line.strip():
            threads[-1].append(line)
    # The newest thread is written first; the one that trains is the oldest.
    return [line for thread in reversed(threads) for line in thread]


def _state_in_words(pid: int) -> tuple[str, ...]:
    try:
        status = Path(f"/proc/{pid}/status").read_text().splitlines()
        where = Path(f"/proc/{pid}/wchan").read_text().strip("0\n")
    except OSError:
        return ()
    state = next((line.split("\t", 1)[1] for line in status if line.startswith("State:")), "?")
    return (f"process {pid}: state {state}{f', in {where}' if where else ''}",)


async def _spied(pid: int) -> list[str]:
    program = shutil.which("py-spy")
    if program is None:
        return []
    spy = await asyncio.create_subprocess_exec(
        program,
        *("dump", "--nonblocking", "--pid", str(pid)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(DUMP_S - QUICK_S):
            said, _ = await spy.communicate()
    except TimeoutError:
        spy.kill()
        await spy.wait()
        return []
    return said.decode(errors="replace").splitlines()
