"""Links that are bad on purpose: cut ones carry nothing until the time is up, slow ones rest after each burst."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from orchestrator.domain.ids import Generation, Rank
from worker.parallel.links import Links
from worker.parallel.process_group import LinksProcessGroup
from worker.parallel.sabotage import BadLink

A, B = Rank(0), Rank(1)


class Line:
    def __init__(self) -> None:
        self.moved = 0
        self.resting = False

    def rest(self, resting: bool) -> None:
        self.resting = resting


def test_a_cut_line_rests_until_the_end_and_others_do_not() -> None:
    lines = {A: Line(), B: Line()}
    cut = BadLink(peers=frozenset({B}), until=time.monotonic() + 60)
    assert 59 < cut.apply(lines, -1.0) <= 60
    assert (lines[A].resting, lines[B].resting) == (False, True)
    cut.until = time.monotonic()
    assert cut.apply(lines, -1.0) == -1.0 and cut.is_over(time.monotonic())
    assert not lines[B].resting


def test_a_slow_line_rests_for_as_long_as_its_bytes_take() -> None:
    lines = {B: Line()}
    slow = BadLink(peers=frozenset({B}), until=time.monotonic() + 60, bytes_per_s=1000.0)
    slow.apply(lines, -1.0)
    assert not lines[B].resting
    lines[B].moved += 20_000
    assert 19 < slow.apply(lines, -1.0) <= 20
    assert lines[B].resting
    assert slow.apply(lines, 0.5) == 0.5


@pytest.fixture
def pair() -> Iterator[tuple[Links, Links]]:
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    addresses = {Rank(r): f"127.0.0.1:{listeners[r].getsockname()[1]}" for r in range(2)}
    made = [Links(Rank(r)) for r in range(2)]

    def form(r: int) -> None:
        made[r].form(
            generation=Generation(1), cookie=b"x" * 16, listener=listeners[r], addresses=addresses,
            peers=[Rank(1 - r)], timeout_s=10,
        )  # fmt: skip

    _both(lambda: form(0), lambda: form(1))
    yield made[0], made[1]
    for one in (*made, *listeners):
        one.close()


@pytest.mark.parametrize("bytes_per_s", [0.0, 4_000_000.0], ids=["cut", "slow"])
def test_what_is_sent_over_a_bad_link_arrives_whole_and_late(pair: tuple[Links, Links], bytes_per_s: float) -> None:
    tensors = [torch.full((100_000,), float(r + 1)) for r in range(2)]
    groups = [LinksProcessGroup(pair[r], label="two", channel=1, members=(A, B), index=r) for r in range(2)]
    began = time.monotonic()
    pair[0].bad_link = BadLink(peers=frozenset({B}), until=began + 0.4, bytes_per_s=bytes_per_s)

    def work(r: int) -> None:
        for _ in range(4):
            groups[r].allreduce([tensors[r]]).wait()

    _both(lambda: work(0), lambda: work(1))
    # Each moves 0.8 MB, which takes 0.2 s at this rate and is paid for by the next; nothing moves through the cut.
    assert time.monotonic() - began >= 0.35
    assert all(torch.equal(tensor, torch.full((100_000,), 24.0)) for tensor in tensors)
    assert pair[0].bad_link is None


def _both(*jobs: object) -> None:
    threads = [threading.Thread(target=job) for job in jobs]  # type: ignore[arg-type]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
