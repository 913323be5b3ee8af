"""What one rank keeps: a transfer that is cut short goes on where it was, and what was committed is what it is told."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from orchestrator.domain.checkpoint import CheckpointRef
from orchestrator.domain.generation import Answer, Unreadable
from orchestrator.domain.ids import Device, Generation, Rank, Step
from orchestrator.domain.layout import Layout, buckets, layout, transfers
from orchestrator.domain.origin import FromCheckpoint, FromMemory
from orchestrator.domain.plan import Plan, Seat
from orchestrator.domain.profile import Interval, joined
from tests.builders import a_device, a_plan, a_profile, a_spec, an_answer
from tests.checkpoints import Saves
from worker.checkpoint import packs
from worker.findings import NotRestored
from worker.parallel.group import PeerLost
from worker.progress import Unwatched
from worker.state import relayout
from worker.state.holdings import Holdings
from worker.state.kept import Kept

DONOR, ME = a_device(0), a_device(1)
PROFILE = a_profile()
OLD, NEW = a_plan([DONOR]), a_plan([DONOR, ME])
CPU = torch.device("cpu")
STEP = Step(7)
MESSAGE = 64
"""Elements: what arrives comes in a dozen messages."""


def holdings_of(plan: Plan, device: Device, step: Step = STEP) -> Holdings:
    """Every element another number."""
    made = Holdings(buckets(plan, PROFILE), plan.seat_of[device].rank, None, Generation(1), CPU)
    made.state[:] = torch.arange(made.state.numel(), dtype=torch.float32).view_as(made.state)
    made.step = step
    return made


@dataclass
class Transfer:
    """A generation's session in which donors send what they were told to, until a process ends.

    lost: numbers of the messages that its end cuts short.
    """

    source: Holdings
    restore: FromMemory
    lost: Container[int] = ()
    generation: Generation = Generation(2)
    mirrored: Rank | None = None
    received: int = 0
    """Elements."""
    messages: list[list[Interval]] = field(default_factory=list)
    number: int = 0
    """Of the next message."""

    def __post_init__(self) -> None:
        self.messages = relayout.messages([move.interval for move in self.restore.moves if move.target == ME], MESSAGE)

    @property
    def seat(self) -> Seat:
        return NEW.seat_of[ME]

    @property
    def ranks(self) -> dict[Device, Rank]:
        return {device: seat.rank for device, seat in NEW.seat_of.items()}

    def post(self, sends: Sequence[object], receives: Sequence[tuple[Rank, torch.Tensor]]) -> Arrival:
        assert not sends
        ((_, room),) = receives
        cut, is_whole = self.messages[self.number], self.number not in self.lost
        self.number += 1
        values = relayout.packed([self.source], cut)
        half = values.shape[1] if is_whole else values.shape[1] // 2
        room.fill_(-1.0)
        room[:, :half] = values[:, :half]
        self.received += half if is_whole else 0
        return Arrival(is_whole)

    def vote(self, ballot: torch.Tensor) -> torch.Tensor:
        return ballot


@dataclass(frozen=True)
class Arrival:
    is_whole: bool

    def wait(self) -> None:
        if not self.is_whole:
            raise PeerLost(Rank(0))

    def landed(self) -> list[bool]:
        return [self.is_whole]


@pytest.fixture(autouse=True)
def small_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relayout, "MESSAGE", MESSAGE)


def a_kept() -> Kept:
    return Kept(a_spec(mirrors=0), PROFILE, cast(Any, None), ME, CPU)


def restore_with(arrived: tuple[Interval, ...] = ()) -> FromMemory:
    """What the supervisor makes of it: all that this rank lacks comes from the donor."""
    wanted = layout(NEW, PROFILE, mirrors=0)
    mine = Layout(owned={ME: wanted.owned[ME]}, mirrored={})
    found = transfers({DONOR: layout(OLD, PROFILE, mirrors=0).held(DONOR)}, mine, {ME: arrived})
    moves = tuple(move for move in found.moves if move.source != ME)
    return FromMemory(step=STEP, answer=an_answer(STEP), moves=moves)


def fill(kept: Kept, transfer: Transfer) -> Holdings:
    kept.settle(transfer.restore)
    return kept.fill(cast(Any, transfer), buckets(NEW, PROFILE), transfer.restore, Unwatched())


@pytest.mark.parametrize("lives", [0, 1, 4])
def test_a_transfer_whose_donor_dies_goes_on_where_it_was(lives: int) -> None:
    kept, source = a_kept(), holdings_of(OLD, DONOR)
    first = Transfer(source, restore_with(), lost=range(lives, 100))
    came = joined(interval for message in first.messages[:lives] for interval in message)
    total = sum(len(interval) for message in first.messages for interval in message)
    with pytest.raises(PeerLost):
        fill(kept, first)
    arrived = kept.arrived()
    assert kept.whole is None and (arrived.intervals if arrived else ()) == came, "what came whole, and nothing else"
    again = Transfer(source, restore_with(arrived.intervals if arrived else ()), generation=Generation(3))
    held = fill(kept, again)
    assert again.received == total - first.received and first.received == sum(map(len, came)), "nothing is sent twice"
    assert kept.arrived() is None and kept.whole is held and (held.step, held.generation) == (STEP, 3)
    for piece in held.owned_pieces:
        assert torch.equal(torch.cat(held.views(piece.interval), 1), torch.cat(source.views(piece.interval), 1))


def test_what_others_had_sent_by_then_counts_too() -> None:
    """Several messages are under way at once, and one donor's end cuts only its own short."""
    kept = a_kept()
    transfer = Transfer(holdings_of(OLD, DONOR), restore_with(), lost=(2,))
    with pytest.raises(PeerLost):
        fill(kept, transfer)
    came = [message for number, message in enumerate(transfer.messages[: transfer.number]) if number != 2]
    arrived = kept.arrived()
    assert arrived is not None and len(came) == 4
    assert arrived.intervals == joined(interval for message in came for interval in message)


def test_what_had_arrived_of_another_step_is_not_used() -> None:
    kept, source = a_kept(), holdings_of(OLD, DONOR)
    with pytest.raises(PeerLost):
        fill(kept, Transfer(source, restore_with(), lost=range(3, 100)))
    later = FromMemory(step=Step(8), answer=an_answer(8), moves=restore_with().moves)
    transfer = Transfer(source, later)
    held = fill(kept, transfer)
    assert transfer.received == sum(len(move.interval) for move in later.moves) and held.step == 8


def voted(kept: Kept, step: int, *, held: int) -> Holdings:
    holdings = holdings_of(NEW, ME, Step(held))
    kept.holdings, kept.voted, kept.answer, kept.answered_in = holdings, Step(step), an_answer(held), Generation(1)
    return holdings


def told(step: int) -> FromMemory:
    return FromMemory(step=Step(step), answer=an_answer(step), moves=())


def test_a_vote_that_others_saw_pass_is_applied_by_whoever_had_entered_it() -> None:
    kept = a_kept()
    holdings = voted(kept, 7, held=6)
    kept.settle(told(7))
    assert holdings.step == 7 and not holdings.torn and kept.answer == an_answer(7) and kept.answered_in == 0


def test_who_had_not_entered_it_has_no_whole_gradient_and_applies_nothing() -> None:
    kept = a_kept()
    holdings = voted(kept, 6, held=6)
    before = holdings.state.clone()
    kept.settle(told(7))
    assert holdings.step == 6 and torch.equal(holdings.state, before)


def test_a_vote_that_nobody_saw_pass_is_forgotten() -> None:
    kept = a_kept()
    holdings = voted(kept, 7, held=6)
    kept.settle(told(6))
    assert holdings.step == 6 and kept.voted == 6, "no later settlement takes it for entered"


def test_an_update_is_applied_once_however_often_it_is_told() -> None:
    kept = a_kept()
    holdings = voted(kept, 7, held=7)
    before = holdings.state.clone()
    kept.settle(told(7))
    kept.apply(holdings, an_answer(7))
    assert holdings.step == 7 and torch.equal(holdings.state, before)


def test_memory_whose_update_was_cut_short_is_none() -> None:
    kept = a_kept()
    holdings = voted(kept, 7, held=6)
    holdings.torn = True
    kept.settle(told(7))
    assert kept.whole is None and holdings.step == 6


def test_memory_of_steps_that_are_rolled_back_is_gone() -> None:
    kept = a_kept()
    with pytest.raises(PeerLost):
        fill(kept, Transfer(holdings_of(OLD, DONOR), restore_with(), lost=range(3, 100)))
    voted(kept, 7, held=7)
    answer = Answer(step=Step(5), norm=1.0, losses=(1.0,), maxima=(2.0,))
    kept.settle(FromCheckpoint(checkpoint=CheckpointRef(step=Step(5), generation=Generation(1), path="/5", answer=answer)))
    assert kept.whole is None and kept.arrived() is None and kept.voted == 5
    assert kept.maxima == (2.0,), "as whoever read the same has them"


@pytest.mark.parametrize("gone", ["the folder", "all that is in it", "the manifest", "the server"])
def test_storage_that_is_away_is_not_taken_for_a_checkpoint_that_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gone: str
) -> None:
    """A disk that is not mounted leaves an empty folder, or none, and a server that is away its errors."""
    saves = Saves(tmp_path / "checkpoints", plan=OLD, profile=PROFILE)
    ref = saves.checkpoint(5)
    match gone:
        case "the manifest":
            (Path(ref.path) / "manifest.json").unlink()
        case "the server":
            stale = OSError(errno.ESTALE, "Stale file handle")
            monkeypatch.setattr(packs, "read_into", lambda *_: (_ for _ in ()).throw(stale))
        case _:
            shutil.rmtree(saves.root)
    if gone == "all that is in it":
        saves.root.mkdir()
    restore, kept = FromCheckpoint(checkpoint=ref), a_kept()
    kept.settle(restore)
    transfer = Transfer(holdings_of(OLD, DONOR), restore_with())
    with pytest.raises(NotRestored) as raised:
        kept.fill(cast(Any, transfer), buckets(NEW, PROFILE), restore, Unwatched())
    found = raised.value.finding
    assert isinstance(found, Unreadable) and found.is_away is (gone != "the manifest")
    assert kept.whole is None


torch.set_num_threads(1)
