"""What the hosts of a fleet answer to the kernel's requests, and how long that takes them. All answers to one order come in
one instant."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from orchestrator.domain.cluster import Node, NodeStatus
from orchestrator.domain.events import EffectDone, HostClosed, HostSaid, Input
from orchestrator.domain.host_events import HostEvent, HostOpened, RankReady, SelfTested
from orchestrator.domain.ids import Device, NodeId
from orchestrator.domain.origin import FromCheckpoint, FromMemory
from orchestrator.domain.profile import Profile
from orchestrator.domain.requests import (
    BeginJoin,
    CloseGeneration,
    CloseHost,
    EndJoin,
    FormGeneration,
    HostRequest,
    KillRank,
    OpenHost,
    PrepareSeats,
    SaveSoon,
    SelfTest,
    StopAfter,
)

from .crews import Crews
from .pace import Pace
from .training import JOB, Clockwork, Training


class Hosts:
    """kill: ends the process on a device."""

    def __init__(
        self,
        clockwork: Clockwork,
        nodes: Mapping[NodeId, Node],
        profile: Profile,
        pace: Pace,
        training: Training,
        crews: Crews,
        kill: Callable[[Device], None],
    ) -> None:
        self._clockwork, self._nodes, self._profile, self._pace = clockwork, nodes, profile, pace
        self._training, self._crews, self._kill = training, crews, kill

    def ask(self, node: NodeId, request: HostRequest, done: EffectDone) -> None:
        if self._nodes[node].status is NodeStatus.LOST:
            return  # its end is told by itself
        pace, training, crews, clockwork = self._pace, self._training, self._crews, self._clockwork
        step_s = training.march.step_s if training.march is not None else 0.0
        match request:
            case OpenHost():
                self._answer(node, pace.open_s, done, lambda: [HostOpened(seconds=pace.open_s)])
            case PrepareSeats(stand_by=stand_by):
                self._answer(node, pace.build_s if stand_by else pace.fork_s, done, lambda: [crews.prepared(request)])
            case CloseGeneration(generation=generation):
                training.closed(generation)
                self._answer(node, pace.leave_s, done, lambda: crews.reports(node, generation, "closed"))
            case FormGeneration():
                self._answer(node, self._formed(request), done, lambda: self._ready(node, request))
            case StopAfter():
                self._answer(node, 1.5 * step_s or pace.leave_s, done, lambda: self._stopped(node, request))
            case BeginJoin():
                self._answer(node, self._copy_s(request, node), done, lambda: self._joined(node, request))
            case EndJoin():
                self._answer(node, pace.leave_s, done, lambda: crews.join_ended(node))
            case SaveSoon():
                clockwork.after(1.5 * step_s or pace.leave_s, lambda: [*training.saved(), done])
            case KillRank(device=device):
                clockwork.after(0.0, lambda: [done])
                self._kill(device)
            case SelfTest(device=device):
                self._answer(node, 1.0, done, lambda: [SelfTested(device=device, passed=True, message="sound")])
            case CloseHost():
                crews.end(Device(node, 0))
                clockwork.after(pace.leave_s, lambda: [HostClosed(job=JOB, node=node), done])
            case _:
                clockwork.after(0.0, lambda: [done])

    def _answer(self, node: NodeId, delay_s: float, done: EffectDone, tell: Callable[[], Sequence[HostEvent]]) -> None:
        def now() -> Sequence[Input]:
            if self._nodes[node].status is NodeStatus.LOST:
                return []
            return [*(HostSaid(job=JOB, node=node, event=event) for event in tell()), done]

        self._clockwork.after(delay_s + self._pace.commit_s, now)

    def _formed(self, form: FormGeneration) -> float:
        """In how many seconds its ranks are ready: counted from when the first host is told, as all are in one instant."""
        march, now = self._training.march, self._clockwork.now
        if march is None or march.form.generation < form.generation:
            self._training.formed(form, now + self._pace.form_s + self._transfer_s(form), self._pace.first_s)
            march = self._training.march
        return max(0.0, march.ready_at - now) if march is not None else 0.0

    def _ready(self, node: NodeId, form: FormGeneration) -> Sequence[HostEvent]:
        march = self._training.march
        if march is None or march.form.generation != form.generation:
            return []
        if node == form.plan.devices[0].node:
            self._training.began(march)
        device = Device(node, 0)
        phases = {"form": self._pace.form_s}
        return [RankReady(device=device, generation=form.generation, phases=phases)] if device in form.plan.seat_of else []

    def _stopped(self, node: NodeId, request: StopAfter) -> Sequence[HostEvent]:
        march = self._training.march
        if march is not None and march.form.generation == request.generation:
            self._training.closed(request.generation)
        return self._crews.reports(node, request.generation, "asked to stop", stopped=True)

    def _joined(self, node: NodeId, begin: BeginJoin) -> Sequence[HostEvent]:
        march = self._training.march
        reached = march.reached(self._clockwork.now) if march is not None else self._clockwork.record.committed
        return self._crews.joined(node, begin, reached)

    # --- bytes ------------------------------------------------------------------------------------------------------------

    def _transfer_s(self, form: FormGeneration) -> float:
        restore, pace, tally = form.restore, self._pace, self._clockwork.tally
        if isinstance(restore, FromMemory):
            sent: dict[Device, int] = {}
            for move in restore.moves:
                if move.source != move.target:
                    sent[move.source] = sent.get(move.source, 0) + len(move.interval)
                    sent[move.target] = sent.get(move.target, 0) + len(move.interval)
            tally.moved_bytes += pace.element_bytes * sum(sent.values()) / 2
            return pace.element_bytes * max(sent.values(), default=0) / pace.bytes_s
        if isinstance(restore, FromCheckpoint):
            total = pace.element_bytes * self._profile.num_params
            tally.moved_bytes += total
            return total / form.plan.world_size / pace.read_bytes_s + pace.open_s
        return 0.0

    def _copy_s(self, begin: BeginJoin, node: NodeId) -> float:
        wanted = sum(len(move.interval) for move in begin.moves if move.target.node == node)
        self._clockwork.tally.moved_bytes += self._pace.element_bytes * wanted
        return self._pace.element_bytes * wanted / self._pace.bytes_s
