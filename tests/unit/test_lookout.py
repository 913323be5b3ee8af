"""A host's eyes belong to one generation: whoever was told to form it is seen, and nothing of the one before counts."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from orchestrator.domain.ids import Device, Generation, NodeId, Step
from worker.lookout import Lookout
from worker.page.layout import create_page
from worker.page.reader import PageReader
from worker.page.writer import PageWriter
from worker.progress import Phase

ME = Device(NodeId("n0"), 0)


@dataclass
class Rank:
    """As much of a seat as is looked at; the process is this one."""

    writer: PageWriter
    page: PageReader
    formed: Generation = Generation(1)
    pid: int = os.getpid()
    is_living: bool = True
    is_forked: bool = True


@pytest.fixture
def rank() -> Iterator[Rank]:
    fd = create_page()
    made = Rank(PageWriter(fd), PageReader(fd))
    os.close(fd)
    yield made
    made.writer.close()
    made.page.close()


def test_what_was_seen_goes_with_the_generation(rank: Rank) -> None:
    lookout, at = Lookout(tells_waits=True), {ME: rank}
    lookout.begin(Generation(1))
    rank.writer.phase(Phase.COMPUTE, Generation(1), Step(5))
    lookout.look(at)  # type: ignore[arg-type]
    time.sleep(0.2)
    lookout.look(at)  # type: ignore[arg-type]
    assert lookout._watch.sees_stillness
    lookout.begin(Generation(2))
    assert not lookout.sights(at), "it has not been told to form this one"  # type: ignore[arg-type]
    rank.formed = Generation(2)
    lookout.look(at)  # type: ignore[arg-type]
    (sight,) = lookout.sights(at)  # type: ignore[arg-type]
    assert sight.still_s == 0.0 and not lookout._watch.sees_stillness


def test_where_devices_wait_for_each_other_a_rank_that_has_been_slow_for_long_is_seen_to_wait(rank: Rank) -> None:
    lookout, at = Lookout(tells_waits=False, waits_inside=True), {ME: rank}
    lookout.begin(Generation(1))
    rank.writer.phase(Phase.COMPUTE, Generation(1), Step(5))
    rank.writer.behind(True)
    lookout.look(at)  # type: ignore[arg-type]
    (sight,) = lookout.sights(at)  # type: ignore[arg-type]
    assert not sight.in_wait and not sight.is_guilty
