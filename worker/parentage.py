"""How a process ends with the one that started it, and whatever a rank has started with that rank."""

from __future__ import annotations

import ctypes
import os
import signal
from contextlib import suppress

from .mail import BROKEN

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent: int) -> None:
    """Be killed when the parent's forking thread ends; ends this process at once where that has happened already."""
    if _LIBC.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL)) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) was refused")
    if os.getppid() != parent:
        os._exit(BROKEN)


def end_session(pid: int) -> None:
    """SIGKILL to everybody in the session that this process leads, if it does; only while nobody has reaped it.

    Afterwards that number may be another's.
    """
    with suppress(ProcessLookupError, PermissionError):  # it has not come to lead one; what it started is somebody else's
        os.killpg(pid, signal.SIGKILL)


def reaped(pid: int) -> int:
    """How a child that has ended did: its exit code, negative for a signal. What it had started is gone, too."""
    end_session(pid)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
