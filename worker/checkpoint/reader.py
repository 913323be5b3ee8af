"""Reading the state a checkpoint stands for: its base, brought forward by the very updates that training made.

    base of step 40 ──> gradient of 41 ──> 42 ──> ... ──> the step of the checkpoint

The update is a sequence of single IEEE operations on each element, so it gives the same bits whatever is cut out of the
lines and whoever does it. What it used besides gradients is kept with the checkpoints: settings in the job's file, the
answer in each entry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from orchestrator.adapters import spec_file
from orchestrator.adapters.index import GRADIENT, ITEM_BYTES, CheckpointAway
from orchestrator.adapters.manifest import LONGEST_CHAIN, CheckpointCorrupt, Manifest, load_chain, load_manifest
from orchestrator.adapters.sealed import named
from orchestrator.domain.ids import Step
from orchestrator.domain.profile import Interval
from orchestrator.domain.spec import TrainSpec

from ..parallel.optimizer import adamw
from ..state.pieces import KINDS, Piece
from .stored import Wanted, fill
from .tier import Tier

Progress = Callable[[int, int], None]
"""Bytes that are where they are wanted so far, and of all."""


class LinkCorrupt(CheckpointCorrupt):
    """step: of the one that is no good among those that a checkpoint is read from: all before it may be."""

    def __init__(self, message: str, step: Step) -> None:
        super().__init__(message)
        self.step = step


def read(
    path: Path,
    intervals: Sequence[Interval],
    *,
    kinds: Sequence[str] = KINDS,
    near: Tier | None = None,
    progress: Progress = lambda done, total: None,
) -> dict[tuple[Interval, str], torch.Tensor]:
    """(interval, kind) -> (len(interval),) fp32, for each kind of p, m, v that is asked for. near: a tier to look in first.

    Raises CheckpointCorrupt naming the file and the piece whose bytes are missing or not those that were written.
    """
    if len(load_chain(path)) == 1:
        result = {(i, kind): torch.empty(len(i), dtype=torch.float32) for kind in kinds for i in intervals}
        counted = _Counted(sum(into.nbytes for into in result.values()), progress)
        fill(path, [Wanted(interval, kind, into) for (interval, kind), into in result.items()], near, counted)
        return result
    pieces, offset = [], 0
    for interval in intervals:
        pieces.append(Piece(interval, offset))
        offset += len(interval)
    state = torch.empty(len(KINDS), offset, dtype=torch.float32)
    restore(path, pieces, state, torch.empty(offset, dtype=torch.float32), near, progress)
    return {
        (piece.interval, kind): state[KINDS.index(kind), piece.offset : piece.offset + len(piece.interval)]
        for kind in kinds
        for piece in pieces
    }


def restore(
    path: Path,
    pieces: Sequence[Piece],
    state: torch.Tensor,
    gradient: torch.Tensor,
    near: Tier | None = None,
    progress: Progress = lambda done, total: None,
) -> None:
    """Fill the pieces' columns of `state` (3, n) with what is saved. gradient: (n,), room for one entry at a time.

    Both fp32 on the host; columns that belong to no piece are updated with the others, and stay zero where they are.
    Raises CheckpointCorrupt; then what is there already is worth nothing.
    """
    (base, found), *entries = links(path)
    counted = _Counted(sum(len(piece.interval) for piece in pieces) * ITEM_BYTES * (len(KINDS) + len(entries)), progress)
    of_state = zip(KINDS, state, strict=True)
    with _link(found.step):
        fill(base, [Wanted(p.interval, kind, _cut(row, p)) for kind, row in of_state for p in pieces], near, counted)
    for at, entry in entries:
        with _link(entry.step):
            if entry.answer is None or entry.answer.step != entry.step:
                raise CheckpointCorrupt(
                    f"{at} does not say what was answered to the vote of its step; restore an older checkpoint"
                )
            fill(at, [Wanted(piece.interval, GRADIENT[0], _cut(gradient, piece)) for piece in pieces], near, counted)
            train, decayed = _update_of(at, entry, pieces)
        adamw(train, entry.answer, state, gradient, decayed)


class _Counted:
    """Bytes so far, of all that a restore reads."""

    def __init__(self, total: int, progress: Progress) -> None:
        self._total = total
        self._done = 0
        self._progress = progress

    def __call__(self, more: int) -> None:
        self._done += more
        self._progress(self._done, self._total)


def links(path: Path) -> tuple[tuple[Path, Manifest], ...]:
    """What a checkpoint is read from: its base first, itself last. Raises LinkCorrupt, CheckpointAway."""
    try:
        return load_chain(path)
    except CheckpointAway:
        raise
    except CheckpointCorrupt as error:
        at = path
        with suppress(CheckpointCorrupt):
            for _ in range(LONGEST_CHAIN):
                if (parent := load_manifest(at).parent) is None:
                    break
                at = path.parent / parent.name
        of = named(at)
        raise LinkCorrupt(str(error), of[0] if of else Step(0)) from error


@contextmanager
def _link(step: Step) -> Iterator[None]:
    try:
        yield
    except CheckpointAway:
        raise
    except CheckpointCorrupt as error:
        raise LinkCorrupt(str(error), step) from error


def _update_of(path: Path, entry: Manifest, pieces: Sequence[Piece]) -> tuple[TrainSpec, list[tuple[int, int]]]:
    """The settings of the update, and the columns that decay."""
    kept = spec_file.load(path.parent, entry.spec_hash)
    decays = {line.name for line in kept.profile.lines if line.decay}
    decayed: list[tuple[int, int]] = []
    for start, stop in sorted((p.offset, p.offset + len(p.interval)) for p in pieces if p.interval.line in decays):
        if decayed and decayed[-1][1] == start:
            decayed[-1] = (decayed[-1][0], stop)
        else:
            decayed.append((start, stop))
    return kept.spec.train, decayed


def _cut(row: torch.Tensor, piece: Piece) -> torch.Tensor:
    return row[piece.offset : piece.offset + len(piece.interval)]
