"""Reading a checkpoint for no other end than to know that it can be read: every byte it names, stored and decoded.

It says everything that is wrong, not only the first thing. What follows from that is for others to decide.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from orchestrator.adapters import index as indexes
from orchestrator.adapters.index import RAW, IndexedPiece
from orchestrator.adapters.manifest import CheckpointCorrupt, Manifest, load_chain, load_manifest

from .coding import Coder, digest
from .packs import Sources, batches, in_parallel, opened, what

Progress = Callable[[int, int], None]
"""Stored bytes looked at so far, and of all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """bad: what is wrong, in words; empty where every byte is what was written.

    num_bytes: of state it holds; num_stored: of the packs it was read from, parents and all.
    """

    path: Path
    step: int
    generation: int
    program_hash: str
    num_lines: int
    num_bytes: int
    num_pieces: int
    num_stored: int
    seconds: float
    bad: tuple[str, ...]


def verify(path: Path, progress: Progress = lambda done, total: None) -> Verified:
    """Read all of it, and of what it goes on from. Raises CheckpointCorrupt where its own manifest cannot be read."""
    begun = time.perf_counter()
    manifest = load_manifest(path)
    bad: list[str] = []
    links: list[tuple[Path, list[IndexedPiece]]] = []
    try:
        links = [(at, list(_pieces(at, one, bad))) for at, one in load_chain(path)]
    except CheckpointCorrupt as error:
        bad.append(str(error))
        links = [(path, list(_pieces(path, manifest, bad)))]
    total = sum(piece.length for _, pieces in links for piece in pieces)
    done = 0
    progress(done, total)
    for at, pieces in links:
        for size, complaints in _looked_at(at, pieces):
            bad += complaints
            done += size
            progress(done, total)
    return Verified(
        path=path,
        step=manifest.step,
        generation=manifest.generation,
        program_hash=manifest.program_hash,
        num_lines=len(manifest.lines),
        num_bytes=sum(manifest.lines.values()) * len(indexes.STATE) * indexes.ITEM_BYTES,
        num_pieces=sum(len(pieces) for _, pieces in links),
        num_stored=total,
        seconds=time.perf_counter() - begun,
        bad=tuple(dict.fromkeys(bad)),
    )


def _pieces(path: Path, manifest: Manifest, bad: list[str]) -> Iterator[IndexedPiece]:
    """Each that lies somewhere else or is said to be something else; what cannot be used of the indexes goes to `bad`."""
    seen: set[tuple[str, int, str]] = set()
    gone = set()
    for pack, size in manifest.packs.items():
        try:
            indexes.check_packs(path, {pack: size})
        except CheckpointCorrupt as error:
            bad.append(str(error))
            gone.add(pack)
    for shard in manifest.shards:
        try:
            part = indexes.load(path, shard)
        except CheckpointCorrupt as error:
            bad.append(str(error))
            continue
        if (part.step, part.generation) != (manifest.step, manifest.generation):
            bad.append(f"{path / shard.index} is of step {part.step} of generation {part.generation}")
        for piece in part.pieces:
            place = (piece.pack, piece.offset, piece.content)
            if piece.pack not in gone and place not in seen:
                seen.add(place)
                yield piece


def _looked_at(path: Path, pieces: Sequence[IndexedPiece]) -> Iterator[tuple[int, list[str]]]:
    """Of some pieces at a time: their stored bytes, and what is wrong with them."""
    cut = batches(pieces, lambda piece: piece)
    yield from in_parallel(lambda batch: _opened_and_looked_at(path, batch), cut)


def _opened_and_looked_at(path: Path, batch: Sequence[IndexedPiece]) -> tuple[int, list[str]]:
    with opened(path, (piece.pack for piece in batch)) as sources:
        return _complaints(path, batch, sources)


def _complaints(path: Path, batch: Sequence[IndexedPiece], sources: Sources) -> tuple[int, list[str]]:
    coder, bad = Coder(), []
    room = np.empty((2, max(piece.content_bytes for piece in batch)), dtype=np.uint8)
    for piece in batch:
        stored, content = room[0, : piece.length], room[1, : piece.content_bytes]
        try:
            sources[piece.pack].read_into(stored, piece.offset)
            if digest(stored.data) != piece.stored:
                raise ValueError("hash")
            if piece.coding != RAW:
                coder.decode(piece.coding, stored, content)
                if digest(content.data) != piece.content:
                    raise ValueError("hash")
        except OSError as error:
            bad.append(f"{what(path, piece)} cannot be read: {error}")
        except ValueError:
            bad.append(f"{what(path, piece)} do not have the hash they were written with")
    return sum(piece.length for piece in batch), bad
