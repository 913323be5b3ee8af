"""Frames between a host and a rank arrive whole and in order, and a side that reads nothing delays nobody."""

from __future__ import annotations

import os
import socket

import pytest

from orchestrator.domain.generation import Answer
from orchestrator.domain.host_events import RankReady
from orchestrator.domain.ids import Device, Generation, NodeId, Step
from orchestrator.domain.requests import CloseGeneration
from worker.mail import Channel, Passed, Raised, order_frame, passed_frame, read_order, read_said, said_frame

DEVICE = Device(NodeId("n0"), 0)


def a_pair() -> tuple[Channel, Channel]:
    ours, theirs = socket.socketpair()
    return Channel(ours), Channel(theirs)


def test_everything_a_rank_says_comes_back_as_said() -> None:
    host, rank = a_pair()
    ready = RankReady(device=DEVICE, generation=Generation(2), phases={"form": 0.25})
    answer = Answer(step=Step(7), norm=0.1, losses=(1.5, 2.5), maxima=(0.1, 1e-30, 3.0))
    vote = Passed(generation=Generation(2), answer=answer, at=1790000000.123456, computed_s=0.1)
    raised = Raised(message="ValueError: no")
    rank.post(said_frame(ready))
    rank.post(passed_frame(vote))
    rank.post(said_frame(raised))
    frames, is_open = host.receive()
    assert [read_said(kind, body) for kind, body in frames] == [ready, vote, raised]
    assert is_open
    rank.close()
    assert host.receive() == ([], False)
    host.close()


def test_orders_queue_behind_a_rank_that_reads_nothing_and_arrive_whole() -> None:
    host, rank = a_pair()
    count = 50_000
    for number in range(count):
        host.post(order_frame(CloseGeneration(generation=Generation(number))))
    assert host.is_backed_up
    seen: list[int] = []
    while len(seen) < count:
        frames, _ = rank.receive()
        for kind, body in frames:
            order = read_order(kind, body)
            assert isinstance(order, CloseGeneration)
            seen.append(order.generation)
        host.flush()
    assert seen == list(range(count))
    assert not host.is_backed_up
    host.close()
    rank.close()


def test_droppable_frames_are_dropped_at_the_bound_and_others_never() -> None:
    host, rank = a_pair()
    answer = Answer(step=Step(1), norm=0.0, losses=(1.0,) * 1024)
    vote = passed_frame(Passed(generation=Generation(1), answer=answer, at=0.0))
    for _ in range(3000):
        rank.post(vote, droppable=True)
    rank.post(said_frame(Raised(message="last words")))
    kinds: list[bytes] = []
    while rank.is_backed_up or not kinds:
        kinds += [kind for kind, _ in host.receive()[0]]
        rank.flush()
    kinds += [kind for kind, _ in host.receive()[0]]
    assert len(kinds) < 3000
    assert kinds[-1] == b"S"
    host.close()
    rank.close()


def test_what_is_posted_quietly_rings_no_bell_and_is_read_before_what_rings_it() -> None:
    ours, theirs = socket.socketpair()
    bell = os.eventfd(0, os.EFD_NONBLOCK)
    host, rank = Channel(ours), Channel(theirs, bell=bell)
    vote = Passed(generation=Generation(2), answer=Answer(step=Step(7), norm=0.1, losses=(1.5,)), at=1.0)
    rank.post(passed_frame(vote), quietly=True)
    with pytest.raises(BlockingIOError):
        os.eventfd_read(bell)
    raised = Raised(message="last words")
    rank.post(said_frame(raised))
    assert os.eventfd_read(bell) == 1
    rank.post(passed_frame(vote), quietly=True)
    rank.close()
    frames, _ = host.receive()
    assert [read_said(kind, body) for kind, body in frames] == [vote, raised, vote], "also where it has ended since"
    host.close()
    os.close(bell)


def test_what_did_not_fit_at_once_rings_again_when_it_has_been_sent() -> None:
    ours, theirs = socket.socketpair()
    bell = os.eventfd(0, os.EFD_NONBLOCK)
    host, rank = Channel(ours), Channel(theirs, bell=bell)
    said = Raised(message="x" * (1 << 20))
    rank.post(said_frame(said))
    frames: list[tuple[bytes, bytes]] = []
    while not frames:
        assert os.eventfd_read(bell)
        frames, _ = host.receive()
        rank.flush()
    assert [read_said(kind, body) for kind, body in frames] == [said]
    rank.close()
    host.close()
    os.close(bell)


def test_a_post_to_a_peer_that_is_gone_is_no_error() -> None:
    host, rank = a_pair()
    rank.close()
    host.post(order_frame(CloseGeneration(generation=Generation(1))))
    assert not host.is_backed_up
    host.close()
