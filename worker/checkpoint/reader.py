"""Reading any intervals out of a committed checkpoint, whatever plan wrote it. Every byte used has had its hash checked."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from orchestrator.adapters.manifest import CheckpointCorrupt, load_index, load_manifest
from orchestrator.domain.profile import Interval

from ..state.holdings import KINDS
from .format import ITEM_BYTES


@dataclass(frozen=True, slots=True, order=True)
class _Stored:
    start: int
    stop: int
    offset: int
    file: Path
    sha256: str


def read(
    path: Path, intervals: Sequence[Interval], *, kinds: Sequence[str] = KINDS
) -> dict[tuple[Interval, str], torch.Tensor]:
    """(interval, kind) -> (len(interval),) fp32, for each kind of p, m, v that is asked for.

    Raises CheckpointCorrupt naming the file and the piece whose bytes are missing or not those that were written.
    """
    stored = _stored(path)
    last: tuple[_Stored, torch.Tensor] | None = None  # neighbouring intervals often end and begin in one piece
    result = {}
    for kind in kinds:
        for interval in intervals:
            values = torch.empty(len(interval), dtype=torch.float32)
            pieces = stored.get((interval.line, kind), [])
            position = interval.start
            number = max(0, bisect_right(pieces, position, key=lambda piece: piece.start) - 1)
            while position < interval.stop:
                if number >= len(pieces) or not pieces[number].start <= position < pieces[number].stop:
                    raise CheckpointCorrupt(f"{path}: no piece holds {kind} of {interval.line} at element {position}")
                piece = pieces[number]
                if last is None or last[0] is not piece:
                    last = (piece, _content(piece, interval.line, kind))
                stop = min(piece.stop, interval.stop)
                values[position - interval.start : stop - interval.start] = last[1][
                    position - piece.start : stop - piece.start
                ]
                position, number = stop, number + 1
            result[interval, kind] = values
    return result


def _stored(path: Path) -> dict[tuple[str, str], list[_Stored]]:
    found: dict[tuple[str, str], list[_Stored]] = defaultdict(list)
    for shard in load_manifest(path).shards:
        index = load_index(path, shard)
        for piece in index.pieces:
            found[piece.line, piece.kind].append(
                _Stored(piece.start, piece.stop, piece.offset, path / index.data, piece.sha256)
            )
    for pieces in found.values():
        pieces.sort()
    return found


def _content(piece: _Stored, line: str, kind: str) -> torch.Tensor:
    what = f"{piece.file}: {kind} of {line}, elements {piece.start}..{piece.stop - 1}"
    try:
        with piece.file.open("rb") as file:
            file.seek(piece.offset)
            content = bytearray(file.read((piece.stop - piece.start) * ITEM_BYTES))
    except OSError as error:
        raise CheckpointCorrupt(f"{what} cannot be read: {error}; restore an older checkpoint") from error
    if hashlib.sha256(content).hexdigest() != piece.sha256:
        raise CheckpointCorrupt(f"{what} do not have the hash they were written with; restore an older checkpoint")
    return torch.frombuffer(content, dtype=torch.float32)
