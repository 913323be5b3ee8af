"""Bringing state to a new layout: made from the seed, read from a checkpoint, or moved between living memories.

Each function fills a fresh `Holdings` whole or raises; the holdings it reads are never changed, so whoever fails half way
still has what it had. What moves between memories moves in messages of a few MiB, so that an abort is never far and what
had arrived by then counts: `Holdings.arrived` names it, and the next transfer goes on from there.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from orchestrator.domain.errors import EverstepError
from orchestrator.domain.ids import Device, Rank
from orchestrator.domain.layout import Move
from orchestrator.domain.profile import BLOCK, Interval, Profile
from orchestrator.domain.spec import JobSpec

from ..checkpoint.reader import Progress, read, restore
from ..checkpoint.tier import Tier
from ..faultpoints import faultpoint
from ..parallel.data import Messages, Posted
from ..program import Program
from .holdings import KINDS, Holdings

MESSAGE = 5440 * BLOCK
"""Elements in one message at most: 4 MiB of state."""
STATE_BYTES = 12
"""Of one element."""
IN_FLIGHT = 3
"""Rounds of messages posted at once."""


class NotHeld(EverstepError):
    """A move names an interval that its source does not hold: the settlement and this rank's memory disagree."""


class Exchange(Protocol):
    """A session or a donation, as far as moves need it."""

    @property
    def ranks(self) -> Mapping[Device, Rank]: ...
    def post(self, sends: Messages, receives: Messages) -> Posted: ...


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


def _untold(done: int, total: int) -> None:
    """Bytes so far, and of all."""


def from_checkpoint(holdings: Holdings, path: Path, near: Tier | None = None, progress: Progress = _untold) -> None:
    """near: a tier to look in first.

    For step 0, where a job begins anew with the weights of another, moments are zero. Raises CheckpointCorrupt."""
    kinds = KINDS if holdings.step else KINDS[:1]
    if holdings.state.device.type == "cpu" and kinds == KINDS:  # where it is wanted, without a copy between
        restore(path, holdings.pieces, holdings.state, holdings.gradient, near, progress)
        holdings.note(holdings.intervals)
        return
    pieces = read(path, holdings.intervals, kinds=kinds, near=near, progress=progress)
    for interval in holdings.intervals:
        values = torch.zeros(len(KINDS), len(interval), dtype=torch.float32)
        for row, kind in enumerate(kinds):
            values[row] = pieces[interval, kind]
        holdings.fill(interval, values)


def give(stores: Sequence[Holdings], moves: Sequence[Move], me: Device, donation: Exchange) -> None:
    """A donor's half of `from_memory`. Raises NotHeld."""
    outgoing = _outgoing(stores, moves, me, donation.ranks)
    _move(stores, None, outgoing, {}, donation)


def from_memory(
    holdings: Holdings,
    stores: Sequence[Holdings],
    moves: Sequence[Move],
    me: Device,
    session: Exchange,
    lost: Sequence[Interval] = (),
    checkpoint: Path | None = None,
    near: Tier | None = None,
    received: Progress = _untold,
    read_back: Progress = _untold,
) -> None:
    """Keep what this device has in `stores`, exchange the rest. Every rank of the generation is given the same moves.

    `holdings` may be one of the stores, where what is there stays. lost: what is in nobody's memory and is read from a
    checkpoint of the same state. received, read_back: take bytes so far and of all. Raises NotHeld where the stores lack an
    interval this device is the source of, or the new layout is not filled whole, and CheckpointCorrupt; whatever it
    raises, `holdings.arrived` says what came.
    """
    outgoing = _outgoing(stores, moves, me, session.ranks)
    incoming: dict[Rank, list[Interval]] = defaultdict(list)
    for move in moves:
        if move.target == me:
            incoming[session.ranks[move.source]].append(move.interval)
    for store in stores:
        if store is not holdings:
            holdings.keep(store)
    # Before anything is exchanged: where it cannot be read nobody has waited for a transfer in vain.
    if checkpoint is not None and lost:
        _read_lost(holdings, lost, checkpoint, near, read_back)
    coming = [interval for intervals in incoming.values() for interval in intervals]
    missing = sum(map(len, holdings.lacking(coming)))
    if missing:
        raise NotHeld(f"{me} has no source for {missing} elements of its layout; restore from a checkpoint")
    _move(stores, holdings, outgoing, incoming, session, received)


def _read_lost(
    holdings: Holdings, lost: Sequence[Interval], checkpoint: Path, near: Tier | None, progress: Progress
) -> None:
    found = read(checkpoint, lost, near=near, progress=progress)
    for interval in lost:
        holdings.fill(interval, torch.stack([found[interval, kind] for kind in KINDS]))


def messages(intervals: Sequence[Interval], most: int) -> list[list[Interval]]:
    """The same elements in the same order, in messages of at most `most` elements: both ends cut alike."""
    made: list[list[Interval]] = []
    room = 0
    for interval in intervals:
        start = interval.start
        while start < interval.stop:
            if not room:
                made.append([])
                room = most
            stop = min(interval.stop, start + room)
            made[-1].append(Interval(interval.line, start, stop))
            room -= stop - start
            start = stop
    return made


@dataclass(frozen=True, slots=True)
class _Round:
    posted: Posted
    arriving: list[tuple[list[Interval], torch.Tensor]]


def _move(
    stores: Sequence[Holdings],
    holdings: Holdings | None,
    outgoing: Mapping[Rank, Sequence[Interval]],
    incoming: Mapping[Rank, Sequence[Interval]],
    exchange: Exchange,
    progress: Progress = _untold,
) -> None:
    """Message by message, in order of rank and of moves, so that both ends agree without another word."""
    to = {rank: messages(outgoing[rank], MESSAGE) for rank in sorted(outgoing)}
    of = {rank: messages(incoming[rank], MESSAGE) for rank in sorted(incoming)}
    under_way: deque[_Round] = deque()
    total, done = sum(map(_total, incoming.values())), 0
    try:
        for number in range(max(map(len, (*to.values(), *of.values())), default=0)):
            if len(under_way) == IN_FLIGHT:
                done += _land(holdings, under_way)
                progress(done * STATE_BYTES, total * STATE_BYTES)
            sends = [(rank, packed(stores, cut[number])) for rank, cut in to.items() if number < len(cut)]
            coming = [(rank, cut[number]) for rank, cut in of.items() if number < len(cut)]
            landings = [torch.empty(3, _total(cut), device=_device(stores, holdings)) for _, cut in coming]
            posted = exchange.post(sends, [(rank, values) for (rank, _), values in zip(coming, landings, strict=True)])
            if not number:
                faultpoint("in_transfer")
            under_way.append(_Round(posted, [(cut, values) for (_, cut), values in zip(coming, landings, strict=True)]))
        while under_way:
            done += _land(holdings, under_way)
            progress(done * STATE_BYTES, total * STATE_BYTES)
    except BaseException:
        for one in under_way:
            for (cut, values), is_whole in zip(one.arriving, one.posted.landed(), strict=True):
                if is_whole:
                    _spread(holdings, cut, values)
        raise


def _land(holdings: Holdings | None, under_way: deque[_Round]) -> int:
    """Elements that have arrived."""
    under_way[0].posted.wait()
    arriving = under_way.popleft().arriving
    for cut, values in arriving:
        _spread(holdings, cut, values)
    return sum(_total(cut) for cut, _ in arriving)


def _outgoing(
    stores: Sequence[Holdings], moves: Sequence[Move], me: Device, ranks: Mapping[Device, Rank]
) -> dict[Rank, list[Interval]]:
    outgoing: dict[Rank, list[Interval]] = defaultdict(list)
    for move in moves:
        if move.source == me:
            if _store_of(move.interval, stores) is None:
                raise _not_held(me, move.interval)
            outgoing[ranks[move.target]].append(move.interval)
    return outgoing


def _store_of(interval: Interval, stores: Sequence[Holdings]) -> Holdings | None:
    return next((store for store in stores if store.covers(interval)), None)


def _not_held(me: Device, interval: Interval) -> NotHeld:
    return NotHeld(f"{me} was to provide {interval}, which it does not hold; restore from a checkpoint")


def _device(stores: Sequence[Holdings], holdings: Holdings | None) -> torch.device:
    return (holdings or stores[0]).state.device


def packed(stores: Sequence[Holdings], intervals: Sequence[Interval]) -> torch.Tensor:
    """(3, k): the state of these intervals, end to end; each must be in one of the stores."""
    views = []
    for interval in intervals:
        store = _store_of(interval, stores)
        assert store is not None, "checked before anything was sent"
        views += store.views(interval)
    return torch.cat(views, dim=1)


def _spread(holdings: Holdings | None, intervals: Sequence[Interval], values: torch.Tensor) -> None:
    assert holdings is not None
    position = 0
    for interval in intervals:
        holdings.fill(interval, values[:, position : position + len(interval)])
        position += len(interval)


def _total(intervals: Sequence[Interval]) -> int:
    return sum(len(interval) for interval in intervals)
