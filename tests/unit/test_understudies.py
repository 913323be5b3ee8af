"""Who stands by for a rank: one at a time, only for whom it is wanted, and not for ever where they keep ending."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.domain.ids import Device, Generation, NodeId
from worker.logs import tail
from worker.seat import Seat, open_seat
from worker.understudies import MAX_LOST, PATIENCE_S, Understudies

A, B = Device(NodeId("n0"), 0), Device(NodeId("n0"), 1)


class Forks:
    """Seats without a process behind them."""

    def __init__(self, folder: Path) -> None:
        self.seats: list[Seat] = []
        self._folder = folder

    def fork(self, device: Device) -> Seat:
        seat, fds = open_seat(1 + len(self.seats), device, Generation(0), "127.0.0.1", self._folder, is_understudy=True)
        for fd in fds:
            os.close(fd)
        seat.pid = 100 + len(self.seats)
        self.seats.append(seat)
        return seat


@pytest.fixture
def forks(tmp_path: Path) -> Iterator[Forks]:
    made = Forks(tmp_path)
    yield made
    for seat in made.seats:
        seat.close()


def test_another_is_forked_once_the_one_before_stands_by(forks: Forks) -> None:
    understudies = Understudies(forks.fork)
    understudies.keep([A, B])
    understudies.keep([A, B])
    assert [seat.device for seat in forks.seats] == [A] and not understudies.ready
    forks.seats[0].stands_by = True
    understudies.keep([A, B])
    assert [seat.device for seat in forks.seats] == [A, B] and understudies.ready == {A: 100}


def test_only_who_stands_by_takes_over_and_then_it_is_none_any_more(forks: Forks) -> None:
    understudies = Understudies(forks.fork)
    understudies.keep([A])
    assert understudies.take(A, Generation(7)) is None
    forks.seats[0].stands_by = True
    taken = understudies.take(A, Generation(7))
    assert taken is forks.seats[0] and (taken.born, taken.is_understudy, taken.stands_by) == (7, False, False)
    assert understudies.take(A, Generation(8)) is None


def test_who_is_not_wanted_any_more_is_ended_and_counts_as_no_loss(forks: Forks) -> None:
    understudies = Understudies(forks.fork)
    for device in (A, B) * MAX_LOST:
        understudies.keep([device])
        forks.seats[-1].stands_by = True
    *before, last = forks.seats
    assert all(seat.doomed for seat in before) and not last.doomed
    for seat in before:
        understudies.lose(seat)
    understudies.keep([A])
    assert forks.seats[-1].device == A and not forks.seats[-1].doomed


def test_a_long_log_is_turned_over_under_nobody_who_lives_and_the_successor_writes_to_the_one_that_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.logs.MAX_LOG_BYTES", 64)
    path = tmp_path / "n0-0.log"
    path.write_text("long ago\n" * 20)
    seat, (*others, log, one, two) = open_seat(1, A, Generation(0), "127.0.0.1", tmp_path, is_understudy=True)
    assert path.stat().st_size == 180, "its rank may be writing"
    seat.take_over(Generation(2))
    os.write(log, b"an error\n")
    assert tail(path, since=seat.log_start) == ("an error",)
    assert path.with_name("n0-0.log.1").read_text().endswith("long ago\n") and path.stat().st_size == 9
    for fd in (*others, log, one, two):
        os.close(fd)
    seat.close()


def test_one_that_does_not_get_ready_is_ended_and_makes_way(forks: Forks, monkeypatch: pytest.MonkeyPatch) -> None:
    understudies = Understudies(forks.fork)
    understudies.keep([A, B])
    late = time.monotonic() + PATIENCE_S + 1
    monkeypatch.setattr("worker.understudies.time.monotonic", lambda: late)
    understudies.keep([A, B])
    assert not forks.seats[0].is_living and len(forks.seats) == 1
    understudies.lose(forks.seats[0])
    understudies.keep([B])
    assert [seat.device for seat in forks.seats] == [A, B]


def test_where_they_keep_ending_no_more_are_forked(forks: Forks) -> None:
    understudies = Understudies(forks.fork)
    for _ in range(MAX_LOST + 3):
        understudies.keep([A])
        understudies.lose(forks.seats[-1])
    assert len(forks.seats) == MAX_LOST
