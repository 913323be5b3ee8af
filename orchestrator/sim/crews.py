"""The processes on a fleet's machines, one each, and what hosts report of them: who lives, and what state it holds."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count

from orchestrator.domain.generation import Answer, Arrived, Held, RankReport
from orchestrator.domain.host_events import HostEvent, JoinerAt, RankExited, RankReported, SeatsPrepared
from orchestrator.domain.ids import Device, Generation, NodeId, Step
from orchestrator.domain.profile import Interval, joined
from orchestrator.domain.requests import BeginJoin, PrepareSeats


class Crews:
    def __init__(self) -> None:
        self._numbers = count(1)
        self._pids: dict[Device, int] = {}
        self._held: dict[Device, Held] = {}
        self._closed: dict[NodeId, Generation] = {}
        self._newcomers: dict[Device, tuple[BeginJoin, tuple[Interval, ...]]] = {}

    def lives(self, device: Device) -> bool:
        return device in self._pids

    def hold(self, devices: Iterable[Device], generation: Generation, step: Step) -> None:
        """All those of them that live have applied this step."""
        held = Held(generation=generation, step=step)
        self._held.update({device: held for device in devices if device in self._pids})

    def end(self, device: Device) -> None:
        self._pids.pop(device, None)
        self._held.pop(device, None)

    def kill(self, device: Device, generation: Generation, cause: str, seen_s: float) -> RankExited:
        """What its host says of that, seen_s later."""
        pid = self._pids[device]
        self.end(device)
        report = RankReport(device=device, generation=generation, voted=Step(0), answer=None, held=None, cause=cause)
        return RankExited(device=device, pid=pid, exit_code=-9, report=report, seconds_ago=seen_s)

    def prepared(self, request: PrepareSeats) -> SeatsPrepared:
        for device in request.devices:
            if device not in self._pids:
                self._pids[device] = next(self._numbers)
        pids = {device: self._pids[device] for device in request.devices}
        at = {device: f"{device.node}:{pid}" for device, pid in pids.items()}
        return SeatsPrepared(generation=request.generation, addresses=at, pids=pids)

    def reports(self, node: NodeId, generation: Generation, cause: str, *, stopped: bool = False) -> list[HostEvent]:
        """Of those that leave the generation; once."""
        if self._closed.get(node, 0) >= generation:
            return []
        self._closed[node] = generation
        device = Device(node, 0)
        if device not in self._pids:
            return []
        held = self._held.get(device)
        step = held.step if held is not None else Step(0)
        answer = answer_of(step) if held is not None and held.generation == generation and step else None
        report = RankReport(
            device=device,
            generation=generation,
            voted=step,
            answer=answer,
            held=held,
            cause=cause,
            stopped=stopped,
            answered_in=generation if answer else Generation(0),
        )
        return [RankReported(report=report)]

    def joined(self, node: NodeId, begin: BeginJoin, reached: Step) -> list[HostEvent]:
        """Newcomers have received a copy of what they are to hold, and apply every step from now on."""
        told: list[HostEvent] = []
        for device in sorted({move.target for move in begin.moves if move.target.node == node}):
            mine = joined(move.interval for move in begin.moves if move.target == device)
            self._newcomers[device] = begin, mine
            told.append(JoinerAt(device=device, generation=begin.generation, step=reached))
        return told

    def join_ended(self, node: NodeId) -> list[HostEvent]:
        told: list[HostEvent] = []
        for device in sorted(device for device in self._newcomers if device.node == node):
            begin, mine = self._newcomers.pop(device)
            at = max((held.step for held in self._held.values() if held.generation == begin.of), default=Step(0))
            report = RankReport(
                device=device,
                generation=begin.of,
                voted=Step(0),
                answer=None,
                held=None,
                cause="training stopped for this newcomer",
                arrived=Arrived(step=at, intervals=mine),
            )
            told.append(RankReported(report=report))
        return told


def answer_of(step: Step) -> Answer:
    return Answer(step=step, norm=1.0, losses=(0.0,))
