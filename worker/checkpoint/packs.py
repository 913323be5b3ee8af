"""Reading stored bytes out of packs: exactly as many as were asked for, by as many threads as there are processors.

Reading, hashing and decompressing let go of the interpreter, so threads are worth having. It knows no hashes, no codings.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from orchestrator.adapters.index import IndexedPiece, pack_path, unread
from orchestrator.adapters.places import Remote

THREADS = 4
"""At most, and no more than there are processors."""
BATCH = 4 << 20
"""Stored bytes that a thread works on before it takes the next batch."""

MOST_PACKS = 64
"""That a thread has open at a time: a checkpoint of a thousand devices lies in more than a process may open."""
READ_AHEAD = 4 << 20
"""Bytes that are asked of a store at once, where less is wanted: pieces lie back to back."""


class Source:
    """An open pack, to be read by any number of threads. Raises OSError where it cannot be opened."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._descriptor = -1 if isinstance(file, Remote) else os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        self._ahead = threading.local()

    def read_into(self, room: NDArray[np.uint8], offset: int) -> None:
        """Fill `room` from `offset` on. Raises OSError, also where the file ends before."""
        if not isinstance(self._file, Remote):
            read_into(self._descriptor, room, offset)
            return
        first, content = getattr(self._ahead, "block", (0, b""))
        if not first <= offset <= offset + room.size <= first + len(content):
            first, content = offset, self._file.read_range(offset, offset + max(room.size, READ_AHEAD))
            self._ahead.block = first, content
        if first + len(content) < offset + room.size:
            raise OSError(f"it ends {offset + room.size - first - len(content)} bytes early")
        room[:] = np.frombuffer(content, dtype=np.uint8, count=room.size, offset=offset - first)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)


Sources = dict[str, Source]
"""Open packs, by name."""
Item = TypeVar("Item")
Result = TypeVar("Result")


@contextmanager
def opened(checkpoint: Path, packs: Iterable[str]) -> Iterator[Sources]:
    """Raises CheckpointCorrupt where one is not there, CheckpointAway."""
    with ExitStack() as stack:
        sources: Sources = {}
        for pack in sorted(set(packs)):
            file = pack_path(checkpoint, pack)
            try:
                sources[pack] = Source(file)
            except OSError as error:
                raise unread(str(file), error) from error
            stack.callback(sources[pack].close)
        yield sources


def read_into(descriptor: int, room: NDArray[np.uint8], offset: int) -> None:
    """Fill `room` from `offset` on. Raises OSError, also where the file ends before."""
    left = room.data
    while left:
        count = os.preadv(descriptor, [left], offset)
        if not count:
            raise OSError(f"it ends {len(left)} bytes early")
        left, offset = left[count:], offset + count


def read_stored(file: Path, offset: int, length: int) -> NDArray[np.uint8]:
    """Raises OSError, also where the file ends before."""
    room = np.empty(length, dtype=np.uint8)
    source = Source(file)
    try:
        source.read_into(room, offset)
    finally:
        source.close()
    return room


def batches(items: Sequence[Item], piece_of: Callable[[Item], IndexedPiece]) -> list[list[Item]]:
    """In the order in which their pieces lie in the packs, about BATCH bytes each, and of MOST_PACKS packs at most."""
    made: list[list[Item]] = []
    packs: set[str] = set()
    room = 0
    for item in sorted(items, key=lambda item: (piece_of(item).pack, piece_of(item).offset)):
        if room <= 0 or (len(packs) == MOST_PACKS and piece_of(item).pack not in packs):
            made.append([])
            packs.clear()
            room = BATCH
        made[-1].append(item)
        packs.add(piece_of(item).pack)
        room -= piece_of(item).length
    return made


def in_parallel(work: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result]:
    """Results in order. What one raises is raised, and no more are begun."""
    threads = min(THREADS, len(os.sched_getaffinity(0)), len(items))
    if threads <= 1:
        yield from map(work, items)
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="checkpoint-reader") as pool:
        running = [pool.submit(work, item) for item in items]
        try:
            for one in running:
                yield one.result()
        finally:
            for one in running:
                one.cancel()


def what(checkpoint: Path, piece: IndexedPiece) -> str:
    """For people."""
    return f"{pack_path(checkpoint, piece.pack)}: {piece.kind} of {piece.line}, elements {piece.start}..{piece.stop - 1}"
