"""A rank stays a micro-batch ahead of its device, and a wait for it can be ended."""

from __future__ import annotations

import pytest
import torch

from worker.backlog import AHEAD, DeviceBacklog, Landed, NoBacklog, backlog_of
from worker.progress import Unwatched


class Closed(Exception):
    pass


class Device:
    """Works through what it is given only when it is told to; makes marks in its queue."""

    def __init__(self) -> None:
        self.queue: list[Device.Mark] = []
        self.made = 0

    class Mark:
        def __init__(self, device: Device) -> None:
            self.device = device
            device.made += 1

        def record(self) -> None:
            self.device.queue.append(self)

        def query(self) -> bool:
            return self not in self.device.queue

    def make(self) -> Device.Mark:
        return Device.Mark(self)

    def work(self) -> None:
        if self.queue:
            self.queue.pop(0)


class Told(Unwatched):
    def __init__(self) -> None:
        self.behind_now: list[bool] = []

    def behind(self, is_behind: bool) -> None:
        self.behind_now.append(is_behind)


class Ordered:
    """What is posted where a device does the waiting: whoever waits is through at once, and nothing has come yet."""

    waits = 0

    def wait(self) -> None:
        self.waits += 1


def test_it_waits_until_few_enough_are_under_way_and_looks_meanwhile_whether_it_shall_go_on() -> None:
    device = Device()
    backlog = DeviceBacklog(device.make, Unwatched())
    for number in range(5):
        backlog.wait(AHEAD, device.work)  # the device gets on while it is waited for
        assert len(device.queue) <= AHEAD
        backlog.given()
        assert len(device.queue) <= AHEAD + 1, f"micro-batch {number} is given while {AHEAD} is under way"
    backlog.wait(0, device.work)
    assert not device.queue and device.made <= AHEAD + 1, "marks are used again"


def test_a_device_that_never_gets_there_keeps_nobody_whose_generation_is_closed() -> None:
    backlog = DeviceBacklog(Device().make, told := Told())
    backlog.given()
    looks = 0

    def proceed() -> None:
        nonlocal looks
        looks += 1
        if looks == 3:
            raise Closed

    with pytest.raises(Closed):
        backlog.wait(0, proceed)
    assert told.behind_now == [True, False], "whoever watches it knows why it sleeps, and that it no longer does"


def test_who_is_not_behind_says_nothing() -> None:
    device = Device()
    backlog = DeviceBacklog(device.make, told := Told())
    backlog.given()
    device.work()
    backlog.wait(0, lambda: None)
    assert not told.behind_now


def test_what_is_posted_has_landed_once_the_device_has_come_past_it() -> None:
    device, posted, looks = Device(), Ordered(), 0

    def proceed() -> None:
        nonlocal looks
        looks += 1
        assert posted.waits == 1 and len(device.queue) == 1, "marked behind what was posted, and not before"
        if looks == 3:
            device.work()

    Landed(posted, DeviceBacklog(device.make, Unwatched()), proceed).wait()
    assert looks == 3 and not device.queue


def test_a_processor_is_never_behind_and_still_looks() -> None:
    backlog = backlog_of(torch.device("cpu"), Unwatched())
    assert isinstance(backlog, NoBacklog)
    backlog.given()

    def closed() -> None:
        raise Closed

    with pytest.raises(Closed):
        backlog.wait(0, closed)
