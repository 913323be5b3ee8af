"""One job on thousands of machines for weeks: the same kernel.step, in a world where what is the same for all is implied.

    arrival of a fault ──> HostLost | RankExited | NodesSeen ──> kernel.step ──> effects ──> what hosts would answer

Between faults nothing is simulated: steps, heartbeats and checkpoints of a job that trains undisturbed follow from its
step time, and the kernel is told of the newest ones when next it is told anything. A machine is one device: its
accelerators are lost together, and a job is planned, mirrored and moved by machines. `dense` delivers every step by
itself, on small clusters, and must come to the same decisions. It owns virtual time of one job; which faults arrive
(arrivals.py) and what the figures mean (whatif.py) it refuses to know.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

from orchestrator.domain.checkpoint import CheckpointRef
from orchestrator.domain.cluster import Node, NodeStatus
from orchestrator.domain.effects import (
    CallHost,
    ChoosePlan,
    CommitCheckpoint,
    Effect,
    NoteCheckpoint,
    ProbeProgram,
    PruneCheckpoints,
)
from orchestrator.domain.events import (
    CheckpointCommitted,
    Contact,
    DeadlinePassed,
    EffectDone,
    HostClosed,
    HostLost,
    HostSaid,
    Input,
    JobSubmitted,
    NodesSeen,
    PlanChosen,
    ProgramProbed,
)
from orchestrator.domain.generation import Answer, Arrived, Held, RankReport
from orchestrator.domain.ids import Device, EffectId, Generation, JobId, NodeId, Step
from orchestrator.domain.job import JobRecord
from orchestrator.domain.profile import Interval, Profile, joined
from orchestrator.domain.protocol import (
    BeginJoin,
    CloseGeneration,
    CloseHost,
    EndJoin,
    FormGeneration,
    FromCheckpoint,
    FromMemory,
    HostEvent,
    HostOpened,
    HostRequest,
    JoinerAt,
    KillRank,
    OpenHost,
    PrepareSeats,
    RankExited,
    RankReady,
    RankReported,
    SeatsPrepared,
    SelfTest,
    SelfTested,
    StepsPassed,
    StopAfter,
)
from orchestrator.domain.spec import JobSpec
from orchestrator.planner.choose import choose
from orchestrator.supervisor.deadlines import deadlines
from orchestrator.supervisor.kernel import State, step

JOB = JobId("job")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """What things take, in seconds: of the order that benchmarks.recovery measures on one machine.

    step_s: a step at full strength. bytes_s: what one machine sends or receives. state_bytes: of one element, all kinds.
    """

    step_s: float
    detect_s: float = 0.02
    hang_s: float = 0.7
    commit_s: float = 0.004
    plan_s: float = 0.05
    leave_s: float = 0.02
    form_s: float = 0.06
    first_s: float = 0.0
    """By which the first step of a generation takes longer than others, from when its last rank is ready."""
    fork_s: float = 0.05
    open_s: float = 30.0
    build_s: float = 5.0
    bytes_s: float = 50e9
    read_bytes_s: float = 2e9
    element_bytes: float = 12.0
    noticed_s: float = 5.0
    """Until the cluster says that a machine is lost."""


@dataclass(slots=True)
class Tally:
    """What has happened so far. Seconds of training lost to each cause, and what recoveries came to."""

    began: Step = Step(0)
    committed: Step = Step(0)
    """Steps since then, those that were run again counted once."""
    rerun_s: float = 0.0
    rolled_back: int = 0
    pauses: list[tuple[str, float]] = field(default_factory=list)
    lost_s: dict[str, float] = field(default_factory=dict)
    moved_bytes: float = 0.0
    rungs: dict[str, int] = field(default_factory=dict)
    decisions: list[tuple[object, ...]] = field(default_factory=list)
    kernel_steps: int = 0
    faults: int = 0


class Fleet:
    """nodes: machines the job may have. checkpoint_every: steps."""

    def __init__(self, spec: JobSpec, profile: Profile, nodes: Sequence[Node], pace: Pace, *, dense: bool = False) -> None:
        self.now = 0.0
        self.tally = Tally()
        self.nodes: dict[NodeId, Node] = {node.id: node for node in nodes}
        self.pace = pace
        self._spec, self._profile, self._dense = spec, profile, dense
        self._state = State(root="/shared")
        self._queue: list[tuple[float, int, Callable[[], Sequence[Input]]]] = []
        self._numbers = count()
        self._pids: dict[Device, int] = {}
        self._held: dict[Device, Held] = {}
        self._closed: dict[NodeId, Generation] = {}
        self._newcomers: dict[Device, tuple[BeginJoin, tuple[Interval, ...]]] = {}
        self._alarms: dict[str, float] = {}
        self._form: FormGeneration | None = None
        self._ready_at = 0.0
        self._trains_at = 0.0
        """When its ranks are ready, and from when on its steps take what they take."""
        self._said = Step(0)
        """The newest step of this generation that the kernel has been told of."""
        self._full = 0
        self._cause = ""
        self._down_since: float | None = None
        self.say([NodesSeen(nodes=self._seen()), JobSubmitted(job=JOB, spec=spec, at=0.0)])

    @property
    def record(self) -> JobRecord:
        return self._state.jobs[JOB]

    @property
    def is_training(self) -> bool:
        return self._form is not None and self.now >= self._ready_at

    def run_until(self, until: float) -> None:
        while self._queue and self._queue[0][0] <= until:
            at = self._queue[0][0]
            self.now = max(self.now, at)
            inputs: list[Input] = []
            while self._queue and self._queue[0][0] <= at:
                inputs += heapq.heappop(self._queue)[2]()
            if inputs:
                self._step([*self._untold(), *inputs])
        self.now = max(self.now, until)

    def say(self, inputs: Sequence[Input]) -> None:
        self.after(0.0, lambda: inputs)

    def after(self, delay_s: float, what: Callable[[], Sequence[Input]]) -> None:
        heapq.heappush(self._queue, (self.now + delay_s, next(self._numbers), what))

    # --- what befalls it --------------------------------------------------------------------------------------------------

    def lose_node(self, node: NodeId, cause: str, repaired_s: float) -> None:
        """Its processes end with it; the cluster says so a little later, and that it is back once it is mended."""
        if node not in self.nodes or self.nodes[node].status is NodeStatus.LOST:
            return
        self._strike(cause, self._form is not None and Device(node, 0) in self._form.plan.seat_of)
        self._pids.pop(Device(node, 0), None)
        self._held.pop(Device(node, 0), None)
        self._set_status(node, NodeStatus.LOST)
        gone = HostLost(job=JOB, node=node, contact=Contact.GONE, message=cause)
        self.after(self.pace.detect_s, lambda: [gone])
        self.after(self.pace.noticed_s, lambda: [NodesSeen(nodes=self._seen())])
        self.after(repaired_s, lambda: self._repaired(node))

    def lose_rank(self, device: Device, cause: str, seen_s: float) -> None:
        """Its process ends, and its machine is well."""
        if device not in self._pids:
            return
        self._strike(cause, self._form is not None and device in self._form.plan.seat_of)
        pid = self._pids.pop(device)
        self._held.pop(device, None)
        generation = self._form.generation if self._form else Generation(0)
        report = RankReport(device=device, generation=generation, voted=Step(0), answer=None, held=None, cause=cause)
        exited = RankExited(device=device, pid=pid, exit_code=-9, report=report, seconds_ago=seen_s)
        self.after(seen_s, lambda: [self._said_by(device.node, exited)])

    def _strike(self, cause: str, is_hit: bool) -> None:
        self.tally.faults += 1
        if not is_hit:
            return
        self._catch_up()
        if self._form is not None:
            self.tally.rerun_s += (self.now - self._trains_at) % self._step_s() if self.now > self._trains_at else 0.0
            self._freeze()
        if self._down_since is None:
            self._down_since, self._cause = self.now, cause

    def _repaired(self, node: NodeId) -> Sequence[Input]:
        self._set_status(node, NodeStatus.UP)
        return [NodesSeen(nodes=self._seen())]

    def _set_status(self, node: NodeId, status: NodeStatus) -> None:
        was = self.nodes[node]
        self.nodes[node] = Node(id=node, kind=was.kind, num_devices=1, labels=was.labels, status=status)

    def _seen(self) -> tuple[Node, ...]:
        return tuple(self.nodes.values())

    # --- training, implied ------------------------------------------------------------------------------------------------

    def _step_s(self) -> float:
        assert self._form is not None
        return self.pace.step_s * self._full / max(1, self._form.plan.world_size)

    def _reached(self) -> Step:
        """The newest step that has passed by now."""
        assert self._form is not None
        return Step(self._form.committed + max(0, int((self.now - self._trains_at) / self._step_s() + 1e-9)))

    def _catch_up(self) -> None:
        """Tell the kernel what has passed since it was told last: the newest two steps, and the newest checkpoint."""
        form = self._form
        if form is None or self.now <= self._trains_at:
            return
        if news := self._untold():
            self._step(news)
        reached = self._reached()
        for device in form.plan.devices:
            self._held[device] = Held(generation=form.generation, step=reached)

    def _untold(self) -> list[Input]:
        """What has passed unseen: the first step of a generation is told by itself, because it ends a pause."""
        form = self._form
        if form is None or self.now <= self._trains_at or self._said == form.committed:
            return []
        reached = self._reached()
        return self._news(form, range(max(self._said + 1, reached - 1), reached + 1)) if reached > self._said else []

    def _news(self, form: FormGeneration, steps: range) -> list[Input]:
        node = form.plan.devices[0].node
        every = int(self._spec.checkpoint.every)
        took = self._step_s()
        at = tuple(self._trains_at + (s - form.committed) * took for s in steps)
        answers = tuple(_answer(Step(s)) for s in steps)
        passed = StepsPassed(generation=form.generation, answers=answers, at=at)
        self._said = Step(steps[-1])
        newest = steps[-1] // every * every if every else 0
        known = self.record.checkpoint
        news: list[Input] = [self._said_by(node, passed)]
        if newest > form.committed and (known is None or known.step < newest):
            path = f"/shared/{JOB}/{newest}-{form.generation}"
            saved = CheckpointRef(step=Step(newest), generation=form.generation, path=path, answer=_answer(Step(newest)))
            news.append(CheckpointCommitted(job=JOB, checkpoint=saved))
        return news

    def _freeze(self) -> None:
        """Nobody gets any further in this generation."""
        self._form = None

    # --- the kernel -------------------------------------------------------------------------------------------------------

    def _step(self, inputs: Sequence[Input]) -> None:
        stepped = step(self.now, self._state, inputs)
        self._state = stepped.state
        self.tally.kernel_steps += 1
        for entry in stepped.history:
            if entry.type == "rung_taken":
                self.tally.rungs[str(entry.data["rung"])] = self.tally.rungs.get(str(entry.data["rung"]), 0) + 1
            elif entry.type == "rolled_back":
                self.tally.rolled_back += int(str(entry.data["steps"]))
            if entry.type in ("rung_taken", "rolled_back", "settled", "growing"):
                self.tally.decisions.append((entry.type, entry.generation, entry.step, _words(entry.message)))
        for identity, effect in stepped.effects.items():
            self._carry_out(identity, effect)
        if JOB in self._state.jobs:
            self._set_alarms()

    def _set_alarms(self) -> None:
        wanted = deadlines(self.record)
        self._alarms = {key: at for key, at in self._alarms.items() if key in wanted}
        for key, seconds in wanted.items():
            if key not in self._alarms:
                at = self._alarms[key] = self.now + seconds
                self.after(seconds, lambda key=key, at=at: self._ring(key, at))  # type: ignore[misc]

    def _ring(self, key: str, at: float) -> Sequence[Input]:
        if self._alarms.get(key) != at:
            return []
        del self._alarms[key]
        return [DeadlinePassed(job=JOB, key=key)]

    def _carry_out(self, identity: EffectId, effect: Effect) -> None:
        done = EffectDone(job=JOB, effect=identity)
        match effect:
            case CallHost(node=node, request=request):
                self._ask(node, request, done)
            case ProbeProgram():
                self.say([ProgramProbed(job=JOB, profile=self._profile), done])
            case ChoosePlan(generation=generation):
                chosen = PlanChosen(job=JOB, generation=generation, result=choose(effect))
                self.after(self.pace.plan_s, lambda: [chosen, done])
            case CommitCheckpoint() | PruneCheckpoints() | NoteCheckpoint():
                self.say([done])

    # --- hosts ------------------------------------------------------------------------------------------------------------

    def _said_by(self, node: NodeId, event: HostEvent) -> HostSaid:
        return HostSaid(job=JOB, node=node, event=event)

    def _answer_of(self, node: NodeId, delay_s: float, done: EffectDone, tell: Callable[[], Sequence[HostEvent]]) -> None:
        def now() -> Sequence[Input]:
            if self.nodes[node].status is NodeStatus.LOST:
                return []
            return [*(self._said_by(node, event) for event in tell()), done]

        self.after(delay_s + self.pace.commit_s, now)

    def _ask(self, node: NodeId, request: HostRequest, done: EffectDone) -> None:
        if self.nodes[node].status is NodeStatus.LOST:
            return  # its end is told by itself
        pace = self.pace
        match request:
            case OpenHost():
                self._answer_of(node, pace.open_s, done, lambda: [HostOpened(seconds=pace.open_s)])
            case PrepareSeats(stand_by=stand_by):
                self._answer_of(node, pace.build_s if stand_by else pace.fork_s, done, lambda: [self._prepared(request)])
            case CloseGeneration(generation=generation):
                self._close(generation)
                self._answer_of(node, pace.leave_s, done, lambda: self._reports(node, generation, "closed"))
            case FormGeneration():
                self._formed(request)
                self._answer_of(node, max(0.0, self._ready_at - self.now), done, lambda: self._readied(node, request))
            case StopAfter(generation=generation):
                wait = self._step_s() * 1.5 if self._form else pace.leave_s
                self._answer_of(node, wait, done, lambda: self._stopped(node, generation))
            case BeginJoin():
                self._answer_of(node, self._copy_s(request, node), done, lambda: self._joined(node, request))
            case EndJoin():
                self._answer_of(node, pace.leave_s, done, lambda: self._join_ended(node))
            case KillRank(device=device):
                self.say([done])
                self.lose_rank(device, "killed", pace.detect_s)
            case SelfTest(device=device):
                self._answer_of(node, 1.0, done, lambda: [SelfTested(device=device, passed=True, message="sound")])
            case CloseHost():
                self._pids.pop(Device(node, 0), None)
                self.after(pace.leave_s, lambda: [HostClosed(job=JOB, node=node), done])
            case _:
                self.say([done])

    def _prepared(self, request: PrepareSeats) -> SeatsPrepared:
        for device in request.devices:
            if device not in self._pids:
                self._pids[device] = 1 + next(self._numbers)
        pids = {device: self._pids[device] for device in request.devices}
        at = {device: f"{device.node}:{pid}" for device, pid in pids.items()}
        return SeatsPrepared(generation=request.generation, addresses=at, pids=pids)

    def _close(self, generation: Generation) -> None:
        if self._form is not None and self._form.generation <= generation:
            self._catch_up_held()
            self._down_since = self.now if self._down_since is None else self._down_since
            self._freeze()

    def _catch_up_held(self) -> None:
        form = self._form
        if form is not None and self.now > self._trains_at:
            reached = self._reached()
            for device in form.plan.devices:
                if device in self._pids:
                    self._held[device] = Held(generation=form.generation, step=reached)

    def _reports(self, node: NodeId, generation: Generation, cause: str, *, stopped: bool = False) -> Sequence[HostEvent]:
        if self._closed.get(node, 0) >= generation:
            return []
        self._closed[node] = generation
        device = Device(node, 0)
        return [RankReported(report=self._report(device, generation, cause, stopped))] if device in self._pids else []

    def _report(self, device: Device, generation: Generation, cause: str, stopped: bool) -> RankReport:
        held = self._held.get(device)
        is_of = held is not None and held.generation == generation
        step_held = held.step if held is not None else Step(0)
        answer = _answer(step_held) if is_of and step_held else None
        return RankReport(
            device=device, generation=generation, voted=step_held, answer=answer, held=held, cause=cause, stopped=stopped
        )

    def _stopped(self, node: NodeId, generation: Generation) -> Sequence[HostEvent]:
        if self._form is not None and self._form.generation == generation:
            self._catch_up_held()
            self._cause = self._cause or "resize"
            self._down_since = self.now if self._down_since is None else self._down_since
            self._freeze()
        return self._reports(node, generation, "asked to stop", stopped=True)

    def _formed(self, form: FormGeneration) -> None:
        """The first host that is told; all others are in the same instant."""
        if self._form is form or (self._form is not None and self._form.generation >= form.generation):
            return
        self._form = form
        self._full = max(self._full, form.plan.world_size)
        self._said = form.committed
        for device in form.plan.devices:
            self._held[device] = Held(generation=form.generation, step=form.committed)
        self._ready_at = self.now + self.pace.form_s + self._transfer_s(form)
        self._trains_at = self._ready_at + self.pace.first_s

    def _transfer_s(self, form: FormGeneration) -> float:
        restore, pace = form.restore, self.pace
        if isinstance(restore, FromMemory):
            sent: dict[Device, int] = {}
            for move in restore.moves:
                if move.source != move.target:
                    sent[move.source] = sent.get(move.source, 0) + len(move.interval)
                    sent[move.target] = sent.get(move.target, 0) + len(move.interval)
            self.tally.moved_bytes += pace.element_bytes * sum(sent.values()) / 2
            return pace.element_bytes * max(sent.values(), default=0) / pace.bytes_s
        if isinstance(restore, FromCheckpoint):
            total = pace.element_bytes * self._profile.num_params
            self.tally.moved_bytes += total
            return total / form.plan.world_size / pace.read_bytes_s + pace.open_s
        return 0.0

    def _readied(self, node: NodeId, form: FormGeneration) -> Sequence[HostEvent]:
        if self._form is None or self._form.generation != form.generation:
            return []
        if node == form.plan.devices[0].node:
            self._began(form)
        phases = {"form": self.pace.form_s}
        device = Device(node, 0)
        is_in = device in form.plan.seat_of
        return [RankReady(device=device, generation=form.generation, phases=phases)] if is_in else []

    def _began(self, form: FormGeneration) -> None:
        """Training goes on; the first step ends the pause."""

        def first() -> Sequence[Input]:
            if self._form is None or self._form.generation != form.generation or self._said > form.committed:
                return []
            if self._dense:
                self.after(self._step_s(), lambda: self._next(form))
            if self._down_since is not None:
                pause = max(0.0, self.now - self._step_s() - self._down_since)
                self.tally.pauses.append((self._cause, pause))
                self.tally.lost_s[self._cause] = self.tally.lost_s.get(self._cause, 0.0) + pause
                self._down_since, self._cause = None, ""
            return self._news(form, range(form.committed + 1, form.committed + 2))

        self.after(max(0.0, self._trains_at + self._step_s() - self.now), first)

    def _next(self, form: FormGeneration) -> Sequence[Input]:
        """Dense: every step is told."""
        if self._form is None or self._form.generation != form.generation:
            return []
        self.after(self._step_s(), lambda: self._next(form))
        reached = self._reached()
        return self._news(form, range(self._said + 1, reached + 1)) if reached > self._said else []

    # --- newcomers --------------------------------------------------------------------------------------------------------

    def _copy_s(self, begin: BeginJoin, node: NodeId) -> float:
        wanted = sum(len(move.interval) for move in begin.moves if move.target.node == node)
        self.tally.moved_bytes += self.pace.element_bytes * wanted
        return self.pace.element_bytes * wanted / self.pace.bytes_s

    def _joined(self, node: NodeId, begin: BeginJoin) -> Sequence[HostEvent]:
        told: list[HostEvent] = []
        for device in sorted({move.target for move in begin.moves if move.target.node == node}):
            mine = joined(move.interval for move in begin.moves if move.target == device)
            self._newcomers[device] = begin, mine
            at = self._reached() if self._form else self.record.committed
            told.append(JoinerAt(device=device, generation=begin.generation, step=at))
        return told

    def _join_ended(self, node: NodeId) -> Sequence[HostEvent]:
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

    def begin(self) -> None:
        """What is measured begins here."""
        self._catch_up()
        self.tally = Tally(began=self._said)

    def close(self) -> None:
        """The end of the time that is looked at."""
        self._catch_up()
        if self._down_since is not None:
            self.tally.lost_s[self._cause] = self.tally.lost_s.get(self._cause, 0.0) + self.now - self._down_since
        self.tally.committed = Step(self.record.committed - self.tally.began)


def _answer(step_number: Step) -> Answer:
    return Answer(step=step_number, norm=1.0, losses=(0.0,))


def _words(message: str) -> str:
    """What was decided, without what it was expected to cost."""
    return message.split(" (")[0].split(", expected")[0]
