"""A host's events arrive in order, once recorded never again, and a step's votes never after what followed them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import wraps

from orchestrator.domain.generation import Answer, RankReport
from orchestrator.domain.host_events import Envelope, HostOpened, RankExited, RankFinished, StepsPassed
from orchestrator.domain.ids import Device, Generation, NodeId, Step
from worker.outbox import MAX_ANSWERS, Outbox

DEVICE = Device(NodeId("n0"), 0)


def on_a_loop(test: Callable[[], Coroutine[None, None, None]]) -> Callable[[], None]:
    @wraps(test)
    def run() -> None:
        asyncio.run(test())

    return run


def passed(outbox: Outbox, generation: int, *steps: int) -> None:
    for step in steps:
        outbox.add_passed(Generation(generation), Answer(step=Step(step), norm=1.0, losses=(2.0,)), 1000.0 + step)


def finished(step: int) -> RankFinished:
    return RankFinished(device=DEVICE, generation=Generation(1), step=Step(step))


def told(batch: tuple[Envelope, ...]) -> list[object]:
    return [
        [int(answer.step) for answer in envelope.event.answers]
        if isinstance(envelope.event, StepsPassed)
        else type(envelope.event).__name__
        for envelope in batch
    ]


@on_a_loop
async def test_an_urgent_event_wakes_a_waiting_fetch_at_once() -> None:
    outbox = Outbox()
    waiting = asyncio.ensure_future(outbox.fetch(0, 600.0))
    await asyncio.sleep(0)
    outbox.add(HostOpened(seconds=1.0))
    assert told(await waiting) == ["HostOpened"]


@on_a_loop
async def test_a_fetch_with_nothing_to_tell_returns_in_time() -> None:
    assert await Outbox().fetch(0, 0.05) == ()


@on_a_loop
async def test_events_are_sent_again_until_acknowledged_and_numbers_grow_by_one() -> None:
    outbox = Outbox()
    for step in (1, 2, 3):
        outbox.add(finished(step))
    first = await outbox.fetch(0, 0)
    assert [envelope.number for envelope in first] == [1, 2, 3]
    assert await outbox.fetch(0, 0) == first
    assert [envelope.number for envelope in await outbox.fetch(2, 0)] == [3]
    assert await outbox.fetch(3, 0) == ()
    assert [envelope.number for envelope in await outbox.fetch(0, 0)] == []


@on_a_loop
async def test_passed_steps_wait_for_the_flush_and_travel_together() -> None:
    outbox = Outbox()
    passed(outbox, 1, 1, 2, 3)
    assert await outbox.fetch(0, 0) == ()
    assert told(await outbox.fetch(0, 600.0)) == [[1, 2, 3]]


@on_a_loop
async def test_passed_steps_precede_the_urgent_event_that_followed_them() -> None:
    outbox = Outbox()
    passed(outbox, 1, 1, 2)
    outbox.add(finished(2))
    passed(outbox, 2, 3)
    outbox.add(finished(3))
    assert told(await outbox.fetch(0, 0)) == [[1, 2], "RankFinished", [3], "RankFinished"]


@on_a_loop
async def test_a_step_is_told_once_per_generation_even_when_rolled_back() -> None:
    outbox = Outbox()
    passed(outbox, 1, 5, 5, 6, 5, 6)
    passed(outbox, 2, 4, 4, 5)
    outbox.add(finished(5))
    assert told(await outbox.fetch(0, 0)) == [[5, 6], [4, 5], "RankFinished"]


@on_a_loop
async def test_a_delivered_event_never_changes_and_an_undelivered_one_absorbs_what_follows() -> None:
    outbox = Outbox()
    passed(outbox, 1, 1)
    outbox.close()
    assert told(await outbox.fetch(0, 0)) == [[1]]
    for step in (2, 3):
        passed(outbox, 1, step)
        outbox.close()
    assert told(await outbox.fetch(0, 0)) == [[1], [2, 3]]


@on_a_loop
async def test_what_was_read_and_not_recorded_is_told_to_whoever_comes_next() -> None:
    """A supervisor reads on while it records, and may end before it has."""
    outbox = Outbox()
    for step in (1, 2, 3):
        outbox.add(finished(step))
    assert len(await outbox.fetch(0, 0, acked=0)) == 3
    assert await outbox.fetch(3, 0, acked=1) == ()
    assert [envelope.number for envelope in await outbox.fetch(0, 0, acked=1)] == [2, 3]


@on_a_loop
async def test_an_absent_supervisor_costs_bounded_memory() -> None:
    outbox = Outbox()
    for chunk in range(0, MAX_ANSWERS + 5000, 5000):
        passed(outbox, 1, *range(chunk + 1, chunk + 5001))
        outbox.close()
    (envelope,) = await outbox.fetch(0, 0)
    assert isinstance(envelope.event, StepsPassed)
    assert len(envelope.event.answers) == MAX_ANSWERS
    assert envelope.event.answers[-1].step == MAX_ANSWERS + 5000


@on_a_loop
async def test_an_exit_says_how_long_ago_it_was_when_it_is_delivered() -> None:
    outbox = Outbox()
    report = RankReport(device=DEVICE, generation=Generation(1), voted=Step(0), answer=None, held=None)
    outbox.add(RankExited(device=DEVICE, pid=7, exit_code=-9, report=report))
    await asyncio.sleep(0.05)
    (envelope,) = await outbox.fetch(0, 0)
    assert isinstance(envelope.event, RankExited)
    assert envelope.event.seconds_ago >= 0.05


@on_a_loop
async def test_what_says_little_alone_waits_for_company_but_not_long() -> None:
    outbox = Outbox()
    waiting = asyncio.ensure_future(outbox.fetch(0, 600.0))
    await asyncio.sleep(0)
    outbox.add(finished(1), gathering=True)
    await asyncio.sleep(0)
    assert not waiting.done()
    outbox.add(HostOpened(seconds=1.0))
    assert told(await waiting) == ["RankFinished", "HostOpened"]
    waiting = asyncio.ensure_future(outbox.fetch(2, 600.0))
    await asyncio.sleep(0)
    outbox.add(finished(2), gathering=True)
    assert told(await waiting) == ["RankFinished"]


@on_a_loop
async def test_passed_steps_leave_at_the_next_tick_of_the_wall_clock_and_the_first_of_a_generation_before_it() -> None:
    outbox = Outbox()
    outbox.tick(1000.25)
    passed(outbox, 1, 1)
    assert told(await outbox.fetch(0, 600.0)) == [[1]]
    passed(outbox, 1, 2)
    outbox.tick(1000.45)
    assert await outbox.fetch(1, 0) == ()
    passed(outbox, 1, 3)
    outbox.tick(1000.5)
    assert told(await outbox.fetch(1, 0)) == [[2, 3]]
