"""A rank's hold on life as the kernel sees it: a mutex on its page that its main thread holds for as long as it exists.

Its end is known at once: the kernel passes on the robust mutexes of a thread that ends before it takes the process's memory
apart, and only after that do sockets close and the pidfd speak (futex(2), set_robust_list(2); 20 ms later for 250 MB, and
seconds for a large model). By then no thread of the process runs program code any more: a main thread ends only with all.
It owns that mutex. It refuses to know how a process ended, which only its parent can say.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import mmap
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from .page.layout import LIFELINE_AT, LIFELINE_BYTES

_ROBUST = _SHARED = 1
_LIBC = ctypes.CDLL(None)


class Lifeline:
    """One side of it, mapped for itself, since who waits for a mutex may not lose its memory. fd: the page's memfd."""

    def __init__(self, fd: int) -> None:
        memory = mmap.mmap(fd, mmap.PAGESIZE)
        self._mutex: Any = ctypes.byref(ctypes.c_char.from_buffer(memory, LIFELINE_AT))  # keeps what is mapped

    def close(self) -> None:
        """Let go of the page, as soon as nobody waits on it."""
        self._mutex = None

    def make(self) -> None:
        """Host's side, before anybody else has the page."""
        attributes = ctypes.create_string_buffer(LIFELINE_BYTES)
        _LIBC.pthread_mutexattr_init(attributes)
        _LIBC.pthread_mutexattr_setrobust(attributes, _ROBUST)
        _LIBC.pthread_mutexattr_setpshared(attributes, _SHARED)
        if code := _LIBC.pthread_mutex_init(self._mutex, attributes):
            raise OSError(code, "a robust mutex shared between processes was refused")

    def hold(self) -> None:
        """Rank's side, main thread, once and before it says anything; never let go of, nor is its memory."""
        _held.append(self)
        _LIBC.pthread_mutex_trylock(self._mutex)

    def watch(self, ended: Callable[[], None]) -> None:
        """Host's side, once it is held: `ended` is called on the running loop as soon as the rank's end has begun."""
        loop = asyncio.get_running_loop()
        threading.Thread(target=_wait, args=(self._mutex, loop, ended), name="lifeline", daemon=True).start()


def _wait(mutex: Any, loop: asyncio.AbstractEventLoop, ended: Callable[[], None]) -> None:
    # A thread for each rank, because there is no descriptor for this; it sleeps in the kernel and needs no interpreter.
    if _LIBC.pthread_mutex_lock(mutex) == errno.EOWNERDEAD:
        with suppress(RuntimeError):  # the loop has been closed: nobody wants to know any more
            loop.call_soon_threadsafe(ended)


_held: list[Lifeline] = []
"""By this process, to its end."""
