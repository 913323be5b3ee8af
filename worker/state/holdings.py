"""The optimizer state one rank holds: flat fp32 tensors over the intervals it owns and, behind them, those it mirrors.

    addresses   |-- owned: decayed buckets, then others --|-- mirrored: the same order as its owner's --|
    state rows  master weights, first moments, second moments          gradient: one row more

Owner and mirror lay the owner's share out alike, so its reduced gradient travels as one message. Ranges are bucket
addresses, padding included; padding is zero in every row and stays so. How the state gets here is `relayout`'s business.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from orchestrator.domain.ids import Generation, Rank, Step
from orchestrator.domain.layout import Bucket
from orchestrator.domain.profile import Interval, joined

from .pieces import KINDS as KINDS
from .pieces import Piece as Piece


@dataclass(frozen=True, slots=True)
class Segment:
    """One bucket's share of one owner: bucket number, bucket addresses start..stop-1, and where they are kept here."""

    bucket: int
    start: int
    stop: int
    offset: int


class Holdings:
    """`step` is the last step applied; while `torn` an update is half done and nothing here may be used.

    arrived: None where everything is there; while a transfer fills it, what is whole so far, line by line.
    """

    def __init__(
        self, buckets: Sequence[Bucket], me: Rank, mirrored: Rank | None, generation: Generation, device: torch.device
    ) -> None:
        order = sorted(range(len(buckets)), key=lambda number: not buckets[number].decay)
        mine, self.owned = _segments(buckets, order, me, 0)
        theirs, size = _segments(buckets, order, mirrored, self.owned) if mirrored is not None else ((), self.owned)
        self.segments = mine
        """Of the owned part only."""
        self.generation = generation
        self.step = Step(0)
        self.torn = False
        self.arrived: dict[str, tuple[Interval, ...]] | None = None
        self.state = torch.zeros(3, size, dtype=torch.float32, device=device)
        self.gradient = torch.zeros(size, dtype=torch.float32, device=device)
        self.decayed = _merged((s.offset, s.offset + s.stop - s.start) for s in (*mine, *theirs) if buckets[s.bucket].decay)
        self.owned_pieces = tuple(_pieces(buckets, mine))
        self.pieces = self.owned_pieces + tuple(_pieces(buckets, theirs))
        self._by_line: dict[str, list[Piece]] = defaultdict(list)
        for piece in self.pieces:
            self._by_line[piece.interval.line].append(piece)

    @property
    def intervals(self) -> tuple[Interval, ...]:
        return tuple(piece.interval for piece in self.pieces)

    def covers(self, interval: Interval) -> bool:
        """Whether all of it is here, and whole."""
        if self.arrived is not None:
            return any(known.intersect(interval) == interval for known in self.arrived.get(interval.line, ()))
        return self.has_room_for(interval)

    def has_room_for(self, interval: Interval) -> bool:
        pieces = self._by_line.get(interval.line, ())
        return sum(len(common) for piece in pieces if (common := piece.interval.intersect(interval))) == len(interval)

    def is_laid_out_like(self, other: Holdings) -> bool:
        return (self.owned, self.segments, self.pieces) == (other.owned, other.segments, other.pieces)

    def views(self, interval: Interval) -> list[torch.Tensor]:
        """What is held of an interval, in order of element: views (3, k) into `state`."""
        return [view for _, view in self.parts(interval)]

    def parts(self, interval: Interval) -> list[tuple[Interval, torch.Tensor]]:
        """What is held of an interval, in order of element: which elements, and a view (3, k) of them."""
        return [(found, self.state[:, at : at + len(found)]) for found, at, _ in self.places(interval)]

    def gradients(self, interval: Interval) -> list[torch.Tensor]:
        """Where `views` are, views (k,) into `gradient`."""
        return [self.gradient[at : at + len(found)] for found, at, _ in self.places(interval)]

    def places(self, interval: Interval) -> list[tuple[Interval, int, bool]]:
        """What is held of an interval, in order of element: which elements, where they are kept, whether they decay."""
        found = []
        for piece in self._by_line.get(interval.line, ()):
            common = piece.interval.intersect(interval)
            if common is not None:
                place = piece.offset + common.start - piece.interval.start
                decays = any(start <= place < stop for start, stop in self.decayed)
                found.append((common, place, decays))
        return sorted(found)

    def keep(self, other: Holdings) -> None:
        """Take over whatever is whole in `other` of this layout, where it is not here yet. `other` stays as it is."""
        for piece in self.pieces:
            known = (piece.interval,) if other.arrived is None else other.arrived.get(piece.interval.line, ())
            for whole in known:
                common = whole.intersect(piece.interval)
                if common is None or self.covers(common):
                    continue
                for part, view in other.parts(common):
                    self.fill(part, view)

    def lacking(self, coming: Iterable[Interval]) -> list[Interval]:
        """The pieces that are neither whole here nor will be with what is coming."""
        if self.arrived is None:
            return []
        here = [interval for intervals in self.arrived.values() for interval in intervals]
        by_line: dict[str, list[Interval]] = defaultdict(list)
        for interval in joined((*here, *coming)):
            by_line[interval.line].append(interval)
        wanted = (piece.interval for piece in self.pieces)
        return [i for i in wanted if not any(have.intersect(i) == i for have in by_line[i.line])]

    def fill(self, interval: Interval, values: torch.Tensor) -> None:
        """values: (3, len(interval)); every element of the interval must be held."""
        position = 0
        for view in self.views(interval):
            view.copy_(values[:, position : position + view.shape[1]])
            position += view.shape[1]
        if position != len(interval):
            raise ValueError(f"{interval} is not held whole")
        self.note((interval,))

    def note(self, intervals: Iterable[Interval]) -> None:
        """They have arrived, where it is being filled."""
        if self.arrived is not None:
            for interval in intervals:
                self.arrived[interval.line] = joined((*self.arrived.get(interval.line, ()), interval))


def _segments(buckets: Sequence[Bucket], order: Sequence[int], owner: Rank, offset: int) -> tuple[tuple[Segment, ...], int]:
    made = []
    for number in order:
        start, stop = buckets[number].shares.get(owner, (0, 0))
        if start < stop:
            made.append(Segment(number, start, stop, offset))
            offset += stop - start
    return tuple(made), offset


def _pieces(buckets: Sequence[Bucket], segments: Sequence[Segment]) -> Iterator[Piece]:
    for segment in segments:
        for part in buckets[segment.bucket].intervals(segment.start, segment.stop):
            yield Piece(part.interval, segment.offset + part.offset - segment.start)


def _merged(ranges: Iterator[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    runs: list[tuple[int, int]] = []
    for start, stop in ranges:
        if runs and runs[-1][1] == start:
            runs[-1] = (runs[-1][0], stop)
        else:
            runs.append((start, stop))
    return tuple(runs)
