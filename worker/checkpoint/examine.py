"""Looking at whole checkpoints: is every byte what was written, and what is unlike in two of them.

It reads through the checkpoint reader, so it knows nothing of files and plans: two checkpoints compare whatever wrote them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from orchestrator.adapters.manifest import CheckpointCorrupt, load_manifest
from orchestrator.domain.profile import CHUNK, Interval

from ..state.holdings import KINDS
from .reader import read

PORTION = 256 * CHUNK
"""Elements looked at at a time: 64 MiB of one kind."""
ITEM_BYTES = 4
Progress = Callable[[int, int], None]
"""Bytes looked at so far, and of all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """bad: what is wrong, in words; empty where every byte is what was written."""

    path: Path
    step: int
    generation: int
    num_lines: int
    num_bytes: int
    bad: tuple[str, ...]


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


def verify(path: Path, progress: Progress = lambda done, total: None) -> Verified:
    """Read all of it. Raises CheckpointCorrupt where its manifest cannot be read."""
    manifest = load_manifest(path)
    total = sum(manifest.lines.values()) * len(KINDS) * ITEM_BYTES
    bad: dict[str, None] = {}
    done = 0
    progress(done, total)
    for portion in _portions(manifest.lines):
        for kind in KINDS:
            try:
                read(path, portion, kinds=(kind,))
            except CheckpointCorrupt:
                # One by one, so that everything that is wrong is named.
                for interval in portion:
                    bad |= dict.fromkeys(_complaints(path, interval, kind))
            done += sum(map(len, portion)) * ITEM_BYTES
            progress(done, total)
    return Verified(
        path=path,
        step=manifest.step,
        generation=manifest.generation,
        num_lines=len(manifest.lines),
        num_bytes=total,
        bad=tuple(bad),
    )


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
        for kind in KINDS:
            contents = [read(path, portion, kinds=(kind,)) for path in (a, b)]
            for interval in portion:
                one, other = (content[interval, kind] for content in contents)
                before = found.get((interval.line, kind))
                found[interval.line, kind] = _compared(interval, kind, both[interval.line], one, other, before)
            done += sum(map(len, portion)) * ITEM_BYTES
            progress(done, total)
    unlike = tuple(one for one in found.values() if one.num_unlike)
    return Difference(
        a=a,
        b=b,
        steps=(manifests[0].step, manifests[1].step),
        only_a=tuple(name for name in lines[0] if name not in both),
        only_b=tuple(name for name in lines[1] if name not in both),
        unlike=unlike,
        num_same=len(both) - len({one.line for one in unlike}),
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


def _complaints(path: Path, interval: Interval, kind: str) -> Iterator[str]:
    for start in range(interval.start, interval.stop, CHUNK):
        try:
            read(path, [Interval(interval.line, start, min(interval.stop, start + CHUNK))], kinds=(kind,))
        except CheckpointCorrupt as error:
            yield str(error)


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
