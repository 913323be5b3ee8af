"""A newcomer is given state over real sockets while its source trains on: same bits, no waiting, every way to break."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.domain.generation import Answer
from orchestrator.domain.host_events import JoinerAt, JoinFailed
from orchestrator.domain.ids import Device, Generation, NodeId, Rank, Step
from orchestrator.domain.layout import Move, buckets, layout
from orchestrator.domain.plan import Pipeline, Plan, Stage
from orchestrator.domain.profile import Line, Profile
from orchestrator.domain.requests import BeginJoin
from orchestrator.domain.spec import TrainSpec
from worker.feeding import Feeder
from worker.joining import Joining
from worker.parallel.optimizer import adamw
from worker.state.holdings import Holdings

pytestmark = pytest.mark.timeout(120)
TRAIN = TrainSpec(steps=1000, micro_batches=1, micro_batch_size=1, sequence=8)
PROFILE = Profile(
    num_layers=2,
    lines=(
        Line(name="w0", shape=(128, 64), split=True, layers=(0,), decay=True),
        Line(name="w1", shape=(128, 64), split=True, layers=(1,), decay=True),
        Line(name="norm", shape=(100,), split=False, layers=(1,), decay=False),
    ),
    divisors=(),
    activation_bytes=0,
)
OLD, NEW = (Device(NodeId(name), 0) for name in ("old", "new"))
COOKIE = b"0123456789abcdef"
CHUNK = 512


def a_plan(*devices: Device) -> Plan:
    """Each device a pipeline of one stage."""
    stages = (Stage(first=0, last=2, devices=(device,)) for device in devices)
    return Plan(pipelines=tuple(Pipeline(stages=(stage,), micro_batches=(i,)) for i, stage in enumerate(stages)))


ALONE, BOTH = a_plan(OLD), a_plan(OLD, NEW)


def holdings_of(plan: Plan, rank: int, mirrored: int | None) -> Holdings:
    other = None if mirrored is None else Rank(mirrored)
    return Holdings(buckets(plan, PROFILE), Rank(rank), other, Generation(1), torch.device("cpu"))


@dataclass
class Pair:
    """A member that steps when told to, and a newcomer that receives from it, in one process."""

    queue_bytes: int = 64 << 20
    queue_steps: int = 256
    rate: float = 0.0
    call_s: float = 10.0
    said: list[JoinerAt | JoinFailed] = field(default_factory=list)
    slowest: float = 0.0
    step: int = 0

    def __post_init__(self) -> None:
        self.lock = threading.Lock()
        self.held = holdings_of(ALONE, 0, None)
        self.held.state.normal_()
        self.held.state[2].abs_()
        self.listener = socket.create_server(("127.0.0.1", 0))
        wanted = layout(BOTH, PROFILE, mirrors=1).held(NEW)
        self.begin = BeginJoin(
            generation=Generation(2),
            of=Generation(1),
            plan=BOTH,
            moves=tuple(Move(interval, OLD, NEW) for interval in wanted),
            addresses={NEW: f"127.0.0.1:{self.listener.getsockname()[1]}"},
        )
        self.joining = Joining(
            begin=self.begin,
            me=NEW,
            train=TRAIN,
            holdings=holdings_of(BOTH, 1, 0),
            listener=self.listener,
            cookie=COOKIE,
            say=self.said.append,
            chunk=CHUNK,
            call_s=self.call_s,
        )
        self.result: list[Holdings | None] = []
        self.newcomer = threading.Thread(target=lambda: self.result.append(self.joining.run()))
        self.newcomer.start()
        self.feeder = self.feed(self.begin)

    def feed(self, begin: BeginJoin, address: str | None = None) -> Feeder:
        feeder = Feeder(
            held=self.held,
            lock=self.lock,
            me=OLD,
            join=begin.generation,
            attempt=begin.attempt,
            cookie=COOKIE,
            address=address or begin.addresses[NEW],
            intervals=[move.interval for move in begin.moves],
            rate=self.rate,
            queue_bytes=self.queue_bytes,
            queue_steps=self.queue_steps,
            chunk=CHUNK,
        )
        feeder.start()
        return feeder

    def train(self, *, last: bool = False) -> None:
        """One step: what a trainer does to its holdings between vote and gather."""
        self.step += 1
        self.held.gradient.normal_()
        answer = Answer(step=Step(self.step), norm=1.5, losses=(1.0,))
        began = time.perf_counter()
        with self.lock:
            self.held.torn = True
            adamw(TRAIN, answer, self.held.state, self.held.gradient, self.held.decayed)
            self.held.step, self.held.torn = Step(self.step), False
            self.feeder.applied(answer)
            if last:
                self.feeder.end(Step(self.step))
        self.slowest = max(self.slowest, time.perf_counter() - began)

    def train_until(self, enough: Callable[[], bool], pause_s: float = 0.002) -> None:
        deadline = time.monotonic() + 60
        while not enough():
            assert time.monotonic() < deadline, self.said
            self.train()
            time.sleep(pause_s)

    def finish(self, *, in_time: bool = True) -> Holdings | None:
        """in_time: the newcomer is given all the time it needs for the last step."""
        self.train(last=True)
        if in_time:
            wait_until(lambda: self.joining.is_told)
        assert self.newcomer.is_alive(), "it reports when it is told to, and not before those it trains for"
        self.joining.end()
        self.newcomer.join(30)
        assert not self.newcomer.is_alive()
        return self.result[0]

    def close(self) -> None:
        self.joining.abort()
        self.feeder.stop()
        self.newcomer.join(10)
        self.listener.close()

    def assert_has_the_bits(self, found: Holdings | None) -> None:
        """Whatever the newcomer says it has is what the source has; and that is all of it."""
        assert found is not None and found.step == self.step and found.arrived is not None
        for interval in layout(BOTH, PROFILE, mirrors=1).held(NEW):
            assert found.covers(interval)
            theirs, mine = torch.cat(self.held.views(interval), 1), torch.cat(found.views(interval), 1)
            assert torch.equal(theirs, mine)


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@contextlib.contextmanager
def a_pair(**settings: Any) -> Iterator[Pair]:
    pair = Pair(**settings)
    try:
        yield pair
    finally:
        pair.close()


def test_newcomer_has_its_sources_bits_after_any_number_of_steps() -> None:
    with a_pair() as pair:
        pair.train_until(lambda: bool(pair.said) and pair.step > 50)
        assert pair.said == [JoinerAt(device=NEW, generation=Generation(2), step=pair.said[0].step)]  # type: ignore[union-attr]
        pair.assert_has_the_bits(pair.finish())


def test_slow_copy_is_kept_current_while_it_goes_on_and_slows_no_step() -> None:
    """About 400 kB at 0.4 MB/s: half of it goes while 40 kB of gradients a step have to go, too."""
    with a_pair(rate=400_000.0) as pair:
        began = time.monotonic()
        pair.train_until(lambda: bool(pair.said), pause_s=0.4)
        took = time.monotonic() - began
        assert isinstance(pair.said[0], JoinerAt) and took > 0.9
        assert pair.slowest < took / 2, "a step that waited for the copy would take as long as it"
        pair.assert_has_the_bits(pair.finish())


def test_training_never_waits_for_a_newcomer_that_reads_nothing_and_keeps_little_for_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf, a_pair() as pair:
        pair.feeder.stop()
        pair.queue_bytes = 1
        pair.feeder = pair.feed(pair.begin, f"127.0.0.1:{deaf.getsockname()[1]}")
        for _ in range(150):
            pair.train()
        assert pair.slowest < 5.0, "what is never read would be waited for until somebody gives up"
        assert pair.feeder._queued <= pair.feeder._bound < 10 * pair.held.gradient.nbytes
        began = time.monotonic()
        pair.feeder.stop()
        assert time.monotonic() - began < 5.0


def test_queue_that_overflows_is_started_over_and_the_copy_comes_out_right() -> None:
    with a_pair(rate=200_000.0, queue_steps=5) as pair:
        pair.train_until(lambda: pair.feeder._tries > 1, pause_s=0.002)
        assert not pair.said
        pair.train_until(lambda: bool(pair.said), pause_s=0.6)
        assert isinstance(pair.said[0], JoinerAt)
        pair.assert_has_the_bits(pair.finish())


def test_newcomer_too_slow_for_the_news_is_given_up_in_the_end() -> None:
    with a_pair(rate=100_000.0, queue_steps=5) as pair:
        pair.train_until(lambda: bool(pair.said), pause_s=0.02)
        (failed,) = pair.said
        assert isinstance(failed, JoinFailed) and "slower than training" in failed.message


def test_lost_source_is_told_and_what_another_gives_instead_is_taken() -> None:
    with a_pair(rate=100_000.0) as pair:
        wait_until(lambda: pair.feeder._given > 0)  # it has said who it is
        pair.train()
        pair.feeder.stop()
        wait_until(lambda: bool(pair.said))
        (failed,) = pair.said
        assert isinstance(failed, JoinFailed) and (failed.source, failed.attempt) == (OLD, 0)
        pair.said.clear()
        pair.rate = 0.0
        again = BeginJoin(
            generation=Generation(2),
            of=Generation(1),
            plan=BOTH,
            moves=pair.begin.moves,
            addresses=pair.begin.addresses,
            attempt=1,
        )
        pair.joining.expect(again)
        pair.feeder = pair.feed(again)
        pair.train_until(lambda: bool(pair.said))
        pair.assert_has_the_bits(pair.finish())


def test_source_that_never_calls_is_told_as_lost() -> None:
    """A link that is broken one way: its source gives up calling, and cannot say so."""
    with a_pair(call_s=0.2) as pair:
        pair.train_until(lambda: bool(pair.said))
        pair.said.clear()
        pair.joining.expect(replace(pair.begin, attempt=1))
        wait_until(lambda: bool(pair.said))
        (failed,) = pair.said
        assert isinstance(failed, JoinFailed) and (failed.source, failed.attempt) == (OLD, 1)
        assert "has not called within 0.2 s" in failed.message


def test_strangers_and_aborts_leave_nothing_behind() -> None:
    threads = threading.active_count()
    with a_pair() as pair:
        address = ("127.0.0.1", pair.listener.getsockname()[1])
        with socket.create_connection(address) as silent, socket.create_connection(address) as rude:
            rude.sendall(b"GET / HTTP/1.0\r\n\r\n" * 4)
            time.sleep(0.05)
            pair.joining.abort()
            pair.newcomer.join(30)
            assert not pair.newcomer.is_alive() and pair.result == [None]
            assert silent.fileno() >= 0
    wait_until(lambda: threading.active_count() <= threads)


def test_only_what_is_of_the_last_step_counts_when_patience_ends() -> None:
    """Nothing is kept of a copy that is far behind but what came after the last step, in the moment until it ends."""
    with a_pair(rate=20_000.0) as pair:  # of the 49 kB that an interval takes at least
        for _ in range(5):
            pair.train()
            time.sleep(0.1)
        found = pair.finish(in_time=False)
        for interval in layout(BOTH, PROFILE, mirrors=1).held(NEW):
            if found is not None and found.covers(interval):
                assert found.step == pair.step
                assert torch.equal(torch.cat(pair.held.views(interval), 1), torch.cat(found.views(interval), 1))


@settings(max_examples=8, deadline=None)
@given(st.lists(st.sampled_from([0.0, 0.001, 0.01]), min_size=3, max_size=25), st.sampled_from([0.0, 2e6]))
def test_however_steps_and_chunks_interleave_whatever_arrived_is_right(pauses: list[float], rate: float) -> None:
    with a_pair(rate=rate) as pair:
        for pause in pauses:
            pair.train()
            time.sleep(pause)
        found = pair.finish(in_time=False)
        if found is not None:
            assert found.step == pair.step and found.arrived is not None
            for intervals in found.arrived.values():
                for interval in intervals:
                    assert torch.equal(torch.cat(pair.held.views(interval), 1), torch.cat(found.views(interval), 1))
