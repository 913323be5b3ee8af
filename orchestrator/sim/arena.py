"""One generation of one job, in lockstep: connect, restore, then compute, vote and pass, each rank at its own instant.

    joined by all -> connected by all -> restored (barrier) -> [computed by all -> voted by all -> passed at each] ...

A stage begins when everybody has finished the one before; a rank that dies in the middle splits the others between those
who got through and those who did not, as a kill inside an all-reduce does.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from orchestrator.domain.copying import Copying
from orchestrator.domain.generation import Answer, Disagrees, NotFinite, Unreadable
from orchestrator.domain.host_events import RankFinished
from orchestrator.domain.ids import Device, Generation, JobId, Rank, Step
from orchestrator.domain.layout import layout, partners
from orchestrator.domain.origin import FromCheckpoint, FromMemory, FromSeed
from orchestrator.domain.requests import FormGeneration
from orchestrator.domain.sight import Traffic
from orchestrator.domain.spec import JobSpec

from .checkers import Checker
from .filling import Filling
from .memory import Flip, Violation
from .place import Place
from .rank import SimRank
from .saving import Saving
from .scenario import loss, maxima, profile

FORM_TIMEOUT_S = 10.0
WELL_S = 1.0
"""Who trains well commits a step within this, where no device has been made slow."""
MEND_S = 0.05
COMPUTE_S = (0.08, 0.12)
LAYER_S = 0.01
BLINK_S = (0.0005, 0.02)
NOTICED = 0.8
"""How often a rank is connected to one that dies, and feels it."""
LOST_IN_THE_MIDDLE = 0.5
READS, READ_S, READ_BYTES = 10, 12.0, 1000
"""Of a checkpoint that is read slowly: in how many parts, how long one takes, and bytes in it."""


class Arena:
    def __init__(self, place: Place, checker: Checker, job: JobId, spec: JobSpec, form: FormGeneration) -> None:
        self._place = place
        self._checker = checker
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
        self._saving = Saving(place, spec, form)
        self.stopping = False
        self.resting = False
        """A rank that was asked to stop has said so in the vote."""
        self.followers: dict[Device, Callable[[Step], None]] = {}
        """Newcomers who are sent what it takes to apply a step."""
        self.layout = layout(form.plan, profile(), mirrors=spec.recovery.mirrors)
        self._filling = Filling(place, job, spec, form, self.layout, self.here)
        self.step = self._filling.step
        """Where it starts from."""
        self.at = self.step
        """Applied by every rank."""
        self.mirrored = {m: owner for owner, m in partners(form.plan).items()} if spec.recovery.mirrors else {}
        """Mirror -> whose intervals it has too."""
        self.is_spoiled = False
        """The next gradient that is computed twice comes out in two ways."""
        self.is_not_finite = False
        """The next vote comes out as NaN."""
        self.is_reading = False
        self.disagreed: set[Step] = set()
        """Steps after which an owner and its mirror had different bits."""
        self._hashes: dict[Device, frozenset[Flip]] = {}
        self._passed_first, self._passed_at, self._cut_until = inf, -inf, -inf
        """When its first and its latest vote passed, and when a link was last seen to be cut."""

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
            if self._place.rng.random() < NOTICED and (rank.device, other.device) not in cut:
                other.soon(*BLINK_S, lambda other=other: self._feels(other, number))  # type: ignore[misc]

    def _feels(self, rank: SimRank, lost: Rank) -> None:
        if rank.arena is self and not rank.finished:
            rank.leave(lost, f"connection to rank {lost} broke")

    def _timed_out(self, rank: SimRank) -> None:
        if rank.arena is self and not self.has_started and not self.is_reading:
            rank.leave(None, "not every peer was there in time")

    def _each(
        self,
        within_s: tuple[float, float],
        do: Callable[[SimRank], None],
        then: Callable[[], None],
        longer: Callable[[SimRank], float] = lambda _: 1.0,
    ) -> None:
        """Every rank does it at its own instant; `then` follows once all have. longer: how many times, for each."""
        done: set[Device] = set()
        self.stage, self.done = self.stage + 1, done

        def pass_on() -> None:
            """Once every message has arrived, which over a link that is cut none does."""
            if self.is_broken:
                return
            if self.cut_pairs():
                self._cut_until = self._place.clock.now
                self._place.clock.after(MEND_S, pass_on)
            else:
                then()

        def one(rank: SimRank) -> None:
            if rank.arena is not self or (self.is_broken and self._place.rng.random() < LOST_IN_THE_MIDDLE):
                return
            do(rank)
            done.add(rank.device)
            if len(done) == len(self.members):
                pass_on()

        for rank in [self.here[device] for device in self.members if device in self.here]:
            low_s, high_s = within_s
            times = longer(rank)
            rank.soon(low_s * times, high_s * times, lambda rank=rank: one(rank))  # type: ignore[misc]

    def cut_pairs(self) -> frozenset[tuple[Device, Device]]:
        """Members between whom nothing passes, in either order."""
        members, off = self.members, self._place.unplugged
        cut = {pair for pair in self._place.cut_links if set(pair) <= set(members)}
        if off:
            cut |= {(a, b) for a in members for b in members if a.node != b.node and (a.node in off or b.node in off)}
        return frozenset(cut | {(b, a) for a, b in cut})

    def traffic(self, me: Device) -> dict[Rank, Traffic]:
        """One message to everybody in each exchange. Over a cut link the last one does not arrive."""
        stage, cut = self.stage, self.cut_pairs()
        ends = {device for pair in cut for device in pair}
        found = {}
        for number, device in enumerate(self.members):
            if device == me:
                continue
            if not stage:  # forming
                found[Rank(number)] = Traffic(awaits=device not in self.here)
            elif len(self.done) < len(self.members):
                came = device in self.done
                found[Rank(number)] = Traffic(sent=stage, received=stage - (not came), awaits=not came)
            elif (me, device) in cut:
                found[Rank(number)] = Traffic(sent=stage, received=stage - 1, awaits=True)
            else:  # this exchange is over here; those at a cut link are waited for in the next
                is_ahead = me not in ends
                found[Rank(number)] = Traffic(sent=stage + is_ahead, received=stage, awaits=is_ahead and device in ends)
        return found

    def well_s(self) -> float:
        """For how long it has trained with everybody there and well, as far as can be told now; 0 where it does not."""
        now = self._place.clock.now
        if self.is_broken or not self.has_started or self.cut_pairs() or len(self.here) != len(self.members):
            return 0.0
        if any(rank.frozen or rank.hung or not rank.alive for rank in self.here.values()):
            return 0.0
        since = max(self._cut_until, self._passed_first, *(rank.strange_at for rank in self.here.values()))
        return max(0.0, now - since) if now - self._passed_at < WELL_S else 0.0

    # --- restoring --------------------------------------------------------------------------------------------------------

    def _restore(self) -> None:
        self._filling.begin(self.members)
        if self._place.scenario.slow_reads and isinstance(self.form.restore, FromCheckpoint):
            self.is_reading = True
            self._read_on(0)
        else:
            self._receive()

    def _read_on(self, done: int) -> None:
        """As slowly as a disk can be: hosts tell how far their ranks are."""
        self.stage, self.done = self.stage + 1, set()  # nobody waits for anybody
        for node, host in {device.node: rank.host for device, rank in self.here.items()}.items():
            mine = [device for device in self.here if device.node == node]
            host.copies_seen(() if done == READS else tuple(_reading(device, self.step, done) for device in mine))
        if done == READS:
            self._receive()
        elif not self.is_broken:
            self._place.clock.after(READ_S, lambda: self._read_on(done + 1))

    def _receive(self) -> None:
        self._each(BLINK_S, self._filling.receive_some, self._receive_rest)

    def _receive_rest(self) -> None:
        self._filling.kill_donor()
        self._saving.catch_up(self.step)
        is_kept = isinstance(self.form.restore, FromMemory)
        compares = is_kept and self._saving.saves(self.step) and bool(self.mirrored)
        then = self._compare if compares else self._compute_next
        self._each(BLINK_S, self._filling.receive_all, lambda: self._each(BLINK_S, self._restored, then))

    def _restored(self, rank: SimRank) -> None:
        if rank.device in self.form.donors:
            rank.arena = None
            return
        if not rank.reaches("in_transfer"):
            return
        restore = self.form.restore
        checkpoint = None if isinstance(restore, FromSeed) else restore.checkpoint
        is_read = isinstance(restore, FromCheckpoint) or (
            isinstance(restore, FromMemory) and any(read.target == rank.device for read in restore.reads)
        )
        bad = self._filling.damaged()
        if checkpoint is not None and is_read and bad:
            found = Unreadable(step=checkpoint.step, generation=checkpoint.generation, since=min(bad))
            rank.leave(None, f"{checkpoint.path} cannot be read", found)
            return
        self.has_started = True
        self._checker.started(self.job, self.generation)
        memory = self._filling.memory(rank.device)
        rank.restored(memory)
        self._hashes[rank.device] = memory.wrong
        if isinstance(self.form.restore, FromMemory) and not self.mirrored:
            self._save_if_due(rank)
        if self.step == self.spec.train.steps:
            self._finish(rank, self.step)

    # --- training ---------------------------------------------------------------------------------------------------------

    def _dismiss_donors(self) -> None:
        """They have done their part."""
        self.members = self.form.plan.devices
        for donor in set(self.here) - set(self.members):
            del self.here[donor]

    def _compute_next(self) -> None:
        self._dismiss_donors()
        step = Step(max(rank.memory.step for rank in self.here.values() if rank.memory) + 1)
        if step == self._place.scenario.broken.get(self.job):
            rank = self.here[self._place.rng.choice(self.members)]
            rank.soon(*COMPUTE_S, lambda: rank.host.kill(rank, f"BrokenError: at {self._place.clock.now:.3f}"))
            self._each(COMPUTE_S, lambda _: None, lambda: None)  # nobody gets to the vote
        elif step <= self.spec.train.steps:
            self._each(
                COMPUTE_S,
                self._check_gradient,
                lambda: self._each(BLINK_S, vote, lambda: self._pass(step)),
                self._share_of_work,
            )

        def vote(rank: SimRank) -> None:
            rank.voted = step
            self.stopping = self.stopping or rank.stop_after >= self.generation
            if rank.rest >= self.generation:
                self.resting = True
                self._saving.asked_for.add(step)
            if rank.save_soon == self.generation:
                rank.save_soon = Generation(0)
                self._saving.asked_for.add(step)
            if rank.pacing is not None and rank.pacing.generation == self.generation:
                self._saving.take_pacing(rank.pacing.pacing)
                rank.pacing = None
            if rank.reaches("in_vote") and rank.has_changed:
                found = Disagrees(rank=self.form.plan.seat_of[rank.device].rank, about="memory")
                rank.leave(None, "bits of its memory have changed", found)

    def _pass(self, step: Step) -> None:
        """Everybody has voted: this is the instant at which the step is committed, whoever lives to see it."""
        if self.is_not_finite and (self.job, step) not in self._place.not_finite:
            self.is_not_finite = False
            self._place.not_finite.add((self.job, step))  # a second time it would be the training itself
            found = NotFinite(step=step, micro_batches=(0,))
            self._each(BLINK_S, lambda rank: rank.leave(None, f"step {step} gave micro-batch 0: loss nan", found), _nothing)
            return
        if any(self._differs(mirror) for mirror in self.mirrored):
            self._each(BLINK_S, self._look_at_copy, _nothing)
            return
        self._checker.vote_completed(self.job, self.generation, step)
        self._passed_at = self._place.clock.now
        self._passed_first = min(self._passed_first, self._passed_at)
        answer = self._answer(step)
        self._saving.decide(step)

        def see(rank: SimRank) -> None:
            rank.passed(self.generation, answer)
            if not rank.alive:
                return
            if self.kills_voter:
                self.kills_voter = False
                self._place.note(f"* {self.job} on {rank.device} dies having passed step {step}")
                rank.host.kill(rank)
                return
            assert rank.memory is not None
            self._hashes[rank.device] = rank.memory.wrong
            if not compares:
                self._save_if_due(rank)
            if step == self.spec.train.steps:
                self._finish(rank, step)

        compares = bool(self.mirrored) and (self._saving.is_base(step) or self._is_every(step))
        self._each(BLINK_S, see, self._compare if compares else self._applied)

    def _applied(self) -> None:
        """By everybody; newcomers are sent what they need to do the same. Here training stops if anybody was asked to."""
        self.at = Step(max(rank.memory.step for rank in self.here.values() if rank.memory))
        for _, follow in sorted(self.followers.items()):
            follow(self.at)
        if self.resting and self._saving.saves(self.at):
            self._each(BLINK_S, lambda rank: self._finish(rank, self.at), _nothing)
            return
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
        if (self.job, self.form.generation, rank.memory.step, rank.device) not in self._place.shards:
            self.disagreed.add(rank.memory.step)  # else it was right when it was saved
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

    def _share_of_work(self, rank: SimRank) -> float:
        """Of what each would do of an even plan on devices alike."""
        plan = self.form.plan
        mine = len(plan.pipelines[plan.seat_of[rank.device].pipeline].micro_batches)
        return self._place.slow.get(rank.device, 1.0) * mine * plan.dp / self.spec.train.micro_batches

    def pace(self, device: Device, step: Step) -> float:
        """Seconds in which it computes a micro-batch, as it would measure that; 0.0 for the first step."""
        if step <= self.step + 1:
            return 0.0
        seat = self.form.plan.seat_of[device]
        stage = self.form.plan.stage_at(seat)
        noise = 1.0 + (7 * step + 3 * seat.rank) % 11 / 100
        return LAYER_S * (stage.last - stage.first) * self._place.slow.get(device, 1.0) * noise

    def _answer(self, step: Step) -> Answer:
        """Summed over the pipelines, as the vote does it: an id computed twice or by nobody shows in the losses."""
        losses = [0.0] * self.spec.train.micro_batches
        for pipeline in self.form.plan.pipelines:
            for number in pipeline.micro_batches:
                losses[number] += loss(self.spec, step, number)
        forged = set(self._place.forged.values())
        if any(rank.memory and rank.memory.wrong & forged for rank in self.here.values()):
            losses[0] += 1.0
        return Answer(step=step, norm=sum(losses), losses=tuple(losses), maxima=maxima(self.spec, step))

    def _finish(self, rank: SimRank, step: Step) -> None:
        rank.finished = True
        rank.host.rank_says(rank, RankFinished(device=rank.device, generation=self.generation, step=step))

    def _save_if_due(self, rank: SimRank) -> None:
        assert rank.memory is not None
        step = rank.memory.step
        kind = self._saving.kind_of(step)
        if kind is not None:
            rank.host.rank_saved(rank, self.generation, step, kind, is_last=step == self.spec.train.steps)
        elif self._saving.is_skipped(step) and self.form.plan.seat_of[rank.device].rank == 0:
            rank.host.rank_skipped(rank, self.generation, step)

    def _is_every(self, step: Step) -> bool:
        every = self.spec.recovery.compare_every
        return bool(every) and step % every == 0


def _reading(device: Device, step: Step, parts: int) -> Copying:
    return Copying(
        device=device,
        what="restoring",
        step=step,
        done_bytes=parts * READ_BYTES,
        total_bytes=READS * READ_BYTES,
        seconds=parts * READ_S,
    )


def _nothing() -> None:
    """Nobody is left."""


class Arenas:
    """Every generation that anybody was told to form, by job and number."""

    def __init__(self, place: Place, checker: Checker) -> None:
        self._place = place
        self._checker = checker
        self.of: dict[tuple[JobId, Generation], Arena] = {}

    def meet(self, job: JobId, spec: JobSpec, form: FormGeneration) -> Arena:
        """The one that this form is for. Raises Violation where it was formed in another way already."""
        key = (job, form.generation)
        met = self.of.get(key)
        # A store that went back forgets generations: the next one of that number is formed where nobody has heard of it.
        if met is None or (met.form != form and not met.here):
            self.of[key] = Arena(self._place, self._checker, job, spec, form)
        if self.of[key].form != form:
            raise Violation(f"generation {form.generation} of {job} is formed in two ways")
        return self.of[key]
