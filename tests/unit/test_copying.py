"""Copies that last are told of with how far they are; what is soon over is not, and a generation that reads is let read."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from orchestrator.domain.copying import Copying
from orchestrator.domain.host_events import CopiesSeen, HostOpened
from orchestrator.domain.ids import Device, Generation, NodeId, Step
from orchestrator.supervisor.deadlines import deadlines
from tests.builders import Bench, a_spec
from tests.checkpoints import PROFILE, Saves
from worker.birth import Inherited
from worker.checkpoint.shard import ShardWriter
from worker.checkpoint.slot import Filler, Slot, create_slot, read_slot, table_of
from worker.checkpoint.snapshot import Snapshot
from worker.copies import EVERY_S, LONG_S, Copies
from worker.outbox import Outbox
from worker.page.writer import PageWriter
from worker.progress import Phase
from worker.seat import Seat, open_seat

ME = Device(NodeId("n0"), 0)


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[tuple[Seat, PageWriter]]:
    """A rank's seat, and the page as the rank would have it."""
    seat, fds = open_seat(1, ME, Generation(1), "127.0.0.1", tmp_path)
    seat.pid = os.getpid()
    writer = PageWriter(Inherited(*fds).page)
    for fd in fds:
        os.close(fd)
    yield seat, writer
    writer.close()
    seat.close()


def test_state_that_arrives_for_long_is_told_of_until_all_is_there(rank: tuple[Seat, PageWriter]) -> None:
    seat, page = rank
    copies, at = Copies(), {ME: seat}
    page.phase(Phase.RESTORE, Generation(2), Step(40))
    page.copying("restoring", 10, 100)
    assert copies.look(50.0, at, ()) is None, "it has just begun"
    assert copies.look(50.0 + LONG_S / 2, at, ()) is None
    page.copying("restoring", 60, 100)
    told = copies.look(50.0 + LONG_S, at, ())
    assert told is not None
    (one,) = told.copies
    assert (one.device, one.what, one.step, one.done_bytes, one.total_bytes) == (ME, "restoring", 40, 60, 100)
    assert one.seconds == LONG_S and one.bytes_per_s == 60 / LONG_S
    page.copying("receiving", 5, 100)
    assert copies.look(51.0 + LONG_S, at, ()) == CopiesSeen(copies=()), "that was another copy, and is over"
    assert copies.look(52.0 + LONG_S, at, ()) is None
    page.phase(Phase.COMPUTE, Generation(2), Step(41))
    assert seat.page.copying() is None, "who computes receives nothing"


def test_a_save_that_lasts_is_told_of_and_what_waits_behind_it(tmp_path: Path) -> None:
    fd = create_slot()
    seat = Saves(tmp_path).plan.seats[0]
    snapshot = Saves(tmp_path).snapshot(seat, 7, 1)
    filler = Filler(fd)
    width = snapshot.state.shape[1]
    memory = filler.lay_out(table_of(snapshot.pieces), width)
    np.frombuffer(memory, dtype=np.float32)[:] = snapshot.state.reshape(-1)
    filler.begin(Step(7), Generation(1), None)
    filler.finish()
    total = 3 * width * 4
    slot, copies, seen = Slot(fd), Copies(), []
    assert copies.look(1.0, {}, [(ME, slot)]) is None and slot.written == (0, total)
    filled = read_slot(fd)

    def tell(done: int) -> None:
        filled.tell(done)
        if told := copies.look(1.0 + LONG_S, {}, [(ME, slot)]):
            seen.extend(told.copies)

    state = np.frombuffer(filled.state, dtype=np.float32).reshape(3, width)
    again = Snapshot(step=filled.step, answer=None, generation=filled.generation, pieces=filled.pieces, state=state)
    ShardWriter(tmp_path, PROFILE, ME).write(again, progress=tell)
    done = [one.done_bytes for one in seen]
    assert done == sorted(done) and len(set(done)) == len(done) > 3 and slot.written == (total, total)
    assert {(one.what, one.step, one.total_bytes) for one in seen} == {("saving", 7, total)}
    assert copies.look(1.0 + LONG_S + EVERY_S, {}, ()) == CopiesSeen(copies=())
    slot.close()
    os.close(fd)


def test_only_the_latest_of_what_nobody_has_fetched_is_told() -> None:

    async def scenario() -> None:
        outbox = Outbox()
        outbox.add_latest(CopiesSeen(copies=(a_copy(1),)))
        outbox.add(HostOpened(seconds=1.0))
        outbox.add_latest(CopiesSeen(copies=(a_copy(2),)))
        first = await outbox.fetch(0, 0.0)
        assert [envelope.event for envelope in first] == [CopiesSeen(copies=(a_copy(2),)), HostOpened(seconds=1.0)]
        outbox.add_latest(CopiesSeen(copies=()))
        assert [envelope.number for envelope in await outbox.fetch(2, 0.0)] == [3], "what was delivered stays as it was"

    asyncio.run(scenario())


def a_copy(done: int, what: str = "restoring", device: Device = ME) -> Copying:
    return Copying(device=device, what=what, step=Step(40), done_bytes=done, total_bytes=100, seconds=2.0)  # type: ignore[arg-type]


def test_a_job_shows_what_each_host_told_last_and_says_once_that_it_lasts() -> None:
    bench = Bench(spec=a_spec(tp=2)).running()
    node, other = bench.plan.nodes[:2]
    bench.said(node, CopiesSeen(copies=(a_copy(10, "saving"),)))
    bench.said(other, CopiesSeen(copies=(a_copy(5, "saving"),)))
    bench.said(node, CopiesSeen(copies=(a_copy(60, "saving"),)))
    assert {at: copies[0].done_bytes for at, copies in bench.record.copies.items()} == {node: 60, other: 5}
    assert [entry.message for entry in bench.history if entry.type == "copying"] == [
        f"saving step 40 takes a while: 0 of 0 MB on {node} in 2 s"
    ]
    bench.said(node, CopiesSeen(copies=()))
    assert set(bench.record.copies) == {other}
    bench.host_gone(other)
    assert not bench.record.copies, "nobody would say that it has ended"


def test_a_generation_that_forms_is_given_time_for_as_long_as_state_arrives() -> None:
    bench = Bench(spec=a_spec(tp=2)).submitted().probed().planned().opened().prepared()
    node = bench.plan.nodes[0]
    (before,) = deadlines(bench.record)
    bench.said(node, CopiesSeen(copies=(a_copy(10),)))
    (reading,) = deadlines(bench.record)
    bench.said(node, CopiesSeen(copies=(a_copy(10),)))
    assert set(deadlines(bench.record)) == {reading} != {before}, "nothing has moved: the time runs on"
    bench.said(node, CopiesSeen(copies=(a_copy(20),)))
    assert reading not in deadlines(bench.record)
    bench.said(node, CopiesSeen(copies=(a_copy(20), a_copy(7, "saving"))))
    assert set(deadlines(bench.record)) == {f"{before}:20"}, "what is being saved is no sign of restoring"
