"""The decisions of the control plane: pure, synchronous, deterministic.

`step(now, state, inputs)` takes what was seen, in any order and any number of times, and gives the next state, what to tell
people and what to do. It composes jobs, planner, recovery and detection, which never call each other. No clock, no
randomness, no I/O: the simulator drives this very code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import assert_never

from orchestrator.detection.straggler import Track
from orchestrator.domain.admission import Admission
from orchestrator.domain.cluster import Node, NodeStatus
from orchestrator.domain.cordon import Cordon
from orchestrator.domain.effects import AddNode, Effect, KillNode, Loose, ProbeProgram
from orchestrator.domain.events import (
    CancelRequested,
    CheckpointCommitted,
    CheckpointFailed,
    CheckpointNow,
    CheckpointsPruned,
    CordonRequested,
    DeadlinePassed,
    EffectDone,
    HistoryEntry,
    HostClosed,
    HostHeard,
    HostLost,
    HostSaid,
    Input,
    InstantCame,
    JobCommand,
    JobSubmitted,
    NodeChecked,
    NodeRequested,
    NodesSeen,
    NodeStruck,
    PauseRequested,
    PlanChosen,
    PriorityRequested,
    ProgramProbed,
    ProgramRefused,
    QuotaRequested,
    ReleaseRequested,
    ResizeRequested,
    ResumeRequested,
    StepRecord,
    UncordonRequested,
)
from orchestrator.domain.faults import FaultKind, FaultRequested
from orchestrator.domain.ids import Device, EffectId, JobId, NodeId
from orchestrator.domain.job import JobRecord
from orchestrator.domain.kinds import DeviceKind, table
from orchestrator.domain.quarantine import Quarantine
from orchestrator.domain.queue import Project, Waiting
from orchestrator.domain.rows import corrected
from orchestrator.domain.state import PLANNING, TERMINAL, Cancelled, Failed, Probing, Queued

from .admitting import Admissions
from .admitting import tell as tell_admissions
from .arbitrating import Arbitrated, arbitrated, claimed, queue_of, standing
from .asked import asked_came_to_nothing, checkpoint_now, save_where_asked
from .balancing import balance
from .cordons import Cordons
from .draft import Draft
from .faulting import inject, judge_faults, node_struck
from .hearing import contact_restored, deadline_passed, host_said, host_unheard
from .keeping import checkpoint_committed, checkpoint_failed, checkpoints_pruned, commit_ready_checkpoints
from .moving import leave_drained_hosts, look_again, resize
from .pacing import keep_pace
from .pausing import pause, rest_came_to_nothing, rest_where_asked, resume
from .sparing import want_spares
from .stopping import host_closed, stop
from .testing import attend
from .timing import keep_time
from .training import finish_if_done
from .wanting import plan_chosen, want_devices
from .ward import Ward
from .yielding import make_room, note_wait


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """root: the folder every node sees, under which each job keeps its checkpoints and logs."""

    jobs: Mapping[JobId, JobRecord] = field(default_factory=dict)
    nodes: tuple[Node, ...] | None = None
    """None until the cluster has been seen: a supervisor that has just started must not take that for an empty one."""
    root: str = "."
    quarantine: Mapping[Device, Quarantine] = field(default_factory=dict)
    """Of the cluster: it outlives jobs."""
    cordons: Mapping[NodeId, Cordon] = field(default_factory=dict)
    """So do these."""
    admissions: Mapping[NodeId, Admission] = field(default_factory=dict)
    """And these."""
    checks: bool = False
    """Whether nodes are checked before they are used."""
    rows: tuple[DeviceKind, ...] = ()
    """Kinds of device that the configuration adds or describes otherwise."""
    tracks: Mapping[JobId, Mapping[Device, Track]] = field(default_factory=dict)
    """How fast devices have been seen to be: an observation, which is never stored."""
    projects: Mapping[str, Project] = field(default_factory=dict)
    """Those whose quota was ever set."""
    queue: tuple[Waiting, ...] | None = None
    """As readers were shown it last; None: not since this supervisor started."""
    arbitrated: Arbitrated | None = None
    """Who gets which devices, and of which state that is the answer: found out again by whoever starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    """What a step came to. effects are in the changed jobs' outboxes; loose ones concern no job and may be lost."""

    state: State
    changed: Mapping[JobId, JobRecord]
    history: tuple[HistoryEntry, ...]
    steps: tuple[StepRecord, ...]
    effects: Mapping[EffectId, Effect]
    loose: tuple[Loose, ...]
    nodes_changed: bool
    quarantine_changed: bool = False
    cordons_changed: bool = False
    admissions_changed: bool = False
    projects_changed: bool = False
    queue_changed: bool = False


def step(now: float, state: State, inputs: Sequence[Input]) -> Stepped:
    """Apply inputs in order, then give every job that wants devices its turn. Terminal jobs leave the state."""
    return _Cycle(now, state).run(inputs)


class _Cycle:
    """One kernel step under way."""

    def __init__(self, now: float, state: State) -> None:
        self.now = now
        self.nodes = state.nodes
        self.root = state.root
        self.rows = state.rows
        self.nodes_changed = False
        self.ward = Ward(state.quarantine, now)
        self.cordons = Cordons(state.cordons, now)
        self.admissions = Admissions(state.admissions, now, state.checks)
        self.jobs = dict(state.jobs)
        self.tracks = state.tracks
        self.projects = dict(state.projects)
        self.before = state
        self.arbitrated: Arbitrated | None = None
        self.drafts: dict[JobId, Draft] = {}
        self.loose: list[Loose] = []
        self._claims: dict[JobId, tuple[tuple[object, ...], frozenset[Device]]] = {}
        self._had: dict[JobId, frozenset[Device]] = {}
        """What each that has changed claimed before this step."""
        self._free: dict[JobId, tuple[tuple[object, ...], frozenset[Device]]] = {}
        self._sizes: tuple[object, dict[NodeId, int]] = None, {}
        self._its_kinds: tuple[object, dict[NodeId, str]] = None, {}
        """Each with what it was worked out from: jobs ask for these many times in one step."""

    def run(self, inputs: Sequence[Input]) -> Stepped:
        for one in inputs:
            self._take(one)
        self._admit()
        self.arbitrated = None  # what was told may have changed it
        nodes = {node.id: node for node in self.nodes or ()}
        for job in list(self.jobs):
            if self._waits_on(job):
                continue
            draft = self._draft(job)
            if not draft.is_over:
                commit_ready_checkpoints(draft)
                save_where_asked(draft)
                keep_pace(draft)
                balance(draft)
                finish_if_done(draft)
                rest_where_asked(draft)
            if not draft.is_over and self.nodes is not None:
                allotment = self._arbitration().allotment(job)
                make_room(draft, allotment)
                want_spares(draft, nodes)
                want_devices(draft, nodes, allotment)
                leave_drained_hosts(draft)
                wait = standing(draft.record, allotment, True)
                note_wait(draft, wait.reason if wait else None, wait.message if wait else "")
                keep_time(draft, wait)
            judge_faults(draft)
        drafts = self.drafts.values()
        self._accuse()
        if self.nodes is not None:
            attend(self.ward, drafts, frozenset(self._num_devices()))
            self.loose += [KillNode(node=node) for node in self.cordons.settle(self.nodes or (), self._occupied())]
        changed = {d.record.id: d.record for d in drafts if d.record is not d.before and d.record != d.before}
        jobs = {job: record for job, record in {**self.jobs, **changed}.items() if not isinstance(record.state, TERMINAL)}
        known = self.arbitrated if self.nodes is not None else None
        queue = queue_of(jobs.values(), known, self._taken_by_others)
        return Stepped(
            state=State(
                jobs=jobs,
                nodes=self.nodes,
                root=self.root,
                quarantine=self.ward.known,
                cordons=self.cordons.known,
                admissions=self.admissions.known,
                checks=self.admissions.checks,
                rows=self.rows,
                tracks={d.record.id: d.tracks for d in drafts if d.tracks and d.record.id in jobs},
                projects=self.projects,
                queue=queue,
                arbitrated=known,
            ),
            changed=changed,
            history=tuple(entry for d in drafts for entry in d.history),
            steps=tuple(record for d in drafts for record in d.steps),
            effects={i: e for d in drafts for i, e in d.effects.items()},
            loose=tuple(self.loose),
            nodes_changed=self.nodes_changed,
            quarantine_changed=self.ward.has_changed,
            cordons_changed=self.cordons.has_changed,
            admissions_changed=self.admissions.has_changed,
            projects_changed=self.projects != self.before.projects,
            queue_changed=queue != self.before.queue,
        )

    # --- inputs -----------------------------------------------------------------------------------------------------------

    def _take(self, one: Input) -> None:
        match one:
            case NodesSeen(nodes=nodes):
                if nodes != self.nodes:
                    self.nodes, self.nodes_changed = nodes, True
                    leaving = {node for node, one in self.cordons.known.items() if one.removes}
                    self.admissions.see(nodes, self._occupied(), leaving)
                    for here in nodes:
                        if here.leaving and here.status is NodeStatus.UP and here.id not in leaving:
                            self._cordon(CordonRequested(node=here.id, drain=True, remove=True))
                return
            case NodeChecked():
                self.admissions.hear(one, self._kinds(), table(self.rows))
                return
            case JobSubmitted(job=job, spec=spec, at=at, by=by):
                if job not in self.jobs:
                    self.jobs[job] = JobRecord(id=job, spec=spec, state=Probing(), created_at=at, by=by)
                    self._draft(job).emit(ProbeProgram(job=job, spec=spec))
                return
            case NodeRequested(kind=kind, num_devices=num_devices, labels=labels, count=count):
                self.loose += [AddNode(kind=kind, num_devices=num_devices, labels=labels)] * count
                return
            case FaultRequested():
                self._inject(one)
                return
            case NodeStruck():
                for job in list(self.jobs):
                    node_struck(self._draft(job), one)
                return
            case ReleaseRequested(node=node):
                self._release(node)
                return
            case CordonRequested() | UncordonRequested():
                self._cordon(one)
                return
            case QuotaRequested(project=project, max_devices=max_devices):
                self.projects[project] = Project(name=project, max_devices=max_devices)
                return
            case InstantCame():
                return  # what hangs on it is looked at in every step
        if one.job not in self.jobs:
            return  # late news of a job that has ended
        draft = self._draft(one.job)
        if draft.is_over:
            return
        draft.actor = one.by if isinstance(one, JobCommand) else ""
        match one:
            case CheckpointNow():
                checkpoint_now(draft)
            case ResizeRequested(size=size):
                resize(draft, size)
            case PriorityRequested(priority=priority):
                if priority != draft.record.priority:
                    draft.say("priority_changed", f"priority {priority}, which was {draft.record.priority}")
                    draft.turn(priority=priority)
            case PauseRequested():
                pause(draft)
            case ResumeRequested():
                resume(draft)
            case CancelRequested(by=asker):
                stop(draft, Cancelled(at=self.now, by=asker))
            case ProgramProbed(profile=profile, start=start):
                if isinstance(draft.state, Probing):
                    draft.set(profile=profile, checkpoint=start)
                    draft.become(Queued(reason=PLANNING))
                    draft.say("probed", f"{profile.num_params:,} parameters in {profile.num_layers} layers")
            case ProgramRefused(message=message):
                if isinstance(draft.state, Probing):
                    stop(draft, Failed(at=self.now, message=message))
            case PlanChosen():
                plan_chosen(draft, one)
            case CheckpointCommitted(checkpoint=checkpoint):
                checkpoint_committed(draft, checkpoint)
            case CheckpointFailed(step=at_step, message=message):
                checkpoint_failed(draft, at_step, message)
                asked_came_to_nothing(draft, at_step, message)
                rest_came_to_nothing(draft, at_step, message)
            case CheckpointsPruned():
                checkpoints_pruned(draft, one)
            case HostSaid():
                host_said(draft, one)
            case HostHeard(node=node):
                contact_restored(draft, node)
            case HostLost():
                host_unheard(draft, one)
            case HostClosed(node=node):
                host_closed(draft, node)
            case EffectDone(effect=effect):
                draft.done(effect)
            case DeadlinePassed(key=key):
                deadline_passed(draft, key)
            case _:
                assert_never(one)
        draft.actor = ""

    def _release(self, node: NodeId) -> None:
        self.admissions.release(node)
        for one in self.ward.release(node):
            if one.job in self.jobs:
                said = f"{one.device} may be used again: an operator released {node}"
                self._draft(one.job).say("released", said, device=str(one.device))
        for job in self.jobs:
            if node in self.jobs[job].bad_ends:
                draft = self._draft(job)
                ends = {bad: times for bad, times in draft.record.bad_ends.items() if bad != node}
                draft.set(barred=draft.record.barred - {node}, bad_ends=ends)

    def _cordon(self, asked: CordonRequested | UncordonRequested) -> None:
        is_news = self.cordons.cordon(asked) if isinstance(asked, CordonRequested) else self.cordons.lift(asked.node)
        for job in list(self.jobs) if is_news else ():
            draft = self._draft(job)
            if draft.is_over:
                continue
            if isinstance(asked, CordonRequested) and asked.drain and asked.node in draft.record.hosts:
                by = f" within {asked.deadline_s:g} s" if asked.deadline_s is not None else ""
                draft.say("draining", f"{asked.node} is to be left{by}", node=asked.node)
            look_again(draft)

    def _admit(self) -> None:
        """Ask for checks that are due, and have jobs look at nodes that may be used again, or no longer."""
        self.loose += self.admissions.due()
        refused, admitted = self.admissions.newly_refused, self.admissions.newly_admitted
        for job in list(self.jobs) if refused or admitted else ():
            draft = self._draft(job)
            if not draft.is_over:
                tell_admissions(draft, refused, admitted)
                if any(one.node in draft.record.hosts for one in refused):
                    look_again(draft)

    def _accuse(self) -> None:
        """Have nodes checked that a fault points at, now that the job has recovered from it."""
        for draft in self.drafts.values():
            before, after = draft.before.incidents[-1:], draft.record.incidents[-1:]
            if after and after[0].pause_s is not None and before and before[0].pause_s is None:
                self.admissions.accuse(after[0])
        self.loose += self.admissions.due()

    def _inject(self, fault: FaultRequested) -> None:
        is_one = fault.job is not None and fault.fault is not FaultKind.NODE_KILL
        jobs = [fault.job] if is_one and fault.job is not None else list(self.jobs)
        drafts = [draft for job in jobs if job in self.jobs and not (draft := self._draft(job)).is_over]
        self.loose.extend(inject(drafts, fault))

    # --- views ------------------------------------------------------------------------------------------------------------

    def _draft(self, job: JobId) -> Draft:
        if job not in self.drafts:
            self.drafts[job] = Draft(
                self.jobs[job],
                self.now,
                self._free_for,
                self._num_devices,
                self._kinds,
                self.root,
                self.ward,
                lambda: self.cordons.draining | self.admissions.refused,
                self.tracks.get(job),
                lambda: self.admissions.awaits_checks,
                lambda: frozenset(self._arbitration().snapshot.devices),
                lambda: corrected(self.rows, self._kinds(), self.admissions.known.values()),
            )
        return self.drafts[job]

    def _kinds(self) -> dict[NodeId, str]:
        if self._its_kinds[0] is not self.nodes:
            self._its_kinds = self.nodes, {node.id: node.kind for node in self.nodes or ()}
        return self._its_kinds[1]

    def _num_devices(self) -> dict[NodeId, int]:
        if self._sizes[0] is not self.nodes:
            there = {node.id: node.num_devices for node in self.nodes or () if node.status is not NodeStatus.LOST}
            self._sizes = self.nodes, there
        return self._sizes[1]

    def _free_for(self, job: JobId) -> frozenset[Device]:
        draft = self._draft(job)
        mine = self._claimed_by(job)
        if draft.before is not draft.record:
            if job not in self._had:
                self._had[job] = claimed(draft.before)
            mine |= self._had[job]
        if self.nodes is None:  # what it holds is all that it is known to have
            return mine - self.ward.out
        answer, out, taken = self._arbitration(), self.ward.out, self._taken_by_others(job)
        known = self._free.get(job)
        closed = frozenset[NodeId]()
        if self.cordons.known or self.admissions.unfit:
            record = draft.record  # a host of its own, too: of those it had there, each may have ended for now
            present = {device.node for device in mine} | (record.hosts - record.avoided)
            closed = self.cordons.closed_to(present) | (self.admissions.unfit - present)
        key = (mine, draft.record.turn, draft.record.spec.project, answer.answer, out, taken, self.nodes, closed)
        if known is not None and known[0] == key:
            return known[1]
        allotment = answer.allotment(job)
        granted = (allotment.grant if allotment else frozenset()) | (mine - draft.record.turn.yields)
        if draft.record.spec.project not in answer.snapshot.quotas:
            granted |= answer.answer.left  # nobody wants it: as a spare it may be of use
        up = {node.id for node in self.nodes if node.status is NodeStatus.UP and node.id not in closed}
        found = frozenset(device for device in granted if device.node in up) - taken - out
        self._free[job] = key, found
        return found

    def _claimed_by(self, job: JobId) -> frozenset[Device]:
        record = self._record(job)
        key = (record.pids, record.state, record.target, record.spares)
        known = self._claims.get(job)
        if known is None or any(a is not b for a, b in zip(known[0], key, strict=True)):
            known = self._claims[job] = key, claimed(record)
        return known[1]

    def _arbitration(self) -> Arbitrated:
        """As of before the first job of this step asked, or asked again once all inputs were taken."""
        if self.arbitrated is None:
            self.arbitrated = arbitrated(
                self.before.arbitrated,
                (record for record in map(self._record, self.jobs) if not isinstance(record.state, TERMINAL)),
                self.nodes or (),
                self.cordons.closed_to(()) | self.admissions.unfit,
                self.cordons.draining,
                self.ward.out,
                dict(self.projects),
            )
        return self.arbitrated

    def _waits_on(self, job: JobId) -> bool:
        """Nothing has been told of it, and it waits for what it waited for in the step before: most of a long queue."""
        record, before = self.jobs[job], self.before.arbitrated
        if job in self.drafts or not isinstance(record.state, Queued) or self.nodes is None or before is None:
            return False
        is_timed = record.spec.start_by_s or record.pause is not None or record.injected
        allotment = self._arbitration().allotment(job)
        is_told = allotment is not None and allotment.wait is not None and allotment.wait.reason is record.turn.wait
        return is_told and not is_timed and self._arbitration().answer is before.answer and job in before.claims

    def _record(self, job: JobId) -> JobRecord:
        return self.drafts[job].record if job in self.drafts else self.jobs[job]

    def _taken_by_others(self, job: JobId) -> frozenset[Device]:
        return frozenset[Device]().union(*(self._claimed_by(other) for other in self.jobs if other != job))

    def _occupied(self) -> frozenset[NodeId]:
        """Nodes on which any job has anything."""
        open_ones = [record for job in self.jobs if not isinstance((record := self._record(job)).state, TERMINAL)]
        return frozenset(
            node for record in open_ones for node in (*record.hosts, *(device.node for device in claimed(record)))
        )
