"""The promises, as checks made while the world runs. Each raises Violation with what was promised and what happened."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from orchestrator.domain.admission import Admission, Admittance
from orchestrator.domain.cordon import Cordon
from orchestrator.domain.effects import ChoosePlan
from orchestrator.domain.events import StepRecord
from orchestrator.domain.failure import Cause
from orchestrator.domain.faults import Verdict
from orchestrator.domain.ids import Device, Generation, JobId, NodeId, Step, Term
from orchestrator.domain.job import JobRecord
from orchestrator.domain.layout import partners
from orchestrator.domain.memo import Reign
from orchestrator.domain.profile import Interval, joined
from orchestrator.domain.quarantine import Quarantine
from orchestrator.domain.queue import Project
from orchestrator.domain.state import TERMINAL, Reforming, Running, Starting, Stopping
from orchestrator.ports import Commit

from .memory import Violation, uncovered
from .scenario import Scenario, profile, reference

MAX_OUTBOX = 64
"""Effects that may be outstanding at once in a cluster of this size; more means that some are never done."""


MAX_ASKED = 10
"""Times that a job may ask which plan there is on the same devices for the same generation; more, and nobody remembers."""
MAX_REBALANCED = 6
"""Times within an hour that a job may share out its work anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """A backup of the store, or what a replica has got. rolled_back: what was counted until then."""

    jobs: Mapping[JobId, JobRecord]
    num_commands: int
    cursor: int
    term: Term
    commits: int
    last: Commit | None
    quarantine: tuple[Quarantine, ...]
    cordons: tuple[Cordon, ...]
    admissions: tuple[Admission, ...]
    projects: tuple[Project, ...]
    rolled_back: Mapping[JobId, int]
    reigns: tuple[Reign, ...]


class Checker:
    """held: what living ranks that can be reached hold of a job at a step, of generations after one.

    lives: whether a generation may still pass a step.
    """

    def __init__(
        self,
        scenario: Scenario,
        held: Callable[[JobRecord, Step, Generation], list[Interval]],
        lives: Callable[[JobId, Generation], bool],
    ) -> None:
        self._scenario = scenario
        self._lives = lives
        self._held = held
        self._records: Mapping[JobId, JobRecord] = {}
        self._quarantine: tuple[Quarantine, ...] = ()
        self._distrusted: dict[JobId, Generation] = {}
        """Memory of this generation and of those before it counts no more."""
        self._quotas: dict[str, int | None] = {}
        self._drained: frozenset[NodeId] = frozenset()
        self._admitted: frozenset[NodeId] = frozenset()
        self._started: dict[JobId, Generation] = {}
        self._passed: dict[tuple[JobId, Generation], Step] = {}
        """The newest step each generation has passed, whether or not anybody lived to see it."""
        self.curves: dict[JobId, dict[Step, StepRecord]] = defaultdict(dict)
        self.rolled_back: Counter[JobId] = Counter()
        self._forgotten: set[JobId] = set()
        """Jobs of which the store has ever forgotten anything."""
        self._asked: Counter[tuple[JobId, Generation, tuple[Device, ...]]] = Counter()
        self.votes = 0

    # --- in the arena -----------------------------------------------------------------------------------------------------

    def started(self, job: JobId, generation: Generation) -> None:
        self._started[job] = max(self._started.get(job, Generation(0)), generation)

    def vote_completed(self, job: JobId, generation: Generation, step: Step) -> None:
        """One generation trains a job, and none does after it was settled."""
        self.votes += 1
        where = f"step {step} passes in generation {generation} of {job}"
        newest = self._started.get(job, Generation(0))
        if newest > generation:
            if job not in self._forgotten or self._lives(job, newest):
                raise Violation(f"{where} after generation {newest} had started")
            self._started[job] = generation  # the store has forgotten the other one, and all who knew of it are gone
        record = self._records.get(job)  # None: a store that went back knows nothing of it
        state = record.state if record is not None else None
        if isinstance(state, Reforming) and state.closing.settlement and state.closing.generation == generation:
            raise Violation(f"{where} after its settlement")
        self._passed[job, generation] = step

    # --- in the store -----------------------------------------------------------------------------------------------------

    def went_back(self, copied: Copied) -> None:
        """The store has forgotten what it was told since: what was counted in records, settled, and held against nodes.

        What training came to stays: no step comes out otherwise, whoever has forgotten it.
        """
        self._forgotten |= self._records.keys()
        self._records, self.rolled_back = dict(copied.jobs), Counter(copied.rolled_back)
        self._distrusted.clear()
        self._quarantine = copied.quarantine
        self._drained = frozenset(one.node for one in copied.cordons if one.drains)
        self._admitted = _fit(copied.admissions)
        self._quotas = {one.name: one.max_devices for one in copied.projects}

    def committed(self, before: Mapping[JobId, JobRecord], commit: Commit) -> None:
        if commit.admissions is not None:
            fit = _fit(commit.admissions)
            self._admitted, known = fit, self._admitted | fit
        else:
            known = self._admitted
        drained = self._drained
        if commit.cordons is not None:
            self._drained = frozenset(one.node for one in commit.cordons if one.drains)
            drained &= self._drained  # one that is lifted in this commit may have been before the job was planned
        is_rewritten = any(entry.type == "store_went_back" for entry in commit.history)
        for job, record in commit.jobs.items():
            old = before.get(job)
            if is_rewritten:  # by one that remembers what the store has forgotten
                self.rolled_back[job] = sum(one.rolled_back for one in record.incidents)
            counted = sum(int(str(e.data["steps"])) for e in commit.history if e.job == job and e.type == "rolled_back")
            if counted:
                self.rolled_back[job] += 0 if is_rewritten else counted
                self._check_rollback(record)
            steps = [one for one in commit.steps if one.job == job]
            committed = old.committed if old else Step(0)
            if is_rewritten:
                # It goes on where it was: the curve's readers miss what the store has forgotten.
                committed = Step(steps[0].answer.step - 1) if steps else min(committed, record.committed)
            self._check_steps(record, committed, steps, counted)
            # After the steps: one commit may record some, settle them and close the generation that followed.
            self._check_settlement(record)
            if len(record.outbox) > MAX_OUTBOX:
                raise Violation(f"{len(record.outbox)} effects of {job} are outstanding")
            if isinstance(record.state, TERMINAL) and record.outbox:
                raise Violation(f"{job} is over and {len(record.outbox)} effects are outstanding")
            self._check_asks(old, record)
            self._check_risk(record)
            self._check_balance(record)
            if not is_rewritten:  # cordons are as old as what the store remembers
                self._check_drained(old, record, drained)
            if self._scenario.checks:
                self._check_admitted(old, record, known | record.hosts if is_rewritten else known)
        self._records = records = {**before, **commit.jobs}
        self._check_devices(records)
        self._check_quotas(before, records, commit)
        self._check_preemption(before, records, commit)
        if commit.quarantine is not None:
            self._quarantine = commit.quarantine
        self._check_quarantine(records)

    def _check_steps(self, record: JobRecord, committed: Step, steps: list[StepRecord], counted: int) -> None:
        """Each step once, in order, with the reference's answer; back only where it was counted."""
        curve = self.curves[record.id]
        for one in steps:
            step = one.answer.step
            if one.answer != replace(reference(record.spec, step), maxima=()):
                raise Violation(f"step {step} of {record.id} is recorded with {one.answer}")
            # Steps that a store has forgotten are told nobody again: its curve misses them.
            is_gap = record.id in self._forgotten and all(Step(s) in curve for s in range(committed + 1, step))
            if step != committed + 1 and not (is_gap and step > committed):
                raise Violation(f"step {step} of {record.id} is recorded after step {committed}")
            curve[step] = one
            committed = step
        if record.committed < committed - counted:
            raise Violation(f"{record.id} goes from step {committed} to {record.committed} with {counted} steps counted")
        first = self._scenario.start_of(record.id) + 1
        if record.committed > committed and not all(Step(s) in curve for s in range(first, record.committed + 1)):
            raise Violation(f"{record.id} goes from step {committed} to {record.committed} without recording them")

    def _check_settlement(self, record: JobRecord) -> None:
        """What anybody who could be asked saw pass is committed, and nothing that did not pass."""
        state = record.state
        if not isinstance(state, Reforming) or state.closing.settlement is None:
            return
        passed = self._passed.get((record.id, state.closing.generation), Step(0))
        seen = [report.passed for report in state.closing.reports.values() if Step(0) < report.passed <= passed]
        settled = state.closing.settlement.step
        where = f"generation {state.closing.generation} of {record.id} is settled at {settled}"
        if seen and max(seen) > settled and record.void != state.closing.generation:
            raise Violation(f"{where}, and {max(seen)} was seen to pass")
        if settled > max([passed, self._scenario.start_of(record.id), *self.curves[record.id]]):
            raise Violation(f"{where}, which never passed")

    def _check_rollback(self, record: JobRecord) -> None:
        """Memory that living ranks hold is used before any checkpoint, unless it was part of a disagreement."""
        state = record.state
        if not isinstance(state, Reforming) or state.closing.settlement is None:
            return  # more has happened in the same commit
        if state.closing.settlement.is_distrusted:
            self._distrusted[record.id] = state.closing.generation
            return  # nobody's memory counts
        step = state.closing.settlement.step
        held = self._held(record, step, self._distrusted.get(record.id, Generation(0)))
        whole = [Interval(line.name, 0, line.numel) for line in profile().lines]
        if held and not uncovered(whole, joined(held)):
            raise Violation(f"{record.id} is rolled back from step {step}, which living ranks hold whole")

    def _check_balance(self, record: JobRecord) -> None:
        """It does not follow every device that comes and goes, and what it says of a change is there to be read."""
        at = [one.closed_at or 0.0 for one in record.incidents if one.fault.cause is Cause.BALANCE]
        for number, last in enumerate(at):
            if sum(last - 3600.0 < other <= last for other in at[: number + 1]) > MAX_REBALANCED:
                raise Violation(f"{record.id} shared its work out anew more than {MAX_REBALANCED} times within an hour")

    def _check_risk(self, record: JobRecord) -> None:
        """A job that trains with an owner and its mirror on one node says so."""
        state = record.state
        if not isinstance(state, Running) or not record.spec.recovery.mirrors:
            return
        apart = all(owner.node != mirror.node for owner, mirror in partners(state.plan).items())
        if (apart and state.plan.world_size > 1) == bool(record.at_risk):
            raise Violation(f"{record.id} trains on {state.plan.describe()} and says of its risk: {record.at_risk!r}")

    def _check_asks(self, old: JobRecord | None, record: JobRecord) -> None:
        """What a plan would be is asked once, and again where something has changed; another size is another question."""
        if old is not None and old.wanted_size != record.wanted_size:
            self._asked = Counter({what: times for what, times in self._asked.items() if what[0] != record.id})
        for identity in record.outbox.keys() - (old.outbox.keys() if old else ()):
            effect = record.outbox[identity]
            if not isinstance(effect, ChoosePlan):
                continue
            what = (record.id, effect.generation, tuple(device for device, _ in effect.devices))
            self._asked[what] += 1
            if self._asked[what] > MAX_ASKED:
                where = ", ".join(map(str, what[2]))
                raise Violation(f"{record.id} asks for a plan on {where} again, after {MAX_ASKED} times")

    def _check_drained(self, old: JobRecord | None, record: JobRecord, drained: frozenset[NodeId]) -> None:
        """Nothing new is planned where a node drains; drained: since before the commit that is looked at, and after it."""
        forming = record.state.forming if isinstance(record.state, Starting | Reforming) else None
        if forming is None or (old and old.generation >= forming.generation):
            return
        if found := drained & set(forming.plan.nodes):
            raise Violation(f"{record.id} is planned on {', '.join(sorted(found))}, which drains")

    def _check_admitted(self, old: JobRecord | None, record: JobRecord, known: frozenset[NodeId]) -> None:
        """No job gets to a node that has not been checked, or was found unfit; known: fit, or so until this commit."""
        before = old.hosts if old else frozenset()
        if isinstance(record.state, Stopping):
            return  # it may have hosts anywhere, of which a store that went back knows nothing: they are only closed
        if found := record.hosts - before - known:
            raise Violation(f"{record.id} gets to {', '.join(sorted(found))}, which was not found fit to be used")

    def _check_devices(self, records: Mapping[JobId, JobRecord]) -> None:
        taken: dict[Device, JobId] = {}
        for job, record in records.items():
            spares = [device for spare in record.spares.values() for device in spare.devices]
            for device in (*_placed(record), *spares):
                if taken.setdefault(device, job) != job:
                    raise Violation(f"{device} serves {job} and {taken[device]} at once")
            if isinstance(record.state, Running) and set(spares) & set(record.state.plan.devices):
                raise Violation(f"{job} has a spare that trains")

    def _check_quotas(self, before: Mapping[JobId, JobRecord], after: Mapping[JobId, JobRecord], commit: Commit) -> None:
        """No project gets more devices than its quota, whatever it had when that was lowered."""
        old = self._quotas
        if commit.projects is not None:
            self._quotas = {one.name: one.max_devices for one in commit.projects}
        for project, quota in self._quotas.items():
            limits = [most for most in (quota, old.get(project)) if most is not None]
            had, has = _size(before, project), _size(after, project)
            if len(limits) == 2 and has > max(had, *limits):
                raise Violation(f"project {project} has {has} devices and may have {max(limits)}")

    def _check_preemption(
        self, before: Mapping[JobId, JobRecord], records: Mapping[JobId, JobRecord], commit: Commit
    ) -> None:
        """Nobody gives way to a job of the same or a lower priority."""
        for entry in commit.history:
            other = records.get(JobId(str(entry.data.get("to")))) if entry.type in ("yielding", "preempted") else None
            if other is not None and other.priority <= records[entry.job].priority:
                raise Violation(f"{entry.job} of priority {records[entry.job].priority} gives way to {other.id}: {entry}")
            if entry.type == "stood_aside":
                state = before[entry.job].state
                if not isinstance(state, Reforming) or state.forming is not None or not state.waiting:
                    raise Violation(f"{entry.job} could go on, and gives up what memory holds: {entry}")

    def _check_quarantine(self, records: Mapping[JobId, JobRecord]) -> None:
        """Nobody trains, or is about to, on a device that is kept out."""
        out = {one.device for one in self._quarantine if one.is_out}
        for job, record in records.items():
            state = record.state
            forming = state.forming if isinstance(state, Starting | Reforming) else None
            plan = state.plan if isinstance(state, Running) else forming.plan if forming else None
            if plan and (found := out & set(plan.devices)):
                raise Violation(f"{job} is planned on {', '.join(map(str, sorted(found)))}, which is kept out")

    # --- at the end -------------------------------------------------------------------------------------------------------

    def ended(self, records: Mapping[JobId, JobRecord]) -> None:
        for job, record in records.items():
            still_open = [one.id for one in record.injected if one.verdict is Verdict.OPEN]
            if still_open:
                raise Violation(f"{job} is over and nobody judged its faults {still_open}")
            if type(record.state).__name__ != "Succeeded":
                continue
            first = self._scenario.start_of(job) + 1
            missing = [s for s in range(first, record.spec.train.steps + 1) if Step(s) not in self.curves[job]]
            # One that began with a checkpoint beyond its last step has nothing to do.
            if missing or record.committed != max(record.spec.train.steps, first - 1):
                raise Violation(f"{job} succeeded without steps {missing}, at {record.committed}")
            counted = sum(incident.rolled_back for incident in record.incidents)
            if counted != self.rolled_back[job] and len(record.incidents) < 100:
                raise Violation(f"{job} shows {counted} steps rolled back where {self.rolled_back[job]} were")


def _fit(admissions: Iterable[Admission]) -> frozenset[NodeId]:
    return frozenset(one.node for one in admissions if one.standing is Admittance.ADMITTED)


def _placed(record: JobRecord) -> tuple[Device, ...]:
    """What it trains on or is about to."""
    state = record.state
    if isinstance(state, Running):
        return tuple(state.plan.devices)
    if isinstance(state, Starting | Reforming) and state.forming is not None:
        return tuple(state.forming.plan.devices)
    return ()


def _size(records: Mapping[JobId, JobRecord], project: str) -> int:
    mine = (record for record in records.values() if record.spec.project == project)
    return sum(len(_placed(record) or _broken(record)) for record in mine)


def _broken(record: JobRecord) -> tuple[Device, ...]:
    """What it is made whole from again: the project had as many before."""
    state = record.state
    plan = record.plans.get(state.closing.generation) if isinstance(state, Reforming) else None
    return tuple(plan.devices) if plan else ()
