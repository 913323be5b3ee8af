"""What a program is made of: its layers and the canonical lines of its parameters.

Every parameter is one *line*: a flat sequence of elements in a canonical order with its tensor-parallel dimension
outermost. Shards, optimizer intervals and checkpoint chunks are all intervals of lines, so they never depend on a plan.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

BLOCK = 64
"""Elements. The unit of cuts, norms and chunks."""

CHUNK = 1024 * BLOCK
"""Elements. The fixed grid on which checkpoints cut every line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One parameter.

    shape: its full shape, tensor-parallel dimension first (row-parallel weights are stored (in, out)).
    split: whether tensor parallelism cuts it along that dimension; otherwise every tp rank uses it whole.
    layers: the layers that use it, in order; more than one where it is tied.
    decay: whether weight decay applies.
    """

    name: str
    shape: tuple[int, ...]
    split: bool
    layers: tuple[int, ...]
    decay: bool

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Divisor:
    """A size that tensor parallelism must divide, by the name the user knows it under."""

    field: str
    value: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A described program. Layers are 0..num_layers-1: embedding first, blocks, head last."""

    num_layers: int
    lines: tuple[Line, ...]
    divisors: tuple[Divisor, ...]
    activation_bytes: int
    """Bytes one micro-batch keeps alive in one layer at tp 1."""
    text_sha256: str = ""
    """Of the text as it was when the program was described; every node must read the same."""
    program_sha256: str = ""
    """Of its source, as far as it is known; empty where nobody looked."""

    @property
    def num_params(self) -> int:
        return sum(line.numel for line in self.lines)


def exact_groups(profile: Profile) -> tuple[tuple[int, ...], ...]:
    """The parameters that share a scale in exact mode, by the layers that use them: an order no plan has a say in."""
    return tuple(sorted({line.layers for line in profile.lines}))


def splits_a_block(profile: Profile, tp: int) -> Line | None:
    """The first line that tensor parallelism of this degree would cut inside a block, which exact mode refuses."""
    return next((line for line in profile.lines if line.split and line.numel % (tp * BLOCK)), None)


@dataclass(frozen=True, slots=True, order=True)
class Interval:
    """Elements start..stop-1 of a line."""

    line: str
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def intersect(self, other: Interval) -> Interval | None:
        if self.line != other.line:
            return None
        start, stop = max(self.start, other.start), min(self.stop, other.stop)
        return Interval(self.line, start, stop) if start < stop else None


def joined(intervals: Iterable[Interval]) -> tuple[Interval, ...]:
    """The same elements in as few intervals as there can be, in order."""
    found: list[Interval] = []
    for interval in sorted(intervals):
        last = found[-1] if found else None
        if last and last.line == interval.line and interval.start <= last.stop:
            found[-1] = Interval(last.line, last.start, max(last.stop, interval.stop))
        else:
            found.append(interval)
    return tuple(found)
