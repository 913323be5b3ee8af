"""One generation of one job, in lockstep: connect, restore, then compute, vote and pass, each rank at its own instant.

    joined by all -> connected by all -> restored (barrier) -> [computed by all -> voted by all -> passed at each] ...

A stage begins when everybody has finished the one before; a rank that dies in the middle splits the others between those
who got through and those who did not, as a kill inside an all-reduce does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from orchestrator.domain.generation import Answer, Disagrees, NotFinite
from orchestrator.domain.ids import Device, Generation, JobId, Rank, Step
from orchestrator.domain.layout import Move, layout, partners
from orchestrator.domain.protocol import FormGeneration, FromCheckpoint, FromMemory, FromSeed, RankFinished
from orchestrator.domain.spec import JobSpec

from .memory import Flip, Memory, Violation, check_filled
from .rank import SimRank
from .scenario import loss, maxima, profile

if TYPE_CHECKING:
    from .world import World

FORM_TIMEOUT_S = 10.0
MEND_S = 0.05
COMPUTE_S = (0.08, 0.12)
BLINK_S = (0.0005, 0.02)
NOTICED = 0.8
"""How often a rank is connected to one that dies, and feels it."""
LOST_IN_THE_MIDDLE = 0.5


class Arena:
    def __init__(self, world: World, job: JobId, spec: JobSpec, form: FormGeneration) -> None:
        self.world = world
        self.job = job
        self.spec = spec
        self.form = form
        self.generation: Generation = form.generation
        self.members: tuple[Device, ...] = (*form.plan.devices, *form.donors)
        self.here: dict[Device, SimRank] = {}
        self.is_broken = False
        self.kills_voter = False
        """The first to see the next vote pass dies of it."""
        self.has_started = False
        self.stage = 0
        """Exchanges begun so far."""
        self.done: set[Device] = set()
        """Who has sent its part of this one."""
        self.passed = Step(0)
        self.stopping = False
        """A rank that was asked to stop has said so in the vote."""
        self.at = self.step
        """Applied by every rank."""
        self.followers: dict[Device, Callable[[Step], None]] = {}
        """Newcomers who are sent what it takes to apply a step."""
        self.layout = layout(form.plan, profile(), mirrors=spec.recovery.mirrors)
        self.mirrored = {m: owner for owner, m in partners(form.plan).items()} if spec.recovery.mirrors else {}
        """Mirror -> whose intervals it has too."""
        self.is_spoiled = False
        """The next gradient that is computed twice comes out in two ways."""
        self.is_not_finite = False
        """The next vote comes out as NaN."""
        self.disagreed: set[Step] = set()
        """Steps after which an owner and its mirror had different bits."""
        self._hashes: dict[Device, frozenset[Flip]] = {}
        self._sources: dict[Device, Memory] = {}

    @property
    def step(self) -> Step:
        """Where it starts from."""
        match self.form.restore:
            case FromSeed():
                return Step(0)
            case FromCheckpoint(checkpoint=checkpoint):
                return checkpoint.step
            case FromMemory(step=step):
                return step

    # --- who is here ------------------------------------------------------------------------------------------------------

    def join(self, rank: SimRank) -> None:
        if rank.device in self.here or rank.device not in self.members:
            raise Violation(f"{rank.device} has no free seat in generation {self.generation}")
        self.here[rank.device] = rank
        rank.soon(FORM_TIMEOUT_S, FORM_TIMEOUT_S, lambda: self._timed_out(rank))
        if len(self.here) == len(self.members) and not self.is_broken:
            self._each(BLINK_S, lambda _: None, self._restore)

    def left(self, rank: SimRank) -> None:
        """It stopped, and its connections stay open."""
        self.here.pop(rank.device, None)
        self.is_broken = True

    def gone(self, rank: SimRank) -> None:
        """Its process ended: its connections broke."""
        self.left(rank)
        number, cut = Rank(self.members.index(rank.device)), self.cut_pairs()
        for other in [self.here[device] for device in self.members if device in self.here]:
            if self.world.rng.random() < NOTICED and (rank.device, other.device) not in cut:
                other.soon(*BLINK_S, lambda other=other: self._feels(other, number))  # type: ignore[misc]

    def _feels(self, rank: SimRank, lost: Rank) -> None:
        if rank.arena is self and not rank.finished:
            rank.leave(lost, f"connection to rank {lost} broke")

    def _timed_out(self, rank: SimRank) -> None:
        if rank.arena is self and not self.has_started:
            rank.leave(None, "not every peer was there in time")

    def _each(self, within_s: tuple[float, float], do: Callable[[SimRank], None], then: Callable[[], None]) -> None:
        """Every rank does it at its own instant; `then` follows once all have."""
        done: set[Device] = set()
        self.stage, self.done = self.stage + 1, done

        def pass_on() -> None:
            """Once every message has arrived, which over a link that is cut none does."""
            if self.is_broken:
                return
            if self.cut_pairs():
                self.world.clock.after(MEND_S, pass_on)
            else:
                then()

        def one(rank: SimRank) -> None:
            if rank.arena is not self or (self.is_broken and self.world.rng.random() < LOST_IN_THE_MIDDLE):
                return
            do(rank)
            done.add(rank.device)
            if len(done) == len(self.members):
                pass_on()

        for rank in [self.here[device] for device in self.members if device in self.here]:
            rank.soon(*within_s, lambda rank=rank: one(rank))  # type: ignore[misc]

    def cut_pairs(self) -> frozenset[tuple[Device, Device]]:
        """Members between whom nothing passes, in either order."""
        members, off = self.members, self.world.unplugged
        cut = {pair for pair in self.world.cut_links if set(pair) <= set(members)}
        if off:
            cut |= {(a, b) for a in members for b in members if a.node != b.node and (a.node in off or b.node in off)}
        return frozenset(cut | {(b, a) for a, b in cut})

    # --- restoring --------------------------------------------------------------------------------------------------------

    def _restore(self) -> None:
        restore = self.form.restore
        for device in self.members:
            self.here[device].settle(restore)
        if isinstance(restore, FromCheckpoint) and restore.checkpoint.path not in self.world.paths(self.job):
            raise Violation(f"generation {self.generation} restores from {restore.checkpoint}, which was never committed")
        if isinstance(restore, FromSeed) and self.world.scenario.start_of(self.job):
            raise Violation(f"generation {self.generation} begins with the seed, and {self.job} asked for a checkpoint")
        if isinstance(restore, FromMemory):
            self._check_moves(restore)
            # Now, because a source that has restored holds something else.
            self._sources = {device: memory for device, rank in self.here.items() if (memory := rank.memory)}
        if not isinstance(restore, FromSeed) and self.step:
            self._check_answer(restore)
        self._each(BLINK_S, self._receive_some, self._receive_rest)

    def _receive_some(self, rank: SimRank) -> None:
        """A transfer that is cut short has brought some of it."""
        for move in self._moves_to(rank):
            if self.world.rng.random() < 0.5:
                rank.arrived.append(move.interval)

    def _receive_rest(self) -> None:
        self._kill_donor()

        def receive(rank: SimRank) -> None:
            rank.arrived.extend(move.interval for move in self._moves_to(rank))

        compares = isinstance(self.form.restore, FromMemory) and self._saves(self.step) and bool(self.mirrored)
        then = self._compare if compares else self._compute_next
        self._each(BLINK_S, receive, lambda: self._each(BLINK_S, self._restored, then))

    def _kill_donor(self) -> None:
        restore = self.form.restore
        moves = restore.moves if isinstance(restore, FromMemory) else ()
        donors = sorted({m.source for m in moves if m.source != m.target and m.source in self.here})
        if donors and self.job in self.world.doomed_donors:
            self.world.doomed_donors.discard(self.job)
            rank = self.here[self.world.rng.choice(donors)]
            self.world.note(f"* {self.job} on {rank.device} dies while it gives what it holds")
            rank.host.kill(rank)

    def _moves_to(self, rank: SimRank) -> list[Move]:
        restore = self.form.restore
        return [m for m in restore.moves if m.target == rank.device] if isinstance(restore, FromMemory) else []

    def _check_answer(self, restore: FromMemory | FromCheckpoint) -> None:
        """An exact job goes on with the scale that an undisturbed run would have."""
        answer = restore.answer if isinstance(restore, FromMemory) else restore.checkpoint.answer
        if self.spec.train.exact and (answer is None or answer.maxima != maxima(self.spec, self.step)):
            raise Violation(f"generation {self.generation} starts from step {self.step} and is told {answer}")

    def _check_moves(self, restore: FromMemory) -> None:
        for device in self.form.plan.devices:
            kept = self.here[device].whole_at(restore.step)
            moved = [move.interval for move in restore.moves if move.target == device]
            check_filled(f"{device} in generation {self.generation}", self.layout.held(device), kept, moved)
        for move in restore.moves:
            source = self.here.get(move.source)
            if source is None or not source.covers(move.interval, restore.step):
                held = source.memory if source else None
                raise Violation(f"{move} of generation {self.generation} at step {restore.step}: the source holds {held}")

    def _restored(self, rank: SimRank) -> None:
        if rank.device in self.form.donors:
            rank.arena = None
            return
        if not rank.reaches("in_transfer"):
            return
        self.has_started = True
        self.world.checker.started(self)
        memory = Memory(self.generation, self.step, self.layout.held(rank.device), self._brought(rank.device))
        rank.restored(memory)
        self._hashes[rank.device] = memory.wrong
        if isinstance(self.form.restore, FromMemory) and not self.mirrored:
            self._save_if_due(rank)
        if self.step == self.spec.train.steps:
            self._finish(rank)

    def _brought(self, device: Device) -> frozenset[Flip]:
        """Flipped bits come along with what they are in, moved or kept."""
        restore = self.form.restore
        if not isinstance(restore, FromMemory):
            return frozenset()
        moves = [move for move in restore.moves if move.target == device]
        moved = {flip for move in moves for flip in self._wrong_at(move.source) if flip.is_in((move.interval,))}
        own = self._sources.get(device)
        if own is not None and own.step == restore.step:
            arrived, held = [move.interval for move in moves], self.layout.held(device)
            moved |= {flip for flip in own.wrong if flip.is_in(held) and not flip.is_in(arrived)}
        return frozenset(moved)

    def _wrong_at(self, source: Device) -> frozenset[Flip]:
        """What had arrived somewhere without being held yet counts as right."""
        return self._sources[source].wrong if source in self._sources else frozenset()

    # --- training ---------------------------------------------------------------------------------------------------------

    def _dismiss_donors(self) -> None:
        """They have done their part."""
        self.members = self.form.plan.devices
        self.here = {device: self.here[device] for device in self.members}

    def _compute_next(self) -> None:
        self._dismiss_donors()
        step = Step(max(rank.memory.step for rank in self.here.values() if rank.memory) + 1)
        if step == self.world.scenario.broken.get(self.job):
            rank = self.here[self.world.rng.choice(self.members)]
            rank.soon(*COMPUTE_S, lambda: rank.host.kill(rank, f"BrokenError: at {self.world.clock.now:.3f}"))
            self._each(COMPUTE_S, lambda _: None, lambda: None)  # nobody gets to the vote
        elif step <= self.spec.train.steps:
            self._each(COMPUTE_S, self._check_gradient, lambda: self._each(BLINK_S, vote, lambda: self._pass(step)))

        def vote(rank: SimRank) -> None:
            rank.voted = step
            self.stopping = self.stopping or rank.stop_after >= self.generation
            if rank.reaches("in_vote") and rank.has_changed:
                found = Disagrees(rank=self.form.plan.seat_of[rank.device].rank, about="memory")
                rank.leave(None, "bits of its memory have changed", found)

    def _pass(self, step: Step) -> None:
        """Everybody has voted: this is the instant at which the step is committed, whoever lives to see it."""
        if self.is_not_finite and (self.job, step) not in self.world.not_finite:
            self.is_not_finite = False
            self.world.not_finite.add((self.job, step))  # a second time it would be the training itself
            found = NotFinite(step=step, micro_batches=(0,))
            self._each(BLINK_S, lambda rank: rank.leave(None, f"step {step} gave micro-batch 0: loss nan", found), _nothing)
            return
        if any(self._differs(mirror) for mirror in self.mirrored):
            self._each(BLINK_S, self._look_at_copy, _nothing)
            return
        self.world.checker.vote_completed(self, step)
        answer = self._answer(step)

        def see(rank: SimRank) -> None:
            rank.passed(self.generation, answer)
            if not rank.alive:
                return
            if self.kills_voter:
                self.kills_voter = False
                self.world.note(f"* {self.job} on {rank.device} dies having passed step {step}")
                rank.host.kill(rank)
                return
            assert rank.memory is not None
            self._hashes[rank.device] = rank.memory.wrong
            if not compares:
                self._save_if_due(rank)
            if step == self.spec.train.steps:
                self._finish(rank)

        compares = bool(self.mirrored) and (self._saves(step) or self._is_every(step))
        self._each(BLINK_S, see, self._compare if compares else self._applied)

    def _applied(self) -> None:
        """By everybody; newcomers are sent what they need to do the same. Here training stops if anybody was asked to."""
        self.at = Step(max(rank.memory.step for rank in self.here.values() if rank.memory))
        for _, follow in sorted(self.followers.items()):
            follow(self.at)
        if not self.stopping or self.at == self.spec.train.steps:
            self._compute_next()
            return

        def stop(rank: SimRank) -> None:
            del self.here[rank.device]
            rank.stopped()

        self._each(BLINK_S, stop, lambda: None)

    def _compare(self) -> None:
        """Each mirror has its owner's hash of this step, taken when the owner had updated."""
        self._dismiss_donors()

        def check(rank: SimRank) -> None:
            if self._check_copy(rank):
                self._save_if_due(rank)

        self._each(BLINK_S, check, self._applied)

    def updated_wrongly(self, rank: SimRank) -> None:
        """What its memory is now is what its last update made."""
        rank.note()
        if rank.device in self._hashes:
            self._hashes[rank.device] = rank.noted[2] if rank.noted else frozenset()

    def _look_at_copy(self, rank: SimRank) -> None:
        self._check_copy(rank)

    def _check_copy(self, rank: SimRank) -> bool:
        """Whether it is its owner's to the bit; where not, its rank leaves."""
        if not self._differs(rank.device):
            return True
        assert rank.memory is not None
        owner = self.mirrored[rank.device]
        self.disagreed.add(rank.memory.step)
        found = Disagrees(rank=self.form.plan.seat_of[owner].rank, about="state")
        rank.leave(None, f"the copy of what {owner} owns differs", found)
        return False

    def _differs(self, mirror: Device) -> bool:
        owner = self.mirrored[mirror]
        shared = self.layout.owned[owner]
        mine, theirs = ({flip for flip in self._hashes[device] if flip.is_in(shared)} for device in (mirror, owner))
        return mine != theirs

    def _check_gradient(self, rank: SimRank) -> None:
        """One micro-batch is computed by two pipelines; the second one's rank sees that the gradients differ."""
        if not self.is_spoiled or self.form.plan.seat_of[rank.device].pipeline == 0:
            return
        self.is_spoiled = False
        rank.leave(None, "the gradient of a micro-batch differs", Disagrees(rank=Rank(0), about="gradient"))

    def _answer(self, step: Step) -> Answer:
        """Summed over the pipelines, as the vote does it: an id computed twice or by nobody shows in the losses."""
        losses = [0.0] * self.spec.train.micro_batches
        for pipeline in self.form.plan.pipelines:
            for number in pipeline.micro_batches:
                losses[number] += loss(self.spec, step, number)
        return Answer(step=step, norm=sum(losses), losses=tuple(losses), maxima=maxima(self.spec, step))

    def _finish(self, rank: SimRank) -> None:
        rank.finished = True
        rank.host.rank_says(
            rank, RankFinished(device=rank.device, generation=self.generation, step=Step(self.spec.train.steps))
        )

    def _save_if_due(self, rank: SimRank) -> None:
        assert rank.memory is not None
        step = rank.memory.step
        if self._saves(step):
            rank.host.rank_saved(rank, self.generation, step, is_last=step == self.spec.train.steps)

    def _saves(self, step: Step) -> bool:
        every = self.spec.checkpoint.every
        return bool(every and step and (step % every == 0 or step == self.spec.train.steps))

    def _is_every(self, step: Step) -> bool:
        every = self.spec.recovery.compare_every
        return bool(every) and step % every == 0


def _nothing() -> None:
    """Nobody is left."""
