"""A synchronous stand-in for the supervisor's loop (supervisor/run.py): the same order of deciding, committing and acting.

It may crash between any two instants, also between a commit and its effects, or sleep and come back with an old term.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from orchestrator.domain.checkpoint import CheckpointRef
from orchestrator.domain.effects import (
    AddNode,
    CallHost,
    CheckNode,
    ChoosePlan,
    CommitCheckpoint,
    Effect,
    KillNode,
    Loose,
    NoteCheckpoint,
    ProbeProgram,
    PruneCheckpoints,
    Sabotage,
    StrikeNode,
)
from orchestrator.domain.errors import StaleTerm, WentBack
from orchestrator.domain.events import (
    CheckpointCommitted,
    CheckpointFailed,
    Contact,
    DeadlinePassed,
    EffectDone,
    HostLost,
    HostSaid,
    Input,
    InstantCame,
    NodeChecked,
    NodesSeen,
    NodeStruck,
    PlanChosen,
    ProgramProbed,
)
from orchestrator.domain.faults import FaultKind, FaultRequested
from orchestrator.domain.ids import EffectId, JobId, NodeId, Term
from orchestrator.domain.job import JobRecord
from orchestrator.domain.memo import Memo, is_forgotten
from orchestrator.domain.requests import CloseHost, OpenHost
from orchestrator.domain.state import TERMINAL
from orchestrator.planner.choose import choose
from orchestrator.ports import Commit
from orchestrator.supervisor.deadlines import deadlines, instants
from orchestrator.supervisor.kernel import State, Stepped, step
from orchestrator.supervisor.recalling import recalled
from orchestrator.supervisor.rewriting import whole
from orchestrator.supervisor.unsaved import LAZY_S, News, Unsaved

from .clock import Timer
from .host import SimHost
from .line import SimLine
from .scenario import profile
from .world import World

PATIENT_S, ASK_AGAIN_S = 30.0, 0.5
"""For how long hosts that do not answer are waited for where the store has gone back, and how often they are asked."""
NODES_S = 0.5
COMMANDS_S = 0.1
URGENT_S = 0.0005
COMMIT_S = (0.0005, 0.004)
PLAN_S = (0.005, 0.1)
CHECK_S = (0.05, 1.0)
RETRY_COMMIT_S = 0.2
FAILS, WRITTEN = 0.5, 0.5
"""Where the store is failing: how often a commit does, and how often it was written nonetheless."""
TWICE = 0.01


class SimSupervisor:
    def __init__(self, world: World) -> None:
        self.world = world
        self.is_dead = False
        self.dies_after_commit = False
        self.asleep_until = 0.0
        self._reigns = world.store.acquire(world.clock.now)
        jobs, self._cursor = world.store.load()
        self._recorded_cursor = self._cursor
        self._commits = world.store.commits
        self._ended: dict[JobId, JobRecord] = {}
        held = {one.device: one for one in world.store.quarantine}
        kept = {one.node: one for one in world.store.cordons}
        fit = {one.node: one for one in world.store.admissions}
        checks = world.scenario.checks
        projects = {one.name: one for one in world.store.projects}
        self._state = State(
            jobs=jobs,
            root="/shared",
            quarantine=held,
            cordons=kept,
            admissions=fit,
            checks=checks,
            projects=projects,
        )
        self._news: list[News] = []
        self._unsaved = Unsaved()
        self._turn: Timer | None = None
        self._turn_at = 0.0
        self._committing = False
        self._skew_s = 0.0
        self._lines: dict[tuple[JobId, NodeId], SimLine] = {}
        self._timers: dict[tuple[JobId | None, str], Timer] = {}
        self._nodes_seen: object = None
        self._recorded: dict[JobId, JobRecord] = dict(jobs)
        """Each job as it was committed last."""
        self._recalled: dict[tuple[JobId, NodeId], tuple[float, int, str]] = {}
        """What hosts remembered when this supervisor began."""
        self._patient_until = world.clock.now + PATIENT_S
        self._begin()

    def _begin(self) -> None:
        """Go on from the store's records, or from what hosts remember where that is more: see supervisor/run.py."""
        world = self.world
        kept = [host.kept() for host in world.living() if host.is_reachable]
        over = world.store.over({one.job for one in kept})
        found = recalled(self._state.jobs, over, kept, self._reigns, self._commits)
        self._recalled = {(one.job, one.node): one.memo.mark for one in kept if one.memo is not None}
        if found is None:
            self._start()
            return
        if world.clock.now < self._patient_until and any(not host.is_reachable for host in world.living()):
            world.clock.after(ASK_AGAIN_S, lambda: self.when_awake(self._begin))
            return
        if not world.store.overtake(self.term, found.above):
            self.crash()
            return
        world.note(f"supervisor of term {self.term} goes on from what hosts remember, with term {world.store.term}")
        self._reigns = (*found.reigns, world.store.reign(found.commits, world.clock.now))
        self._commits = found.commits
        for job, node in sorted(found.strays):
            host = world.host(job, node)
            if host is not None and host.is_reachable:
                host.handle(self.term, EffectId(f"{self.term}:stray"), CloseHost())
        held = {device: one for device, one in self._state.quarantine.items() if device not in found.used}
        self._state = replace(self._state, jobs=found.jobs, quarantine=held)
        gone = [
            HostLost(job=job, node=node, contact=Contact.GONE, message="its process has ended")
            for job, record in found.jobs.items()
            for node in sorted(record.hosts)
            if (job, node) in found.strays
            or (host := world.host(job, node)) is None
            or (host.is_gone and world.clock.now >= host.silent_until)
        ]
        stepped = step(world.clock.now, self._state, gone)
        self._state = stepped.state
        unsaved = Unsaved()
        unsaved.add(stepped, [], world.clock.now)
        ended = {job: record for job, record in stepped.changed.items() if isinstance(record.state, TERMINAL)}
        why = "hosts remember more than the store"
        commit = whole(self._state, ended, unsaved.commit(), str(self._recorded_cursor), self._reigns, world.clock.now, why)
        self._committing = True
        self._soon(COMMIT_S, lambda: self._commit(unsaved, commit, None))

    def _start(self) -> None:
        self._adopt()
        self._watch_nodes()
        self._read_commands()

    @property
    def term(self) -> Term:
        return self._reigns[-1].term

    def memo(self, job: JobId) -> Memo | None:
        record = self._recorded.get(job)
        return Memo(reigns=self._reigns, commits=self._commits, record=record) if record else None

    def knows(self, host: SimHost) -> bool:
        """Whether what it remembers is part of what this supervisor goes on from."""
        memo = host.memo
        if memo is None or host.term > self.term or not is_forgotten(memo, self._reigns):
            return True  # or it refuses this supervisor in any case
        if self._recalled.get((host.job, host.node)) == memo.mark:
            return True
        self._ask_who_governs(f"{host.node} remembers more of {host.job}")
        return False

    def has_heard_of(self, jobs: Collection[JobId]) -> bool:
        """Whether it knows of each that it is open, or how it ended."""
        return self._state.jobs.keys() | self._ended.keys() >= set(jobs)

    def is_refused(self) -> None:
        self._ask_who_governs("a host has heard a higher term")

    def _ask_who_governs(self, why: str) -> None:
        """A host obeys a later supervisor: one that there is, or one of which the store knows nothing any more."""
        if self.world.store.term == self.term and not self.is_dead:
            self.world.note(f"supervisor of term {self.term} begins anew: {why}")
            self.crash()
            self.world.restart_supervisor(0.1)

    def crash(self) -> None:
        self.is_dead = True
        for line in self._lines.values():
            line.stop()

    def sleep(self, seconds: float) -> None:
        """It is stopped and goes on later, not knowing; deadlines start again then, as a loop that saw the gap does."""
        self.asleep_until = self.world.clock.now + seconds
        self.world.clock.after(seconds, self._restart_timers)

    def when_awake(self, do: object) -> None:
        assert callable(do)
        if self.is_dead:
            return
        if self.world.clock.now < self.asleep_until:
            self.world.clock.after(self.asleep_until - self.world.clock.now + 1e-6, lambda: self.when_awake(do))
        else:
            do()

    def tell(self, one: Input, *, urgent: bool, line: SimLine | None = None, number: int = 0) -> None:
        if not self.is_dead:
            self._news.append(News(one, line, number))
            if isinstance(one, HostSaid) and self.world.rng.random() < TWICE:
                self._news.append(News(one, line, number))
            self._wake(URGENT_S if urgent else LAZY_S)

    # --- the loop ---------------------------------------------------------------------------------------------------------

    def _wake(self, delay_s: float) -> None:
        at = self.world.clock.now + delay_s
        if self._turn is not None and self._turn_at <= at:
            return
        if self._turn is not None:
            self._turn.cancel()
        self._turn_at = at
        self._turn = self.world.clock.after(delay_s, lambda: self.when_awake(self._decide))

    def _decide(self) -> None:
        self._turn = None
        now = self.world.clock.now
        if self._committing or not (self._news or now >= self._unsaved.due):
            return
        news, self._news = self._news, []
        stepped = step(now + self._skew_s, self._state, [one.one for one in news])
        self._state = stepped.state
        self._unsaved.add(stepped, news, now)
        if not (stepped.effects or stepped.loose or now >= self._unsaved.due):
            self._act(stepped)
            self._wake(max(0.0, self._unsaved.due - now))
            return
        unsaved, self._unsaved = self._unsaved, Unsaved()
        self._committing = True
        commit = unsaved.commit()
        self._soon(COMMIT_S, lambda: self._commit(unsaved, commit, stepped))

    def _commit(self, unsaved: Unsaved, commit: Commit, stepped: Stepped | None) -> None:
        """stepped: what is to be done then; None: begin."""

        def again() -> None:
            self.when_awake(lambda: self._commit(unsaved, commit, stepped))

        world = self.world
        stalled_s = world.store_stalled_until - world.clock.now
        if stalled_s > 0:
            world.clock.after(stalled_s, again)
            return
        fails = world.clock.now < world.store_fails_until and world.rng.random() < FAILS
        try:
            if (not fails or world.rng.random() < WRITTEN) and world.store.commit(self.term, commit, self._commits):
                for entry in commit.history:
                    world.note(f"{entry.job} g{entry.generation} s{entry.step} {entry.type}: {entry.message}")
        except WentBack as error:
            assert world.store.overtake(self.term, self.term)
            world.note(f"supervisor of term {self.term} writes again all it knows, with term {world.store.term}")
            self._reigns = (*self._reigns, world.store.reign(self._commits, world.clock.now))
            over = world.store.over(self._ended)
            ended = {job: record for job, record in self._ended.items() if job not in over}
            commit = whole(
                self._state, ended, commit, str(self._recorded_cursor), self._reigns, world.clock.now, str(error)
            )
            self._soon(COMMIT_S, again)
            return
        except StaleTerm:
            self.world.note(f"supervisor of term {self.term} is refused and ends")
            self.crash()
            return
        if fails:
            world.clock.after(RETRY_COMMIT_S, again)
            return
        self._commits = world.store.commits
        self._recorded |= commit.jobs
        self._recorded_cursor = int(commit.cursor or self._recorded_cursor)
        self._ended |= {job: record for job, record in commit.jobs.items() if isinstance(record.state, TERMINAL)}
        if self.dies_after_commit:
            self.world.note(f"supervisor of term {self.term} dies before it acts")
            self.crash()
            return
        if self.world.dies_here(self._state):
            return
        self._soon(COMMIT_S, lambda: self._committed(unsaved, stepped))

    def _committed(self, unsaved: Unsaved, stepped: Stepped | None) -> None:
        self._committing = False
        unsaved.acknowledge()
        if stepped is not None:
            self._act(stepped)
        else:
            self._start()
        if self._news:
            self._wake(URGENT_S)

    def _act(self, stepped: Stepped) -> None:
        self._follow_hosts()
        for identity, effect in stepped.effects.items():
            self._carry_out(identity, effect)
            if self.world.dies_here(self._state):
                return
        for loose in stepped.loose:
            self._provide(loose)
        for job in stepped.changed:
            self._set_timers(job, stepped.state.jobs.get(job))
        self._set_timers_of(None, self._instants())

    def _instants(self) -> Mapping[str, float]:
        now = self.world.clock.now + self._skew_s
        return instants(self._state.cordons, self._state.jobs.values(), now, self._state.admissions)

    def _set_timers(self, job: JobId, record: JobRecord | None) -> None:
        self._set_timers_of(job, deadlines(record) if record else {})

    def _set_timers_of(self, job: JobId | None, wanted: Mapping[str, float]) -> None:
        for key in [key for key in self._timers if key[0] == job and key[1] not in wanted]:
            self._timers.pop(key).cancel()
        for name, seconds in wanted.items():
            if (job, name) not in self._timers:
                self._timers[job, name] = self.world.clock.after(seconds, lambda name=name: self._ring(job, name))  # type: ignore[misc]

    def _ring(self, job: JobId | None, name: str) -> None:
        if self.is_dead or self.world.clock.now < self.asleep_until:
            return
        self._timers.pop((job, name), None)
        self.tell(DeadlinePassed(job=job, key=name) if job is not None else InstantCame(key=name), urgent=True)

    def _restart_timers(self) -> None:
        if self.is_dead:
            return
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        for job, record in self._state.jobs.items():
            self._set_timers(job, record)
        self._set_timers_of(None, self._instants())

    def _adopt(self) -> None:
        self._follow_hosts(attached=True)
        for job, record in self._state.jobs.items():
            for identity, effect in record.outbox.items():
                self._carry_out(identity, effect)
            self._set_timers(job, record)

    def _follow_hosts(self, *, attached: bool = False) -> None:
        wanted = {(job, node) for job, record in self._state.jobs.items() for node in record.hosts}
        for job, node in sorted(wanted - set(self._lines)):
            opening = any(
                isinstance(e, CallHost) and e.node == node and isinstance(e.request, OpenHost)
                for e in self._state.jobs[job].outbox.values()
            )
            self._lines[job, node] = SimLine(self.world, self, job, node, attached and not opening)
        for key in sorted(set(self._lines) - wanted):
            self._lines.pop(key).stop()

    # --- effects ----------------------------------------------------------------------------------------------------------

    def _carry_out(self, identity: EffectId, effect: Effect) -> None:
        match effect:
            case CallHost(job=job, node=node, request=request):
                line = self._lines.get((job, node))
                if line is None:
                    self.tell(EffectDone(job=job, effect=identity), urgent=False)
                else:
                    line.send(identity, request)
            case ProbeProgram(job=job, spec=spec):
                start = self.world.start_of(job, spec)
                self._answer(identity, job, lambda: ProgramProbed(job=job, profile=profile(), start=start))
            case ChoosePlan(job=job, generation=generation):
                self._answer(identity, job, lambda: PlanChosen(job=job, generation=generation, result=choose(effect)))
            case CommitCheckpoint(job=job):
                self._answer(identity, job, lambda: self._written(effect))
            case NoteCheckpoint(job=job):
                self.tell(EffectDone(job=job, effect=identity), urgent=False)
            case PruneCheckpoints(job=job, keep=keep):
                self._soon(PLAN_S, lambda: self._prune(identity, job, keep))
            case StrikeNode(job=job, node=node):
                self.world.kill_node(node)
                self._answer(identity, job, lambda: NodeStruck(node=node))
            case KillNode() | AddNode() | CheckNode() | Sabotage():
                self._provide(effect)

    def _written(self, effect: CommitCheckpoint) -> Input:
        if self.term < self.world.store.term:  # what it goes on from may be swept by now, and nobody will hear of it
            return CheckpointFailed(job=effect.job, step=effect.step, message="another supervisor writes now")
        if self.world.is_orphan(effect):
            return CheckpointFailed(job=effect.job, step=effect.step, message="what it goes on from is not there")
        return CheckpointCommitted(job=effect.job, checkpoint=self.world.write_checkpoint(effect))

    def _prune(self, identity: EffectId, job: JobId, keep: tuple[CheckpointRef, ...]) -> None:
        self.world.prune_checkpoints(job, keep)
        self.tell(EffectDone(job=job, effect=identity), urgent=False)

    def _answer(self, identity: EffectId, job: JobId, work: Callable[[], Input]) -> None:
        def tell() -> None:
            self.tell(work(), urgent=True)
            self.tell(EffectDone(job=job, effect=identity), urgent=True)

        self._soon(PLAN_S, tell)

    def _provide(self, effect: Loose) -> None:
        match effect:
            case KillNode(node=node):
                self.world.kill_node(node)
            case AddNode(num_devices=num_devices):
                self.world.add_node(num_devices)
            case CheckNode(node=node, number=number, peer=peer):
                found = self.world.checked(node, peer)
                if found is not None:
                    self._soon(CHECK_S, lambda: self.tell(NodeChecked(node=node, number=number, found=found), urgent=True))
            case Sabotage(fault=fault):
                self._sabotage(fault)

    def _sabotage(self, fault: FaultRequested) -> None:
        match fault.fault:
            case FaultKind.SUPERVISOR_KILL:
                self.world.note("* the supervisor is killed on purpose")
                self.crash()
                self.world.restart_supervisor(0.1)
            case FaultKind.REDIS_STALL:
                self.world.store_stalled_until = self.world.clock.now + fault.duration_s
            case FaultKind.CLOCK_JUMP:
                self._skew_s += fault.jump_s

    def _soon(self, within_s: tuple[float, float], do: Callable[[], None]) -> None:
        self.world.clock.after(self.world.rng.uniform(*within_s), lambda: self.when_awake(do))

    # --- what is watched --------------------------------------------------------------------------------------------------

    def _watch_nodes(self) -> None:
        if self.is_dead:
            return
        nodes = self.world.nodes()
        if nodes != self._nodes_seen:
            self._nodes_seen = nodes
            self.tell(NodesSeen(nodes=nodes), urgent=True)
        self._soon((NODES_S, NODES_S), self._watch_nodes)

    def _read_commands(self) -> None:
        if self.is_dead:
            return
        for command in self.world.store.commands[self._cursor :]:
            self._cursor += 1
            if command is not None:
                self._news.append(News(command, cursor=str(self._cursor)))
                self._wake(URGENT_S)
        self._soon((COMMANDS_S, COMMANDS_S), self._read_commands)
