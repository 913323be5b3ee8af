"""Looking at two checkpoints: what is unlike in them, and what of the second is stored for it alone.

It reads through the checkpoint reader, so it knows nothing of files and plans: two checkpoints compare whatever wrote them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from orchestrator.adapters.index import pack_path
from orchestrator.adapters.manifest import load_chain, load_indexes, load_manifest
from orchestrator.domain.profile import CHUNK, Interval

from ..state.holdings import KINDS
from .reader import read

PORTION = 128 * CHUNK
"""Elements looked at at a time: 32 MiB of each kind."""
ITEM_BYTES = 4
Progress = Callable[[int, int], None]
"""Bytes looked at so far, and of all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unlike:
    """One line, one kind: how many of its elements differ in a bit, and by how much at most."""

    line: str
    kind: str
    num_unlike: int
    num_elements: int
    largest: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    a: Path
    b: Path
    steps: tuple[int, int]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    """Lines, also those that are longer or shorter in the other."""
    unlike: tuple[Unlike, ...]
    num_same: int
    """Of lines that both have, those that are alike in every bit."""
    num_shared: int
    num_new: int
    """Stored bytes of b that a is read from as well, and those that it is not."""


def diff(a: Path, b: Path, progress: Progress = lambda done, total: None) -> Difference:
    """Element by element. Raises CheckpointCorrupt."""
    manifests = load_manifest(a), load_manifest(b)
    lines = [dict(manifest.lines) for manifest in manifests]
    both = {name: numel for name, numel in lines[0].items() if lines[1].get(name) == numel}
    total = sum(both.values()) * len(KINDS) * ITEM_BYTES
    found: dict[tuple[str, str], Unlike] = {}
    done = 0
    progress(done, total)
    for portion in _portions(both):
        contents = [read(path, portion) for path in (a, b)]  # all kinds at once: a journal brings them forward together
        for interval in portion:
            for kind in KINDS:
                one, other = (content[interval, kind] for content in contents)
                before = found.get((interval.line, kind))
                found[interval.line, kind] = _compared(interval, kind, both[interval.line], one, other, before)
        done += sum(map(len, portion)) * len(KINDS) * ITEM_BYTES
        progress(done, total)
    unlike = tuple(one for one in found.values() if one.num_unlike)
    places = _places(a), _places(b)
    return Difference(
        a=a,
        b=b,
        steps=(manifests[0].step, manifests[1].step),
        only_a=tuple(name for name in lines[0] if name not in both),
        only_b=tuple(name for name in lines[1] if name not in both),
        unlike=unlike,
        num_same=len(both) - len({one.line for one in unlike}),
        num_shared=sum(size for place, size in places[1].items() if place in places[0]),
        num_new=sum(size for place, size in places[1].items() if place not in places[0]),
    )


def _compared(
    interval: Interval, kind: str, numel: int, one: torch.Tensor, other: torch.Tensor, before: Unlike | None
) -> Unlike:
    # By their bits: a NaN is like itself, and zero is unlike minus zero.
    unlike = one.view(torch.int32) != other.view(torch.int32)
    count = int(unlike.sum())
    largest = float((one - other).abs().nan_to_num(nan=float("inf")).max()) if count else 0.0
    return Unlike(
        line=interval.line,
        kind=kind,
        num_unlike=count + (before.num_unlike if before else 0),
        num_elements=numel,
        largest=max(largest, before.largest if before else 0.0),
    )


def _places(path: Path) -> dict[tuple[Path, int], int]:
    """Where a checkpoint is stored -> bytes."""
    return {
        (pack_path(at, piece.pack).resolve(), piece.offset): piece.length
        for at, manifest in load_chain(path)
        for part in load_indexes(at, manifest)
        for piece in part.pieces
    }


def _portions(lines: Mapping[str, int]) -> Iterator[list[Interval]]:
    """Every line once, cut on the grid, in portions of about PORTION elements."""
    portion: list[Interval] = []
    size = 0
    for line, numel in lines.items():
        start = 0
        while start < numel:
            stop = min(numel, start + PORTION - size)
            stop = stop if stop == numel else max(start, stop // CHUNK * CHUNK)
            if stop > start:
                portion.append(Interval(line, start, stop))
                size += stop - start
            if stop < numel or size >= PORTION:
                yield portion
                portion, size = [], 0
            start = stop
    if portion:
        yield portion
