"""Bringing state to a new layout: made from the seed, read from a checkpoint, or moved between living memories.

Each function fills a fresh `Holdings` whole or raises; the holdings it reads are never changed, so whoever fails half way
still has what it had.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from orchestrator.domain.errors import EverstepError
from orchestrator.domain.ids import Device, Rank
from orchestrator.domain.layout import Move
from orchestrator.domain.profile import Interval, Profile
from orchestrator.domain.spec import JobSpec

from ..checkpoint.reader import read
from ..donation import Donation
from ..faultpoints import faultpoint
from ..parallel.data import Session
from ..program import Program
from .holdings import KINDS, Holdings


class NotHeld(EverstepError):
    """A move names an interval that its source does not hold: the settlement and this rank's memory disagree."""


def from_seed(holdings: Holdings, program: Program, spec: JobSpec, profile: Profile) -> None:
    """Step 0: initial weights, zero moments."""
    wanted: dict[str, list[Interval]] = defaultdict(list)
    for interval in holdings.intervals:
        wanted[interval.line].append(interval)
    for line in profile.lines:
        if line.name in wanted:
            initial = program.initial(spec, line)
            for interval in wanted[line.name]:
                values = torch.zeros(3, len(interval), dtype=torch.float32)
                values[0] = initial[interval.start : interval.stop]
                holdings.fill(interval, values)


def from_checkpoint(holdings: Holdings, path: Path) -> None:
    """Raises CheckpointCorrupt."""
    pieces = read(path, holdings.intervals)
    for interval in holdings.intervals:
        holdings.fill(interval, torch.stack([pieces[interval, kind] for kind in KINDS]))


def give(old: Holdings | None, moves: Sequence[Move], me: Device, donation: Donation) -> None:
    """A donor's half of `from_memory`. Raises NotHeld."""
    outgoing: dict[Rank, list[Interval]] = defaultdict(list)
    for move in moves:
        if move.source == me:
            if old is None or not old.covers(move.interval):
                raise NotHeld(f"{me} was to provide {move.interval}, which it does not hold; restore from a checkpoint")
            outgoing[donation.ranks[move.target]].append(move.interval)
    assert old is not None or not outgoing
    donation.exchange([(rank, _message(old, outgoing[rank])) for rank in sorted(outgoing) if old is not None], [])


def from_memory(holdings: Holdings, old: Holdings | None, moves: Sequence[Move], me: Device, session: Session) -> None:
    """Keep what this device has, exchange the rest. Every rank of the generation calls this with the same moves.

    Raises NotHeld where `old` lacks an interval this device is the source of, or the new layout is not filled whole.
    """
    ranks = session.ranks
    outgoing: dict[Rank, list[Interval]] = defaultdict(list)
    incoming: dict[Rank, list[Interval]] = defaultdict(list)
    for move in moves:
        if move.source == me:
            if old is None or not old.covers(move.interval):
                raise NotHeld(f"{me} was to provide {move.interval}, which it does not hold; restore from a checkpoint")
            if move.target != me:
                outgoing[ranks[move.target]].append(move.interval)
        elif move.target == me:
            incoming[ranks[move.source]].append(move.interval)
    kept = holdings.keep(old) if old is not None else 0
    missing = sum(map(len, holdings.intervals)) - kept - sum(map(_total, incoming.values()))
    if missing:
        raise NotHeld(f"{me} has no source for {missing} elements of its layout; restore from a checkpoint")
    # One message per pair of ranks, in order of rank, so that both ends agree without another word.
    sends = [(rank, _message(old, outgoing[rank])) for rank in sorted(outgoing) if old is not None]
    receives = [(rank, torch.empty(3, _total(incoming[rank]), device=holdings.state.device)) for rank in sorted(incoming)]
    if sends or receives:
        posted = session.post(sends, receives)
        faultpoint("in_transfer")
        posted.wait()
    for rank, values in receives:
        _spread(holdings, incoming, rank, values)


def _message(old: Holdings, intervals: Sequence[Interval]) -> torch.Tensor:
    return torch.cat([view for interval in intervals for view in old.views(interval)], dim=1)


def _spread(holdings: Holdings, incoming: Mapping[Rank, Sequence[Interval]], rank: Rank, values: torch.Tensor) -> None:
    position = 0
    for interval in incoming[rank]:
        holdings.fill(interval, values[:, position : position + len(interval)])
        position += len(interval)


def _total(intervals: Sequence[Interval]) -> int:
    return sum(len(interval) for interval in intervals)
