"""A rank's tray and its host's custody of it: whole snapshots survive whoever made them, torn ones are nobody's."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch

from orchestrator.domain.errors import EverstepError
from orchestrator.domain.generation import Answer
from orchestrator.domain.ids import Device, Generation, JobId, NodeId, Step
from orchestrator.domain.layout import buckets
from orchestrator.domain.plan import Pipeline, Plan, Stage
from orchestrator.domain.profile import Line, Profile
from orchestrator.domain.requests import OpenHost
from tests.builders import a_profile, a_spec
from worker import faultpoints
from worker.checkpoint import dispatch
from worker.checkpoint.custody import Custody
from worker.checkpoint.handover import NotSaved
from worker.checkpoint.slot import SlotState, create_slot, read_slot
from worker.checkpoint.tray import Tray
from worker.child import Child
from worker.mail import HandedOver
from worker.parallel.group import Aborted
from worker.state.holdings import Holdings

CPU = torch.device("cpu")
ME = Device(NodeId("n0"), 0)
EVERY = 10
ANSWER = Answer(step=Step(7), norm=0.5, losses=(1.5, 2.5))


def a_share(width: int = 40, step: int = 7) -> Holdings:
    """Of one rank that owns everything, each element unlike the others."""
    lines = (
        Line(name="embedding", shape=(256, width), split=True, layers=(0,), decay=True),
        Line(name="norm", shape=(37,), split=False, layers=(0,), decay=False),
    )
    profile = Profile(num_layers=1, lines=lines, divisors=(), activation_bytes=0)
    plan = Plan(pipelines=(Pipeline(stages=(Stage(first=0, last=1, devices=(ME,)),), micro_batches=(0,)),))
    held = Holdings(buckets(plan, profile), plan.seats[0].rank, None, Generation(1), CPU)
    held.state.copy_(torch.arange(held.state.numel()).view_as(held.state))
    held.step = Step(step)
    return held


@contextmanager
def a_tray() -> Iterator[tuple[Tray, Custody, list[object]]]:
    custody, said = Custody(ME), []
    tray = Tray(tuple(map(os.dup, custody.fds)), ME, CPU, said.append, lambda generation: generation < 2)
    try:
        yield tray, custody, said
    finally:
        tray.close()
        custody.leave()


def states(custody: Custody) -> list[SlotState]:
    return [custody.slot(number).state for number in range(2)]


def in_a_child(do: Callable[[], None]) -> int:
    """Its exit code, negative for a signal."""
    pid = os.fork()
    if pid == 0:
        try:
            do()
        finally:
            os._exit(3)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_what_was_handed_over_is_read_as_it_was_whatever_happens_to_the_state_afterwards() -> None:
    held = a_share()
    wanted = held.state[:, : held.owned].clone()
    with a_tray() as (tray, custody, said):
        tray.lay_out(held)
        assert tray.is_ready(held, EVERY)
        tray.take(held, Generation(2), ANSWER)
        held.state.zero_()
        assert said == [HandedOver(generation=Generation(2), step=Step(7))]
        (place,) = custody.find()
        filled = read_slot(custody.fds[place])
        assert (filled.step, filled.generation, filled.answer) == (7, 2, ANSWER)
        assert filled.pieces == held.owned_pieces
        state = np.frombuffer(filled.state, dtype=np.float32).reshape(3, filled.width)
        assert torch.equal(torch.tensor(state), wanted)
        assert custody.find() == [], "found once"


def test_two_are_kept_and_there_is_no_room_for_a_third_until_one_is_settled() -> None:
    held = a_share()
    with a_tray() as (tray, custody, _):
        tray.lay_out(held)
        for step in (10, 20):
            held.step = Step(step)
            assert tray.is_ready(held, EVERY)
            tray.take(held, Generation(2), None)
        assert not tray.is_ready(held, EVERY)
        first, second = custody.find()
        assert [custody.slot(place).step for place in (first, second)] == [10, 20]
        custody.settle(first)
        assert tray.is_ready(held, EVERY) and read_slot(custody.fds[second]).answer is None


def test_a_full_slot_keeps_its_layout_until_it_is_written_and_the_free_one_has_the_new_one() -> None:
    small, large = a_share(40), a_share(400)
    with a_tray() as (tray, custody, _):
        tray.lay_out(small)
        tray.take(small, Generation(2), None)
        (place,) = custody.find()
        before = read_slot(custody.fds[place]).state.tobytes()
        tray.lay_out(large)
        tray.take(large, Generation(3), None)
        (other,) = custody.find()
        assert read_slot(custody.fds[place]).state.tobytes() == before
        assert read_slot(custody.fds[other]).pieces == large.owned_pieces
        sizes = [os.fstat(fd).st_size for fd in custody.fds]
        custody.settle(place)
        custody.settle(other)
        tray.lay_out(small)
        assert [os.fstat(fd).st_size for fd in custody.fds] == [min(sizes)] * 2, "what is not needed goes back"


@pytest.mark.parametrize(
    ("point", "state"),
    [
        ("before_snapshot", SlotState.FREE),
        ("in_snapshot", SlotState.FILLING),
        ("after_snapshot", SlotState.FULL),
    ],
)
def test_a_rank_killed_around_a_snapshot_leaves_a_whole_one_or_none(point: str, state: SlotState) -> None:
    held = a_share()
    with a_tray() as (tray, custody, said):
        tray.lay_out(held)

        def train() -> None:
            faultpoints.arm(lambda name: os.kill(os.getpid(), signal.SIGKILL) if name == point else None)
            tray.take(held, Generation(2), ANSWER)

        assert in_a_child(train) == -signal.SIGKILL
        assert states(custody)[0] is state and said == []
        found = custody.find()
        assert len(found) == (state is SlotState.FULL), "told or not: what is full is found, and nothing else"
        custody.leave()
        if found:
            assert np.frombuffer(read_slot(custody.fds[found[0]]).state, np.float32)[-1] == float(held.state[2, -1])
            custody.settle(found[0])
        assert not [fd for fd in custody.fds if Path(f"/proc/self/fd/{fd}").exists()], "nothing is kept for nobody"


def test_a_slot_that_holds_nothing_whole_is_not_read() -> None:
    fd = create_slot()
    with pytest.raises(EverstepError, match="holds no snapshot"):
        read_slot(fd)
    os.close(fd)


@pytest.mark.parametrize("why", ["", "No space left on device"])
def test_the_last_one_is_waited_for_until_it_is_written_or_told_why_not(why: str) -> None:
    held = a_share()
    moved: list[int] = []

    with a_tray() as (tray, custody, _):

        def settle() -> None:
            while not (found := custody.find()):
                time.sleep(0.001)
            for _ in range(20):
                time.sleep(0.005)
                custody.slot(found[0]).beat()
            custody.settle(found[0], why)

        host = threading.Thread(target=settle)
        host.start()
        with pytest.raises(NotSaved, match="No space left on device; free the disk") if why else nullcontext():
            tray.take_last(held, Generation(2), None, lambda: moved.append(1))
        host.join()
        assert moved, "whoever watches sees that the disk is at work"
        with pytest.raises(Aborted):  # generation 1 is closed: nobody wants to wait
            tray.take_last(held, Generation(1), None, lambda: None)


def test_the_first_slot_is_touched_beforehand_and_the_second_when_it_may_be_needed() -> None:
    held = a_share(4000)

    def pages(fd: int) -> int:
        return os.fstat(fd).st_blocks * 512

    with a_tray() as (tray, custody, _):
        tray.lay_out(held)
        touched(tray)
        num_bytes = 3 * held.owned * 4
        assert pages(custody.fds[0]) >= num_bytes > pages(custody.fds[1])
        tray.take(held, Generation(2), None)
        tray.copied()
        held.step = Step(held.step + 6)
        tray.is_ready(held, EVERY)
        tray.is_ready(held, 0)
        touched(tray)
        assert pages(custody.fds[1]) < num_bytes
        held.step = Step(held.step + 1)
        tray.is_ready(held, EVERY)
        touched(tray)
        assert pages(custody.fds[1]) >= num_bytes


def touched(tray: Tray) -> None:
    deadline = time.monotonic() + 20
    while tray.is_touching:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_large_share_is_copied_beside_what_is_computed_and_whole_before_it_may_change() -> None:
    held = a_share(4000)
    wanted = held.state[:, : held.owned].clone()
    with a_tray() as (tray, custody, said):
        tray.lay_out(held)
        for number in range(5):
            tray.take(held, Generation(2), None)
            assert custody.find() == [] and said == [], "nobody reads what is not whole"
            tray.copied()
            held.state.add_(1)
            (place,) = custody.find()
            state = np.frombuffer(read_slot(custody.fds[place]).state, dtype=np.float32).reshape(3, held.owned)
            assert torch.equal(torch.tensor(state), wanted + number)
            custody.settle(place)
            said.clear()


def test_what_waits_and_is_older_than_the_generation_before_is_given_up_and_what_is_in_hand_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody would accept it any more."""
    order = OpenHost(
        job=JobId("job-1"),
        node=ME.node,
        num_devices=1,
        spec=a_spec(),
        profile=a_profile(),
        checkpoint_dir=str(tmp_path),
        log_dir=str(tmp_path),
    )

    def start(*_: object) -> Child:
        """A saver that never answers."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        process = subprocess.Popen(["sleep", "600"], stdin=theirs)
        theirs.close()
        return Child(process, ours, os.pidfd_open(process.pid))

    monkeypatch.setattr(dispatch, "start", start)
    held, told = a_share(), list[object]()

    async def scenario() -> None:
        with a_tray() as (tray, custody, _):
            tray.lay_out(held)
            for step in (7, 8):
                held.step = Step(step)
                tray.take(held, Generation(2), None)
            at_it = dispatch.Dispatch(order, told.append)
            at_it.collect(custody)
            at_it.begin(Generation(3))
            assert [slot.step for _, slot in at_it.under_way()] == [7, 8]
            at_it.begin(Generation(4))
            assert [slot.step for _, slot in at_it.under_way()] == [7]
            assert states(custody) == [SlotState.FULL, SlotState.FREE] and custody.slot(1).why == "generation 4 has begun"
            await at_it.close()
            assert states(custody) == [SlotState.FREE] * 2 and told == []

    asyncio.run(scenario())
