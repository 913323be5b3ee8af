"""Values for tests, and a bench that drives the kernel as a world would: `Bench().running()` is a job that trains.

bench = Bench(nodes=4, devices=2, dp=2, pp=2, tp=2).running()
bench.passed(3); bench.exited(bench.device(0)); bench.settled(); assert bench.state is Running
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeVar

from orchestrator.domain.checkpoint import CheckpointRef, ShardRef
from orchestrator.domain.cluster import Node, NodeStatus
from orchestrator.domain.effects import CallHost, ChoosePlan, CommitCheckpoint, Effect
from orchestrator.domain.events import (
    CheckpointCommitted,
    Contact,
    HistoryEntry,
    HostClosed,
    HostHeard,
    HostLost,
    HostSaid,
    Input,
    JobSubmitted,
    NodesSeen,
    PlanChosen,
    ProgramProbed,
    StepRecord,
)
from orchestrator.domain.generation import Answer, Held, RankReport
from orchestrator.domain.host_events import (
    HostEvent,
    HostOpened,
    JoinerAt,
    RankExited,
    RankReady,
    RankReported,
    SeatsPrepared,
    ShardSaved,
    StepsPassed,
)
from orchestrator.domain.ids import Device, EffectId, Generation, JobId, NodeId, Rank, Step
from orchestrator.domain.job import JobRecord
from orchestrator.domain.plan import Pipeline, Plan, Stage
from orchestrator.domain.profile import Divisor, Line, Profile
from orchestrator.domain.requests import FormGeneration, HostRequest, PrepareSeats
from orchestrator.domain.spec import CheckpointSpec, DataSpec, JobSpec, ParallelSpec, RecoverySpec, TrainSpec
from orchestrator.domain.state import JobState, Reforming, Running, Starting
from orchestrator.planner.choose import choose
from orchestrator.supervisor.kernel import State, Stepped, step

Request = TypeVar("Request", bound=HostRequest)
JOB = JobId("job")


def a_device(node: int, index: int = 0) -> Device:
    return Device(NodeId(f"n{node}"), index)


def an_answer(number: int, micro_batches: int = 4) -> Answer:
    return Answer(step=Step(number), norm=float(number), losses=tuple(number + i / 10 for i in range(micro_batches)))


def a_profile(layers: int = 4, heads: int = 4) -> Profile:
    """A split and a whole line in every layer."""
    lines = [
        line
        for layer in range(layers)
        for line in (
            Line(name=f"{layer}.weight", shape=(16, 24), split=True, layers=(layer,), decay=True),
            Line(name=f"{layer}.norm", shape=(70,), split=False, layers=(layer,), decay=False),
        )
    ]
    return Profile(
        num_layers=layers, lines=tuple(lines), divisors=(Divisor(field="model.heads", value=heads),), activation_bytes=64
    )


def a_spec(
    *,
    tp: int | None = None,
    pp: int | None = None,
    dp: int | None = None,
    steps: int = 20,
    micro_batches: int = 4,
    every: int = 5,
    mirrors: int = 1,
    min_devices: int = 1,
    max_attempts: int = 8,
    spares: int = 0,
    max_external_attempts: int = 64,
) -> JobSpec:
    return JobSpec(
        name="job",
        program="causal_lm",
        data=DataSpec(files=("*.txt",)),
        train=TrainSpec(steps=steps, micro_batches=micro_batches, micro_batch_size=1, sequence=8),
        parallel=ParallelSpec(tp=tp, pp=pp, dp=dp, min_devices=min_devices),
        checkpoint=CheckpointSpec(every=every),
        recovery=RecoverySpec(
            mirrors=mirrors, spares=spares, max_attempts=max_attempts, max_external_attempts=max_external_attempts
        ),
    )


def a_plan(devices: Iterable[Device], *, tp: int = 1, pp: int = 1, layers: int = 4) -> Plan:
    """Rectangular; devices are dealt out pipeline by pipeline, stage by stage."""
    left = list(devices)
    pipelines = []
    while left:
        stages = []
        for s in range(pp):
            mine, left = left[:tp], left[tp:]
            stages.append(Stage(first=layers * s // pp, last=layers * (s + 1) // pp, devices=tuple(mine)))
        pipelines.append(stages)
    return Plan(pipelines=tuple(Pipeline(stages=tuple(s), micro_batches=(i,)) for i, s in enumerate(pipelines)))


def a_report(
    device: Device,
    *,
    generation: int = 1,
    voted: int = 0,
    passed: int = 0,
    held: int | None = 0,
    held_in: int | None = None,
    lost_peer: int | None = None,
    passed_in: int | None = None,
) -> RankReport:
    """held: the step its memory is whole at, or None; held_in: the generation that gave it its intervals; passed_in: whose
    vote it saw pass, 0 for none, where that is another one."""
    return RankReport(
        device=device,
        generation=Generation(generation),
        voted=Step(voted),
        answer=an_answer(passed) if passed else None,
        held=None if held is None else Held(generation=Generation(held_in or generation), step=Step(held)),
        lost_peer=None if lost_peer is None else Rank(lost_peer),
        answered_in=Generation(passed_in if passed_in is not None else held_in or generation),
    )


class Bench:
    """One job and the kernel. Every method that tells the kernel something keeps what came of it in `last`."""

    def __init__(self, *, nodes: int = 4, devices: int = 2, spec: JobSpec | None = None, kind: str = "cpu") -> None:
        self.spec = spec or a_spec(tp=2, pp=2, dp=2)
        self.kernel = State(root="/shared")
        self.now = 1000.0
        self.nodes = {NodeId(f"n{i}"): Node(id=NodeId(f"n{i}"), kind=kind, num_devices=devices) for i in range(nodes)}
        self.last: Stepped
        self.effects: dict[EffectId, Effect] = {}
        self.history: list[HistoryEntry] = []
        self.steps: list[StepRecord] = []
        self.ended: JobRecord | None = None
        self._last_pid = 100

    # --- telling ----------------------------------------------------------------------------------------------------------

    def tell(self, *inputs: Input) -> Bench:
        self.now += 0.01
        self.last = step(self.now, self.kernel, inputs)
        self.kernel = self.last.state
        self.effects.update(self.last.effects)
        self.history.extend(self.last.history)
        self.steps.extend(self.last.steps)
        if JOB in self.last.changed and JOB not in self.kernel.jobs:
            self.ended = self.last.changed[JOB]
        return self

    def said(self, node: NodeId, *events: HostEvent) -> Bench:
        return self.tell(*(HostSaid(job=JOB, node=node, event=event) for event in events))

    def see_nodes(self) -> Bench:
        return self.tell(NodesSeen(nodes=tuple(self.nodes.values())))

    def lose_node(self, node: NodeId) -> Bench:
        """The cluster notices; the host's line says so separately."""
        self.nodes[node] = replace(self.nodes[node], status=NodeStatus.LOST)
        return self.see_nodes()

    def silence_node(self, node: NodeId, *, speaks: bool = False) -> Bench:
        self.nodes[node] = replace(self.nodes[node], status=NodeStatus.UP if speaks else NodeStatus.UNREACHABLE)
        return self.see_nodes()

    def add_node(self, number: int, devices: int = 2, kind: str = "cpu") -> Bench:
        node = NodeId(f"n{number}")
        self.nodes[node] = Node(id=node, kind=kind, num_devices=devices)
        return self.see_nodes()

    def label(self, node: NodeId, **labels: str) -> Bench:
        """Before the cluster is seen."""
        self.nodes[node] = replace(self.nodes[node], labels=labels)
        return self

    def host_gone(self, node: NodeId) -> Bench:
        return self.tell(HostLost(job=JOB, node=node, contact=Contact.GONE, message="its process has ended"))

    def host_silent(self, node: NodeId) -> Bench:
        return self.tell(HostLost(job=JOB, node=node, contact=Contact.UNREACHABLE, message="no answer"))

    def host_heard(self, node: NodeId) -> Bench:
        return self.tell(HostHeard(job=JOB, node=node))

    def host_closed(self, node: NodeId) -> Bench:
        """It had been given up; another one may be opened there, and is."""
        self.tell(HostClosed(job=JOB, node=node))
        return self.planned().opened()

    # --- the way to a running job -----------------------------------------------------------------------------------------

    def submitted(self) -> Bench:
        self.see_nodes()
        return self.tell(JobSubmitted(job=JOB, spec=self.spec, at=self.now))

    def probed(self) -> Bench:
        return self.tell(ProgramProbed(job=JOB, profile=a_profile()))

    def planned(self) -> Bench:
        """The real planner answers what was asked, and what is asked next because of that."""
        while JOB in self.kernel.jobs and self.record.planning:
            asked = self.asked()
            self.tell(PlanChosen(job=JOB, generation=asked.generation, result=choose(asked)))
        return self

    def opened(self, *nodes: NodeId) -> Bench:
        for node in nodes or self.forming_nodes():
            if node not in self.record.warm:
                self.said(node, HostOpened(seconds=1.0))
        return self

    def prepared(self, *nodes: NodeId) -> Bench:
        """Hosts answer for the devices that the next generation has on them; a living process is kept."""
        for node in nodes or self.forming_nodes():
            state = self.state
            if not isinstance(state, Starting | Reforming) or state.forming is None or state.forming.formed:
                break
            here = [device for device in state.forming.plan.devices if device.node == node]
            self.said(node, self.seats(state.forming.generation, here))
        return self

    def seats(self, generation: Generation, devices: Iterable[Device]) -> SeatsPrepared:
        pids = {device: self.record.pids.get(device) or self._next_pid() for device in devices}
        return SeatsPrepared(
            generation=generation, pids=pids, addresses={device: f"{device.node}:{pid}" for device, pid in pids.items()}
        )

    def ready(self) -> Bench:
        state = self.state
        assert isinstance(state, Starting | Reforming) and state.forming and state.forming.formed
        for device in state.forming.plan.devices:
            self.said(device.node, RankReady(device=device, generation=state.forming.generation, phases={"form": 0.01}))
        return self

    def running(self) -> Bench:
        return self.submitted().probed().planned().opened().prepared().ready()

    # --- what happens then ------------------------------------------------------------------------------------------------

    def passed(self, *steps: int, node: NodeId | None = None, generation: int | None = None, ahead_s: float = 0.0) -> Bench:
        """ahead_s: of the host's clock."""
        event = StepsPassed(
            generation=Generation(generation or self.record.generation),
            answers=tuple(an_answer(s) for s in steps),
            at=tuple(self.now + ahead_s for _ in steps),
        )
        return self.said(node or self.plan.nodes[0], event)

    def exited(
        self,
        device: Device,
        *,
        report: RankReport | None = None,
        user_error: bool = False,
        exit_code: int = -9,
        message: str = "boom",
        log_tail: tuple[str, ...] = (),
    ) -> Bench:
        at = report or a_report(device, generation=self.record.generation, held=None)
        event = RankExited(
            device=device,
            pid=self.record.pids[device],
            exit_code=exit_code,
            report=at,
            message=message,
            user_error=user_error,
            log_tail=log_tail,
        )
        return self.said(device.node, event)

    def reports(self, *reports: RankReport) -> Bench:
        for report in reports:
            self.said(report.device.node, RankReported(report=report))
        return self

    def all_report(self, make: Callable[[Device], RankReport]) -> Bench:
        """Everybody who has yet to report does."""
        state = self.state
        assert isinstance(state, Reforming)
        return self.reports(*(make(device) for device in sorted(state.closing.awaited)))

    def recovered(self) -> Bench:
        """The generation that closes is settled at what is committed, and its successor becomes ready."""
        state = self.state
        if isinstance(state, Reforming):
            step, generation = self.record.committed, state.closing.generation
            self.all_report(
                lambda device: a_report(device, generation=generation, voted=step, held=step)
            ).prepared().ready()
        return self

    def saved(self, at: int, *devices: Device) -> Bench:
        for device in devices or self.plan.devices:
            shard = ShardRef(device=device, index=f"{at}-{device}", sha256="0")
            self.said(device.node, ShardSaved(generation=self.record.generation, step=Step(at), shard=shard))
        return self

    def checkpoint(self, at: int, answer: Answer | None = None) -> Bench:
        ref = CheckpointRef(step=Step(at), generation=self.record.generation, path=f"/shared/{at}", answer=answer)
        return self.tell(CheckpointCommitted(job=JOB, checkpoint=ref))

    # --- newcomers --------------------------------------------------------------------------------------------------------

    @property
    def newcomers(self) -> list[Device]:
        """Of the plan that the job is on its way to."""
        state, join = self.state, self.record.join
        assert isinstance(state, Running) and join is not None
        return sorted(set(join.plan.devices) - set(state.plan.devices))

    def copying(self) -> Bench:
        """Newcomers' processes are there, and told whom to receive from."""
        join = self.record.join
        assert join is not None
        for node in sorted({device.node for device in self.newcomers}):
            self.said(node, self.seats(join.generation, [d for d in self.newcomers if d.node == node]))
        return self

    def caught_up(self, *devices: Device) -> Bench:
        join = self.record.join
        assert join is not None
        for device in devices or self.newcomers:
            self.said(device.node, JoinerAt(device=device, generation=join.generation, step=self.record.committed))
        return self

    # --- looking ----------------------------------------------------------------------------------------------------------

    @property
    def record(self) -> JobRecord:
        return self.ended or self.kernel.jobs[JOB]

    @property
    def state(self) -> JobState:
        return self.record.state

    @property
    def plan(self) -> Plan:
        state = self.state
        if isinstance(state, Running):
            return state.plan
        assert isinstance(state, Starting | Reforming) and state.forming
        return state.forming.plan

    def device(self, rank: int) -> Device:
        return self.plan.devices[rank]

    def forming_nodes(self) -> tuple[NodeId, ...]:
        return self.plan.nodes

    def asked(self) -> ChoosePlan:
        return [effect for effect in self.effects.values() if isinstance(effect, ChoosePlan)][-1]

    def calls(self, kind: type[Request]) -> list[tuple[NodeId, Request]]:
        """Requests of this kind that came of the last input."""
        return [
            (effect.node, effect.request)
            for effect in self.last.effects.values()
            if isinstance(effect, CallHost) and isinstance(effect.request, kind)
        ]

    def form(self) -> FormGeneration:
        """The newest order to form; the same for every host."""
        orders = [
            e.request for e in self.effects.values() if isinstance(e, CallHost) and isinstance(e.request, FormGeneration)
        ]
        newest = max(order.generation for order in orders)
        found = [order for order in orders if order.generation == newest]
        assert all(order == found[0] for order in found)
        return found[0]

    def preparing(self) -> set[NodeId]:
        return {node for node, _ in self.calls(PrepareSeats)}

    def commits(self) -> list[CommitCheckpoint]:
        return [effect for effect in self.effects.values() if isinstance(effect, CommitCheckpoint)]

    def said_to_people(self) -> list[str]:
        return [entry.type for entry in self.history]

    def _next_pid(self) -> int:
        self._last_pid += 1
        return self._last_pid
