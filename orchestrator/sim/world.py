"""Everything outside the kernel, simulated: nodes, hosts, ranks, store, supervisors, and the trouble a scenario brings."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from typing import Protocol

from orchestrator.domain.admission import Checked
from orchestrator.domain.checkpoint import LONGEST_JOURNAL, CheckpointRef
from orchestrator.domain.cluster import Node, NodeStatus
from orchestrator.domain.effects import CommitCheckpoint
from orchestrator.domain.events import CancelRequested, CheckpointNow, JobSubmitted, ReleaseRequested
from orchestrator.domain.ids import Generation, JobId, NodeId, Step, Term
from orchestrator.domain.job import JobRecord
from orchestrator.domain.layout import partners
from orchestrator.domain.profile import Interval
from orchestrator.domain.spec import JobSpec
from orchestrator.domain.state import TERMINAL, Reforming
from orchestrator.recovery.retention import reads
from orchestrator.supervisor.kernel import State

from .arena import Arena, Arenas
from .checkers import Checker, Copied
from .host import SimHost
from .memory import Violation
from .place import Place
from .promises import Promises
from .scenario import Scenario, Trouble, node_name, reference
from .store import SimStore

COPY_S = 0.7
"""How often the store is copied, where it is to go back."""
COPIES = 6
RESUBMIT_S = 8.0


class Governor(Protocol):
    """A supervisor, as far as those know it who bring it to its end."""

    @property
    def term(self) -> Term: ...
    @property
    def is_dead(self) -> bool: ...

    dies_after_commit: bool

    def crash(self) -> None: ...
    def has_heard_of(self, jobs: Collection[JobId]) -> bool: ...
    def sleep(self, seconds: float) -> None: ...


class World(Place):
    """govern: starts a supervisor in a world.

    dies_at: the point of a recovery, counted over commits and effects, at which the supervisor dies; 0 for none.
    twice: a second rank dies in that instant.
    """

    def __init__(
        self,
        scenario: Scenario,
        govern: Callable[[World], Governor],
        *,
        trace: bool = False,
        dies_at: int = 0,
        twice: bool = False,
    ) -> None:
        super().__init__(scenario, trace=trace)
        self.points = 0
        """Commits and effects so far while a generation was being replaced."""
        self._dies_at = dies_at
        self._twice = twice
        self.checker = Checker(scenario, self._held, self._lives)
        self.store = SimStore(self.checker, Promises(lambda: self.clock.now, self._healthy_s))
        self.store_stalled_until = 0.0
        self.store_fails_until = 0.0
        self.hosts: dict[tuple[JobId, NodeId], SimHost] = {}
        self._arenas = Arenas(self, self.checker)
        self.size: dict[NodeId, int] = {}
        self.lives: dict[NodeId, int] = {}
        self.unfit: set[NodeId] = set()
        """Nodes that a check finds something wrong with."""
        self.dead: dict[NodeId, float] = {}
        """Dead nodes, and when the cluster notices."""
        self._last_flip = 0
        self._submitted: dict[JobId, JobSubmitted] = {}
        """Jobs that the store has ever forgotten."""
        self._copies: deque[Copied] = deque(maxlen=COPIES)
        if {Trouble.REWIND_STORE, Trouble.REWIND_UNSEEN} & set(scenario.troubles):
            self._copy()
        for devices in scenario.nodes:
            self.add_node(devices)
        for number, spec in enumerate(scenario.jobs):
            job = JobId(f"job{number}")
            self.clock.after(
                self.rng.uniform(0.0, scenario.arrive_s),
                lambda job=job, spec=spec: self.store.commands.append(JobSubmitted(job=job, spec=spec, at=self.clock.now)),  # type: ignore[misc]
            )
        for at in scenario.saves:
            self.clock.after(at, lambda: self.store.commands.append(CheckpointNow(job=JobId("job0"))))
        self._govern = govern
        self.supervisor = govern(self)
        self._governors = [self.supervisor]
        self._starting = 0
        """Supervisors that are to begin."""

    def dies_here(self, state: State) -> bool:
        """The supervisor has committed, or carried an effect out: whether that was its last deed."""
        if not any(isinstance(record.state, Reforming) for record in state.jobs.values()):
            return False
        self.points += 1
        if self.points != self._dies_at:
            return False
        self.note(f"* the supervisor dies at point {self.points} of the recovery")
        self.supervisor.crash()
        if self._twice:
            self._lose_another()
        self.restart_supervisor(0.5)
        return True

    def _lose_another(self) -> None:
        """One of those that trained, and neither has a copy of what the first loss took nor had one of its own there."""
        for job, record in self.records().items():
            state = record.state
            if not isinstance(state, Reforming) or (plan := record.plans.get(state.closing.generation)) is None:
                continue
            mirror, ranks = partners(plan), {d: rank for host in self.living(job) for d, rank in host.ranks.items()}
            left = {d for d in plan.devices if d in ranks and ranks[d].alive and ranks[d].born <= state.closing.generation}
            lost = set(plan.devices) - left
            touched = {mirror.get(d, d) for d in lost} | {owner for owner, at in mirror.items() if at in lost}
            if others := sorted(left - touched):
                self.note(f"* and with it {job} loses the rank on {others[0]}")
                ranks[others[0]].host.kill(ranks[others[0]])

    # --- for those who live in it -----------------------------------------------------------------------------------------

    def nodes(self) -> tuple[Node, ...]:
        """As the cluster sees them: the dead ones are noticed late."""
        silent = {node for (_, node), host in self.hosts.items() if host.cut and not host.is_gone}

        def status(node: NodeId) -> NodeStatus:
            if self.dead.get(node, self.clock.now + 1) <= self.clock.now:
                return NodeStatus.LOST
            return NodeStatus.UNREACHABLE if node in silent else NodeStatus.UP

        return tuple(
            Node(
                id=node,
                kind=self.scenario.kinds[int(node[1:]) % len(self.scenario.kinds)],
                num_devices=devices,
                labels={"rack": f"r{int(node[1:]) % self.scenario.racks}"} if self.scenario.racks else {},
                status=status(node),
                life=str(self.lives[node]),
            )
            for node, devices in self.size.items()
        )

    def host(self, job: JobId, node: NodeId, *, create: bool = False) -> SimHost | None:
        host = self.hosts.get((job, node))
        if create and node not in self.dead and (host is None or host.is_gone):
            host = self.hosts[job, node] = SimHost(self, self._arenas, job, node)
        return host

    def checked(self, node: NodeId, peer: NodeId | None) -> Checked | None:
        """What checking the node finds now; None where nobody answers."""
        off = self.unplugged
        if node in self.dead or node in off:
            return None
        wrong = ("17 elements of a product of matrices are wrong",) if node in self.unfit else ()
        apart = peer is not None and (peer in self.dead or peer in off or self._is_cut(node, peer))
        return Checked(wrong=wrong, pair_wrong=f"no sum with {peer} came back" if apart else "", product_s=0.01)

    def _is_cut(self, one: NodeId, other: NodeId) -> bool:
        return any({a.node, b.node} == {one, other} for a, b in self.cut_links)

    def is_orphan(self, effect: CommitCheckpoint) -> bool:
        """A journal's entry of a job of which the store has forgotten that its state was saved, and what was swept then."""
        at = {(one.step, one.generation) for one in self.checkpoints[effect.job]}
        return self.has_forgotten and effect.shards[0].kind == "journal" and (effect.step - 1, effect.generation) not in at

    def write_checkpoint(self, effect: CommitCheckpoint) -> CheckpointRef:
        record = self.store.jobs.get(effect.job)
        arena = self.arenas.get((effect.job, effect.generation))
        kind, parent = effect.shards[0].kind, None
        if arena and effect.step in arena.disagreed and kind == "base":  # an entry holds gradients, which are right
            raise Violation(f"the checkpoint of step {effect.step} of {effect.job} is committed, and its copies disagreed")
        if effect.step > max(self.checker.curves[effect.job], default=self.scenario.start_of(effect.job)):
            raise Violation(f"a checkpoint of step {effect.step} of {effect.job} is committed before the step")
        wrong = [s for s in effect.shards if (effect.job, effect.generation, effect.step, s.device) not in self.shards]
        if wrong or len({shard.device for shard in effect.shards}) != len(effect.shards):
            raise Violation(
                f"the checkpoint of step {effect.step} of {effect.job} names shards that are not there: {wrong}"
            )
        plan = record.plans.get(effect.generation) if record else None
        if plan and {shard.device for shard in effect.shards} != set(plan.devices):
            raise Violation(f"the checkpoint of step {effect.step} of {effect.job} lacks shards of {plan.describe()}")
        path = f"/shared/{effect.job}/{effect.step}-{effect.generation}"
        answer = reference(effect.spec, effect.step)
        if any(shard.kind != kind for shard in effect.shards):
            raise Violation(f"the checkpoint of step {effect.step} of {effect.job} is of states and gradients")
        if kind == "journal":
            before = (effect.step - 1, effect.generation)
            parent = next((c for c in self.checkpoints[effect.job] if (c.step, c.generation) == before), None)
            if parent is None or parent.depth >= LONGEST_JOURNAL:
                raise Violation(f"the entry of step {effect.step} of {effect.job} goes on from {parent}")
        checkpoint = CheckpointRef(
            step=effect.step,
            generation=effect.generation,
            path=path,
            answer=answer,
            kind=kind,
            depth=parent.depth + 1 if parent else 0,
            local=plan.nodes if plan and effect.spec.checkpoint.local else (),
        )
        self.checkpoints[effect.job].add(checkpoint)
        return checkpoint

    def start_of(self, job: JobId, spec: JobSpec) -> CheckpointRef | None:
        """What the job begins with, where it asked for that: written by a job that is no more."""
        step = self.scenario.start_of(job)
        if not step:
            return None
        path = f"{spec.checkpoint.restore_from}/{step}"
        start = CheckpointRef(step=step, generation=Generation(9), path=path, answer=reference(spec, step))
        self.checkpoints[job].add(start)
        return start

    def prune_checkpoints(self, job: JobId, keep: tuple[CheckpointRef, ...]) -> None:
        """As on disk: what is newer than the newest to be kept is not touched."""
        paths, folder = {one.path for one in keep}, f"/shared/{job}/"
        newest = max(((one.generation, one.step) for one in keep if one.path.startswith(folder)), default=None)
        if newest is None:
            return
        self.checkpoints[job] = {
            one
            for one in self.checkpoints[job]
            if one.path in paths or not one.path.startswith(folder) or (one.generation, one.step) > newest
        }
        for one in self.checkpoints[job]:
            links = [other for other in self.checkpoints[job] if reads(one, other)]
            if len(links) != one.depth + 1 and not self.has_forgotten:
                raise Violation(f"{one.path} of {job} is kept and is read through {one.depth + 1} others, not {len(links)}")

    # --- trouble ----------------------------------------------------------------------------------------------------------

    def add_node(self, devices: int, node: NodeId | None = None) -> None:
        node = node or node_name(len(self.size))
        self.size[node] = devices
        self.dead.pop(node, None)
        self.lives[node] = self.lives.get(node, 0) + 1
        self.note(f"* node {node} with {devices} devices")

    def kill_node(self, node: NodeId) -> None:
        if node in self.dead or node not in self.size:
            return
        silent_s = self.rng.choice((0.02, 0.5, 5.0, 30.0))
        self.note(f"* node {node} dies, which shows after {silent_s} s")
        self.dead[node] = self.clock.now + self.rng.choice((0.5, 2.0, silent_s))
        for (_, on), host in sorted(self.hosts.items()):
            if on == node:
                host.end(silent_s)

    def next_flip(self) -> int:
        self._last_flip += 1
        return self._last_flip

    def release(self) -> None:
        """An operator vouches for every node."""
        self.store.commands.extend(ReleaseRequested(node=node) for node in self.size)

    def _copy(self) -> None:
        self._copies.append(self.store.copied())
        self.clock.after(COPY_S, self._copy)

    def rewind_store(self) -> None:
        """To one of the latest copies, under a supervisor that knows better."""
        living = [one for one in self._governors if not one.is_dead]
        if len(living) != 1 or living[0].dies_after_commit or self._starting:
            return
        # Of a job that ended under an earlier one nobody could say how.
        self._rewind([one for one in self._copies if living[0].has_heard_of(_open(one))])

    def rewind_unseen(self) -> None:
        """Likewise, once nobody lives who knows better."""
        living = [one for one in self._governors if not one.is_dead]
        if len(living) > 1 or not all(host.is_reachable for host in self.living()):
            return
        for one in living:
            one.crash()
        self._rewind(list(self._copies))
        if not self._starting:
            self.restart_supervisor(self.rng.choice((0.1, 2.0, 6.0)))

    @property
    def has_failed(self) -> bool:
        """Some job may have failed in a step that it has not made since."""
        return self.has_forgotten or any(record.failures for record in self.records().values())

    @property
    def is_unseen(self) -> bool:
        """The store has gone back, and no supervisor has begun since."""
        return self.store.is_behind and all(one.is_dead for one in self._governors)

    def _rewind(self, copies: list[Copied]) -> None:
        if not copies:
            return
        copied = self.rng.choice(copies)
        self.note(f"* the store goes back by {self.store.commits - copied.commits} commits, to term {copied.term}")
        self.has_forgotten = True
        self._submitted |= {lost.job: lost for lost in self.store.restore(copied)}
        for lost in self._submitted.values():
            self.clock.after(RESUBMIT_S, lambda lost=lost: self._resubmit(lost))  # type: ignore[misc]
        self._copies.clear()
        self._copies.append(copied)

    def _resubmit(self, lost: JobSubmitted) -> None:
        """Who had submitted a job that is not to be seen submits it again."""
        if lost.job not in self.store.jobs and lost not in self.store.commands[self.store.cursor :]:
            self.store.commands.append(lost)

    def cancel(self, job: JobId) -> None:
        self.store.commands.append(CancelRequested(job=job))

    def restart_supervisor(self, after_s: float) -> None:
        def start() -> None:
            self._starting -= 1
            self.supervisor = self._govern(self)
            self._governors.append(self.supervisor)
            self.note(f"* supervisor of term {self.supervisor.term} starts")

        self._starting += 1
        self.clock.after(after_s, start)

    # --- views ------------------------------------------------------------------------------------------------------------

    @property
    def arenas(self) -> dict[tuple[JobId, Generation], Arena]:
        return self._arenas.of

    def _held(self, record: JobRecord, step: Step, after: Generation) -> list[Interval]:
        """What living ranks hold of a step, of generations after one, on hosts that can be told to use it."""
        held: list[Interval] = []
        for (job, node), host in sorted(self.hosts.items()):
            if job != record.id or node not in record.hosts - record.avoided or host.is_gone:
                continue
            for rank in host.ranks.values():
                memory = rank.memory
                if not rank.alive or rank.has_changed or (memory and memory.generation <= after):
                    continue
                if memory and (memory.step == step or (memory.step == step - 1 and rank.voted == step)):
                    held.extend(memory.intervals)
                if rank.arrived_at == step:
                    held.extend(rank.arrived)
        return held

    def _lives(self, job: JobId, generation: Generation) -> bool:
        arena = self.arenas.get((job, generation))
        return arena is not None and not arena.is_broken and len(arena.here) == len(arena.members)

    def _healthy_s(self, job: JobId, generation: Generation) -> float:
        """For how long the generation has trained with all its ranks, all of them well and heard by each other."""
        arena = self.arenas.get((job, generation))
        return arena.well_s() if arena is not None else 0.0

    def living(self, job: JobId | None = None) -> list[SimHost]:
        return [host for (j, _), host in sorted(self.hosts.items()) if not host.is_gone and job in (None, j)]

    def records(self) -> dict[JobId, JobRecord]:
        return self.store.jobs

    @property
    def is_over(self) -> bool:
        return not self.store.open and len(self.store.jobs) == len(self.scenario.jobs)


def _open(copied: Copied) -> list[JobId]:
    return [job for job, record in copied.jobs.items() if not isinstance(record.state, TERMINAL)]
