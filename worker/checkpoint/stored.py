"""Reading any intervals of what one manifest names, whatever plan wrote it. Every byte used has had its hash checked.

Pieces are read in the order in which they lie in their packs, by a few threads (reading, hashing and decompressing let go
of the interpreter), and straight to where they are wanted where nothing has to be decoded.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from orchestrator.adapters.index import ITEM_BYTES, RAW, IndexedPiece, unread
from orchestrator.adapters.manifest import CheckpointCorrupt, load_indexes, load_manifest
from orchestrator.domain.profile import Interval

from .coding import Coder, digest
from .packs import Sources, batches, in_parallel, opened, what
from .tier import Opened, Tier


@dataclass(frozen=True, slots=True)
class Wanted:
    """into: (len(interval),) fp32, contiguous, on the host."""

    interval: Interval
    kind: str
    into: torch.Tensor


def fill(
    path: Path, wanted: Sequence[Wanted], near: Tier | None = None, progress: Callable[[int], None] = lambda more: None
) -> None:
    """Read what is wanted to where it is wanted. Raises CheckpointCorrupt, CheckpointAway; then what is there
    already is worth nothing.

    near: where a piece is looked for first; what is not there, or not as it was written, is read where all of it is.
    progress: takes how many bytes more are where they are wanted.
    """
    tasks = _tasks(path, wanted)
    cut = batches(tasks, lambda task: task.piece)
    read = in_parallel(lambda batch: _read_batch(path, batch, near), cut)
    for batch, num_near in zip(cut, read, strict=True):
        if near is not None:
            near.num_read += num_near
        progress(sum(view.size for task in batch for _, view in task.parts))


@contextmanager
def _near_packs(near: Tier | None, packs: Iterable[str]) -> Iterator[dict[str, Opened]]:
    found = {pack: one for pack in sorted(packs) if (one := near.open(pack))} if near is not None else {}
    try:
        yield found
    finally:
        for one in found.values():
            one.close()


@dataclass(slots=True)
class _Task:
    """One stored piece, and which of its elements go where: (first element, view of u8)."""

    piece: IndexedPiece
    parts: list[tuple[int, NDArray[np.uint8]]] = field(default_factory=list)


def _tasks(path: Path, wanted: Sequence[Wanted]) -> list[_Task]:
    """Content that several pieces have in common is read once."""
    stored = _stored(path, wanted)
    tasks: dict[tuple[str, int, str], _Task] = {}
    for want in wanted:
        interval, into = want.interval, want.into.numpy().view(np.uint8)
        pieces = stored.get((interval.line, want.kind), [])
        position = interval.start
        number = max(0, bisect_right(pieces, position, key=lambda piece: piece.start) - 1)
        while position < interval.stop:
            if number >= len(pieces) or not pieces[number].start <= position < pieces[number].stop:
                raise CheckpointCorrupt(f"{path}: no piece holds {want.kind} of {interval.line} at element {position}")
            piece = pieces[number]
            stop = min(piece.stop, interval.stop)
            view = into[(position - interval.start) * ITEM_BYTES : (stop - interval.start) * ITEM_BYTES]
            task = tasks.setdefault((piece.pack, piece.offset, piece.content), _Task(piece))
            task.parts.append((position - piece.start, view))
            position, number = stop, number + 1
    return list(tasks.values())


def _stored(path: Path, wanted: Sequence[Wanted]) -> dict[tuple[str, str], list[IndexedPiece]]:
    """Of what is wanted, and of little else: an index is of all that a device had."""
    spans: dict[tuple[str, str], tuple[int, int]] = {}
    for want in wanted:
        interval = want.interval
        low, high = spans.get((interval.line, want.kind), (interval.start, interval.stop))
        spans[interval.line, want.kind] = min(low, interval.start), max(high, interval.stop)

    def wants(line: str, kind: str, start: int, stop: int) -> bool:
        low, high = spans.get((line, kind), (0, 0))
        return start < high and low < stop

    found: dict[tuple[str, str], list[IndexedPiece]] = defaultdict(list)
    for part in load_indexes(path, load_manifest(path), wants):
        for piece in part.pieces:
            found[piece.line, piece.kind].append(piece)
    for pieces in found.values():
        pieces.sort(key=lambda piece: piece.start)
    return found


def _read_batch(path: Path, batch: Sequence[_Task], near: Tier | None) -> int:
    """Bytes that came from the nearer tier."""
    packs = {task.piece.pack for task in batch}
    with opened(path, packs) as sources, _near_packs(near, packs) as close_by:
        return _read(path, batch, sources, close_by, near)


def _read(path: Path, batch: Sequence[_Task], sources: Sources, close_by: Mapping[str, Opened], near: Tier | None) -> int:
    reader, num_near = _Reader(max(task.piece.content_bytes for task in batch)), 0
    for task in batch:
        piece, (first, *others) = task.piece, task.parts
        is_whole = not others and first[1].size == piece.content_bytes
        into = first[1] if is_whole else reader.content[: piece.content_bytes]
        beside = close_by.get(piece.pack)
        try:
            problem = reader.read(beside.read_into, piece, into) if beside is not None else ""
        except OSError as error:
            problem = f"cannot be read: {error}"
        if beside is not None and not problem:
            num_near += piece.length
        else:
            if problem and near is not None:
                near.bad.append(f"{what(path, piece)} {problem} on {near.name}")
            try:
                problem = reader.read(sources[piece.pack].read_into, piece, into)
            except OSError as error:
                raise unread(what(path, piece), error) from error
            if problem:
                raise CheckpointCorrupt(f"{what(path, piece)} {problem}; restore an older checkpoint")
        if not is_whole:
            for start, view in task.parts:
                view[:] = into[start * ITEM_BYTES : start * ITEM_BYTES + view.size]
    return num_near


class _Reader:
    """Of one thread. most: content bytes of the longest piece."""

    def __init__(self, most: int) -> None:
        self.content = np.empty(most, dtype=np.uint8)
        self._stored = np.empty(most, dtype=np.uint8)
        self._coder = Coder()

    def read(
        self, read_into: Callable[[NDArray[np.uint8], int], None], piece: IndexedPiece, into: NDArray[np.uint8]
    ) -> str:
        """What is wrong, in words; empty where `into` is what was written. Raises OSError where it cannot be read."""
        try:
            if piece.coding == RAW:
                read_into(into, piece.offset)
            else:
                stored = self._stored[: piece.length]
                read_into(stored, piece.offset)
                self._coder.decode(piece.coding, stored, into)
        except ValueError as error:
            return f"cannot be decoded: {error}"
        return "" if digest(into.data) == piece.content else "do not have the hash they were written with"
