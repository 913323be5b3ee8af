"""Reading stored bytes out of packs: exactly as many as were asked for, by as many threads as there are processors.

Reading, hashing and decompressing let go of the interpreter, so threads are worth having. It knows no hashes, no codings.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from orchestrator.adapters.index import CheckpointCorrupt, IndexedPiece, pack_path

THREADS = 4
"""At most, and no more than there are processors."""
BATCH = 4 << 20
"""Stored bytes that a thread works on before it takes the next batch."""

Descriptors = dict[str, int]
"""Of open packs, by name."""
Item = TypeVar("Item")
Result = TypeVar("Result")


@contextmanager
def opened(checkpoint: Path, packs: Iterable[str]) -> Iterator[Descriptors]:
    """Raises CheckpointCorrupt where one is not there."""
    with ExitStack() as stack:
        descriptors: Descriptors = {}
        for pack in sorted(set(packs)):
            file = pack_path(checkpoint, pack)
            try:
                descriptors[pack] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise CheckpointCorrupt(f"{file} cannot be read: {error}; restore an older checkpoint") from error
            stack.callback(os.close, descriptors[pack])
        yield descriptors


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
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        read_into(descriptor, room, offset)
    finally:
        os.close(descriptor)
    return room


def batches(items: Sequence[Item], piece_of: Callable[[Item], IndexedPiece]) -> list[list[Item]]:
    """In the order in which their pieces lie in the packs, about BATCH bytes each."""
    made: list[list[Item]] = []
    room = 0
    for item in sorted(items, key=lambda item: (piece_of(item).pack, piece_of(item).offset)):
        if room <= 0:
            made.append([])
            room = BATCH
        made[-1].append(item)
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
