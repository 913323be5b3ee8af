"""Whose report a rank's end is: the generation that it trains owes one, until it has reported by itself."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.domain.generation import Answer
from orchestrator.domain.ids import Device, Generation, NodeId, Step
from worker.page.writer import PageWriter
from worker.progress import Phase
from worker.seat import Seat, open_seat

DEVICE = Device(NodeId("n0"), 0)
ANSWER = Answer(step=Step(8), norm=1.0, losses=(2.0,))


@pytest.fixture
def seat(tmp_path: Path) -> Iterator[Seat]:
    """Of a rank that saw step 8 of generation 4 pass; it has been promised to generation 5 already."""
    made, fds = open_seat(1, DEVICE, Generation(4), "127.0.0.1", tmp_path)
    rank = PageWriter(fds[3])
    rank.phase(Phase.UPDATE, Generation(4), Step(8))
    rank.voted(Step(8))
    rank.passed(ANSWER)
    rank.close()
    made.formed, made.prepared = Generation(4), Generation(5)
    for fd in fds:
        os.close(fd)
    yield made
    made.close()


def test_who_dies_before_it_has_reported_speaks_for_the_generation_it_trained(seat: Seat) -> None:
    report = seat.last_report("killed")
    assert (report.generation, report.voted, report.answer, report.held) == (4, 8, ANSWER, None)


def test_who_dies_after_that_says_nothing_about_it_again(seat: Seat) -> None:
    seat.reported = Generation(4)
    report = seat.last_report("killed")
    assert (report.generation, report.voted, report.answer) == (5, 0, None)
