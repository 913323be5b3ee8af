"""The decisions of the control plane: pure, synchronous, deterministic.

`step(now, state, inputs)` takes what was seen, in any order and any number of times, and gives the next state, what to tell
people and what to do. It composes jobs, planner, recovery and detection, which never call each other. No clock, no
randomness, no I/O: the simulator drives this very code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import assert_never

from orchestrator.detection.classify import exit_fault, host_fault
from orchestrator.domain.cluster import Node, NodeStatus
from orchestrator.domain.effects import AddNode, ChoosePlan, Effect, KillNode, ProbeProgram
from orchestrator.domain.events import (
    CancelRequested,
    CheckpointCommitted,
    CheckpointFailed,
    Contact,
    DeadlinePassed,
    EffectDone,
    FaultKind,
    FaultRequested,
    HistoryEntry,
    HostClosed,
    HostLost,
    HostSaid,
    Input,
    JobSubmitted,
    NodeRequested,
    NodesSeen,
    PlanChosen,
    ProgramProbed,
    ProgramRefused,
    StepRecord,
)
from orchestrator.domain.ids import Device, EffectId, JobId, NodeId
from orchestrator.domain.job import (
    TERMINAL,
    Cancelled,
    Cause,
    Failed,
    Fault,
    JobRecord,
    Probing,
    Queued,
    Reforming,
    Running,
    Starting,
    Stopping,
)
from orchestrator.domain.plan import Infeasible, Plan
from orchestrator.domain.protocol import (
    HostFailed,
    HostOpened,
    KillRank,
    RankExited,
    RankFinished,
    RankReady,
    RankReported,
    SeatsPrepared,
    ShardSaved,
    StepsPassed,
)

from .deadlines import deadlines
from .draft import Draft
from .forming import begin_forming, host_opened, open_host, rank_ready, seats_prepared
from .reforming import ask_for_patience, begin_reform, give_up_waiting, host_lost, rank_exited, rank_reported, suspects
from .stopping import abandon_hosts, host_closed, stop
from .training import (
    checkpoint_committed,
    checkpoint_failed,
    commit_ready_checkpoints,
    finish_if_done,
    shard_saved,
    steps_passed,
)

PLANNING = "a plan is being chosen"


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """root: the folder every node sees, under which each job keeps its checkpoints and logs."""

    jobs: Mapping[JobId, JobRecord] = field(default_factory=dict)
    nodes: tuple[Node, ...] | None = None
    """None until the cluster has been seen: a supervisor that has just started must not take that for an empty one."""
    root: str = "."


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    """What a step came to. effects are in the changed jobs' outboxes; loose ones concern no job and may be lost."""

    state: State
    changed: Mapping[JobId, JobRecord]
    history: tuple[HistoryEntry, ...]
    steps: tuple[StepRecord, ...]
    effects: Mapping[EffectId, Effect]
    loose: tuple[KillNode | AddNode, ...]
    nodes_changed: bool


def step(now: float, state: State, inputs: Sequence[Input]) -> Stepped:
    """Apply inputs in order, then give every job that wants devices its turn. Terminal jobs leave the state."""
    return _Cycle(now, state).run(inputs)


class _Cycle:
    """One kernel step under way."""

    def __init__(self, now: float, state: State) -> None:
        self.now = now
        self.nodes = state.nodes
        self.root = state.root
        self.nodes_changed = False
        self.jobs = dict(state.jobs)
        self.drafts: dict[JobId, Draft] = {}
        self.loose: list[KillNode | AddNode] = []

    def run(self, inputs: Sequence[Input]) -> Stepped:
        for one in inputs:
            self._take(one)
        for job in list(self.jobs):
            draft = self._draft(job)
            if not draft.is_over:
                commit_ready_checkpoints(draft)
                finish_if_done(draft)
            if not draft.is_over and self.nodes is not None:
                _want_devices(draft, {node.id: node.kind for node in self.nodes})
        drafts = self.drafts.values()
        changed = {d.record.id: d.record for d in drafts if d.record != d.before}
        jobs = {job: record for job, record in {**self.jobs, **changed}.items() if not isinstance(record.state, TERMINAL)}
        return Stepped(
            state=State(jobs=jobs, nodes=self.nodes, root=self.root),
            changed=changed,
            history=tuple(entry for d in drafts for entry in d.history),
            steps=tuple(record for d in drafts for record in d.steps),
            effects={i: e for d in drafts for i, e in d.effects.items()},
            loose=tuple(self.loose),
            nodes_changed=self.nodes_changed,
        )

    # --- inputs -----------------------------------------------------------------------------------------------------------

    def _take(self, one: Input) -> None:
        match one:
            case NodesSeen(nodes=nodes):
                if nodes != self.nodes:
                    self.nodes, self.nodes_changed = nodes, True
                return
            case JobSubmitted(job=job, spec=spec, at=at):
                if job not in self.jobs:
                    self.jobs[job] = JobRecord(id=job, spec=spec, state=Probing(), created_at=at)
                    self._draft(job).emit(ProbeProgram(job=job, spec=spec))
                return
            case NodeRequested(kind=kind, num_devices=num_devices):
                self.loose.append(AddNode(kind=kind, num_devices=num_devices))
                return
            case FaultRequested():
                self._inject(one)
                return
        if one.job not in self.jobs:
            return  # late news of a job that has ended
        draft = self._draft(one.job)
        if draft.is_over:
            return
        match one:
            case CancelRequested():
                stop(draft, Cancelled(at=self.now))
            case ProgramProbed(profile=profile):
                if isinstance(draft.state, Probing):
                    draft.set(profile=profile)
                    draft.become(Queued(reason=PLANNING))
                    draft.say("probed", f"{profile.num_params:,} parameters in {profile.num_layers} layers")
            case ProgramRefused(message=message):
                if isinstance(draft.state, Probing):
                    stop(draft, Failed(at=self.now, message=message))
            case PlanChosen():
                _plan_chosen(draft, one)
            case CheckpointCommitted(checkpoint=checkpoint):
                checkpoint_committed(draft, checkpoint)
            case CheckpointFailed(step=at_step, message=message):
                checkpoint_failed(draft, at_step, message)
            case HostSaid():
                _host_said(draft, one)
            case HostLost():
                _host_lost(draft, one)
            case HostClosed(node=node):
                host_closed(draft, node)
            case EffectDone(effect=effect):
                draft.done(effect)
            case DeadlinePassed(key=key):
                _deadline_passed(draft, key)
            case _:
                assert_never(one)

    def _inject(self, fault: FaultRequested) -> None:
        if fault.fault is FaultKind.KILL_NODE and fault.node:
            self.loose.append(KillNode(node=fault.node))
        elif fault.job in self.jobs:
            draft = self._draft(fault.job)
            if isinstance(draft.state, Running) and fault.rank is not None:
                seats = draft.state.plan.seats
                if fault.rank < len(seats):
                    device = seats[fault.rank].device
                    draft.call(device.node, KillRank(device=device))

    # --- views ------------------------------------------------------------------------------------------------------------

    def _draft(self, job: JobId) -> Draft:
        if job not in self.drafts:
            self.drafts[job] = Draft(self.jobs[job], self.now, self._free_for, self._num_devices, self.root)
        return self.drafts[job]

    def _num_devices(self) -> dict[NodeId, int]:
        return {node.id: node.num_devices for node in self.nodes or () if node.status is NodeStatus.UP}

    def _free_for(self, job: JobId) -> frozenset[Device]:
        if self.nodes is None:  # what it holds is all that it is known to have
            draft = self._draft(job)
            return _claimed(draft.before) | _claimed(draft.record)
        taken = {
            device
            for other, record in self.jobs.items()
            if other != job
            for device in _claimed(self.drafts[other].record if other in self.drafts else record)
        }
        free = {d for node in self.nodes if node.status is NodeStatus.UP for d in node.devices()}
        return frozenset(free - taken)


def _claimed(record: JobRecord) -> frozenset[Device]:
    """Devices a job holds or is about to."""
    state = record.state
    claimed = set(record.pids)
    if isinstance(state, Running):
        claimed |= set(state.plan.devices)
    if isinstance(state, Starting | Reforming) and state.forming:
        claimed |= set(state.forming.plan.devices)
    if record.target:
        claimed |= set(record.target.devices)
    return frozenset(claimed)


# --- what a job is told --------------------------------------------------------------------------------------------------


def _host_said(draft: Draft, said: HostSaid) -> None:
    node = said.node
    if node in draft.record.unreachable:
        draft.set(unreachable=draft.record.unreachable - {node})
        draft.say("contact_restored", f"{node} answers again")
    if node not in draft.trusted_hosts:
        return  # it was given up
    match said.event:
        case HostOpened():
            host_opened(draft, node)
        case SeatsPrepared():
            seats_prepared(draft, said.event)
        case RankReported(report=report):
            rank_reported(draft, report)
        case RankExited():
            _rank_exited(draft, said.event)
        case RankReady(device=device, generation=generation, phases=phases):
            rank_ready(draft, device, generation, dict(phases))
        case StepsPassed():
            steps_passed(draft, said.event)
        case ShardSaved():
            shard_saved(draft, said.event)
        case RankFinished():
            pass  # the commit of the last step and its checkpoint end a job; see training.finish_if_done
        case HostFailed(message=message, log_tail=tail):
            if isinstance(draft.state, Starting) and not draft.record.incidents:
                stop(draft, Failed(at=draft.now, message=f"the host on {node} failed: {message}", log_tail=tail))
            else:
                host_lost(draft, node, host_fault(node, message, draft.now), False)
        case _:
            assert_never(said.event)


def _rank_exited(draft: Draft, exited: RankExited) -> None:
    if draft.record.pids.get(exited.device) != exited.pid:
        return  # an earlier process on that device
    if exited.user_error:
        failed = Failed(
            at=draft.now,
            message=exited.message or f"the training program exited with code {exited.exit_code}",
            device=exited.device,
            exit_code=exited.exit_code,
            log_tail=exited.log_tail,
        )
        stop(draft, failed)
        return
    rank_exited(draft, exited.device, exited.report, exit_fault(exited, draft.now))


def _host_lost(draft: Draft, lost: HostLost) -> None:
    """Unreachable is not failed: without evidence a running generation is left alone."""
    if lost.node not in draft.record.hosts:
        return
    is_gone = lost.contact is Contact.GONE
    if isinstance(draft.state, Stopping):
        if is_gone:
            host_closed(draft, lost.node)
        return
    if lost.node in draft.record.avoided and not is_gone:
        return  # it is being closed
    if not is_gone and lost.node not in suspects(draft):
        if lost.node not in draft.record.unreachable:
            draft.set(unreachable=draft.record.unreachable | {lost.node})
            draft.say("contact_lost", f"{lost.node} does not answer ({lost.message}); training goes on while steps commit")
        return
    host_lost(draft, lost.node, host_fault(lost.node, lost.message, draft.now), is_gone)


def _deadline_passed(draft: Draft, key: str) -> None:
    if key not in deadlines(draft.record):
        return
    match key.split(":")[0]:
        case "probe":
            stop(draft, Failed(at=draft.now, message="the program could not be described in time; see its imports"))
        case "stop":
            abandon_hosts(draft)
        case "settle":
            ask_for_patience(draft)
        case "patience" | "isolated":
            give_up_waiting(draft)
        case "grow":
            _give_up_growing(draft)
        case "retry":
            draft.set(avoided=draft.record.avoided & draft.record.hosts)
        case "open" | "prepare":
            _give_up_on_slow_hosts(draft)
        case "form":
            begin_reform(
                draft, Fault(cause=Cause.HANG, message="the generation did not become ready in time", at=draft.now)
            )


def _give_up_on_slow_hosts(draft: Draft) -> None:
    state = draft.state
    assert isinstance(state, Starting | Reforming)
    if state.forming is None:
        return
    slow = {d.node for d in state.forming.plan.devices if d not in state.forming.addresses}
    if isinstance(state, Starting) and slow == set(state.forming.plan.nodes):
        stop(draft, Failed(at=draft.now, message=f"{', '.join(sorted(slow))} did not become ready in time"))
        return
    for node in sorted(slow):
        host_lost(draft, node, host_fault(node, "it did not become ready in time", draft.now), False)


def _give_up_growing(draft: Draft) -> None:
    """The hosts of a larger plan do not become warm: train on without them."""
    target = draft.record.target
    assert target is not None
    slow = sorted(set(target.nodes) - draft.record.warm)
    draft.say("growing_given_up", f"no larger plan is ready in time (cold: {', '.join(slow) or 'none'}); training goes on")
    draft.set(target=None, considered=frozenset())
    for node in slow:
        host_lost(draft, node, host_fault(node, "it did not become ready in time", draft.now), False)


# --- plans ---------------------------------------------------------------------------------------------------------------


def _plan_chosen(draft: Draft, chosen: PlanChosen) -> None:
    if not draft.record.planning or chosen.generation != draft.next_generation():
        return
    draft.set(planning=False)
    state, result = draft.state, chosen.result
    if isinstance(result, Infeasible):
        if isinstance(state, Queued):
            if result.forever:
                stop(draft, Failed(at=draft.now, message=result.reason))
            elif state.reason != result.reason:
                draft.become(Queued(reason=result.reason))
                draft.say("queued", result.reason)
        elif isinstance(state, Reforming) and state.forming is None and state.waiting != result.reason:
            draft.become(replace(state, waiting=result.reason))
            draft.say("waiting", f"{result.reason}; survivors keep step {draft.record.committed} in memory")
        return
    if not draft.usable >= set(result.devices) or draft.record.avoided & set(result.nodes):
        draft.set(considered=frozenset())  # the cluster changed meanwhile: ask again
        return
    if isinstance(state, Queued) or (isinstance(state, Reforming) and state.forming is None):
        begin_forming(draft, result)
    elif isinstance(state, Running) and result.world_size > state.plan.world_size:
        _warm_up_to(draft, result)


def _warm_up_to(draft: Draft, plan: Plan) -> None:
    """Train on while the hosts of a larger plan start; the next generation begins when they are warm."""
    draft.set(target=plan)
    draft.say("growing", f"new devices: {plan.describe()} next; its hosts are warmed while training goes on")
    for node in plan.nodes:
        open_host(draft, node)


def _want_devices(draft: Draft, kinds: Mapping[NodeId, str]) -> None:
    """Ask for a plan where one could be better than what there is, and move to a larger one that is ready."""
    lost = draft.record.avoided - set(draft.num_devices)
    if lost:  # should they come back, they are new machines
        draft.set(avoided=draft.record.avoided - lost)
    _grow_if_warm(draft)
    record, state = draft.record, draft.state
    if record.profile is None or record.planning or not isinstance(draft.state, Queued | Running | Reforming):
        return
    usable = draft.usable
    trusted = frozenset(device for device in usable if device.node not in record.avoided)
    gone = record.considered - usable
    if gone:
        draft.set(considered=record.considered - gone)
    considered = draft.record.considered
    match draft.state:
        case Queued():
            options = [trusted]
        case Running(plan=plan):
            considered = considered | set(plan.devices)
            options = [trusted] if record.target is None else []
        case Reforming(forming=None):
            options = [draft.warm_devices(trusted), trusted]  # what is warm takes a blink, what is not takes seconds
        case _:
            return
    for devices in options:
        if devices - considered or (isinstance(state, Queued) and state.reason == PLANNING):
            draft.set(planning=True, considered=considered | devices)
            draft.emit(
                ChoosePlan(
                    job=record.id,
                    generation=draft.next_generation(),
                    spec=record.spec,
                    profile=record.profile,
                    devices=tuple((device, kinds[device.node]) for device in sorted(devices)),
                    keep=tuple(sorted(record.pids)),
                )
            )
            return


def _grow_if_warm(draft: Draft) -> None:
    record, state = draft.record, draft.state
    if record.target is None or not isinstance(state, Running):
        return
    needed = {*state.plan.nodes, *record.target.nodes}
    if not draft.usable >= set(record.target.devices):
        draft.set(target=None)
    elif record.warm >= needed and not record.unreachable & needed:  # what trains is never closed for one that cannot form
        fault = Fault(cause=Cause.GROW, message=f"a larger plan is ready: {record.target.describe()}", at=draft.now)
        begin_reform(draft, fault, target=record.target)
