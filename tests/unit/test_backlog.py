"""A rank stays a micro-batch ahead of its device, and a wait for it can be ended."""

from __future__ import annotations

import pytest
import torch

from worker.backlog import AHEAD, DeviceBacklog, NoBacklog, backlog_of


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


def test_it_waits_until_few_enough_are_under_way_and_looks_meanwhile_whether_it_shall_go_on() -> None:
    device = Device()
    backlog = DeviceBacklog(device.make)
    for number in range(5):
        backlog.wait(AHEAD, device.work)  # the device gets on while it is waited for
        assert len(device.queue) <= AHEAD
        backlog.given()
        assert len(device.queue) <= AHEAD + 1, f"micro-batch {number} is given while {AHEAD} is under way"
    backlog.wait(0, device.work)
    assert not device.queue and device.made <= AHEAD + 1, "marks are used again"


def test_a_device_that_never_gets_there_keeps_nobody_whose_generation_is_closed() -> None:
    backlog = DeviceBacklog(Device().make)
    backlog.given()
    looks = 0

    def proceed() -> None:
        nonlocal looks
        looks += 1
        if looks == 3:
            raise Closed

    with pytest.raises(Closed):
        backlog.wait(0, proceed)


def test_a_processor_is_never_behind_and_still_looks() -> None:
    backlog = backlog_of(torch.device("cpu"))
    assert isinstance(backlog, NoBacklog)
    backlog.given()

    def closed() -> None:
        raise Closed

    with pytest.raises(Closed):
        backlog.wait(0, closed)
