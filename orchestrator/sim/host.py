"""One simulated host: carries out requests as the real one does, numbers its events, keeps them until they are recorded.

It checks what a real host relies on: terms never go back, a repeated effect is carried out once, no rank is lost sight of.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import assert_never

from orchestrator.domain import codec
from orchestrator.domain.checkpoint import CheckpointKind, ShardRef
from orchestrator.domain.copying import Copying
from orchestrator.domain.errors import StaleTerm
from orchestrator.domain.faults import FaultKind
from orchestrator.domain.generation import Answer
from orchestrator.domain.host_events import (
    CopiesSeen,
    Envelope,
    FaultCarriedOut,
    HostEvent,
    HostFailed,
    HostOpened,
    SelfTested,
    ShardNotSaved,
    ShardSaved,
)
from orchestrator.domain.ids import Device, EffectId, Generation, JobId, NodeId, Step, Term
from orchestrator.domain.job import JobRecord
from orchestrator.domain.memo import Kept, Memo
from orchestrator.domain.requests import (
    BeginJoin,
    CloseGeneration,
    CloseHost,
    EndJoin,
    FormGeneration,
    HostRequest,
    InjectFault,
    KillRank,
    LookAround,
    OpenHost,
    PrepareSeats,
    SaveSoon,
    SelfTest,
    SetPacing,
    StopAfter,
)

from .arena import Arena, Arenas
from .crew import SimCrew
from .lookout import SimLookout
from .memory import Violation
from .newcomer import begin_join
from .outbox import SimOutbox
from .place import Place
from .rank import SimRank

FLUSH_S = 0.2
DISK_FULL = 0.03
WRITE_S: Mapping[CheckpointKind, float] = {"base": 0.12, "journal": 0.06}
"""How long writing takes at most, and is told to take."""
LAST_WORDS_LOST = 0.5
BROKEN = 0.2
"""How often a device that is tested turns out to be."""
GRACE_S = FORSAKEN_S = 60.0
WATCH_S = 5.0


class SimHost:
    """arenas: where its ranks meet those of other hosts."""

    def __init__(self, place: Place, arenas: Arenas, job: JobId, node: NodeId) -> None:
        self.place = place
        self._arenas = arenas
        self.job = job
        self.node = node
        self.is_gone = False
        self.is_closed = False
        self.frozen = False
        self.cut = False
        self.silent_until = 0.0
        """When somebody can tell that it has ended, after it has."""
        self.term = Term(0)
        self.memo: Memo | None = None
        self.outbox = SimOutbox()
        self._outcomes: set[EffectId] = set()
        self._to_write: dict[Device, deque[tuple[float, float, Callable[[], None]]]] = defaultdict(deque)
        """Of each device: within how long and how."""
        self._order: OpenHost | None = None
        self._opened: HostOpened | None = None
        self._failed = False
        self._formed = Generation(0)
        self._heard_at = self._moved_at = place.clock.now
        self._crew = SimCrew(self, self.outbox.say, self._soon, self._leave_s)
        self.lookout = SimLookout(self, self.outbox.say)
        self._when_thawed: list[Callable[[], None]] = []
        place.clock.after(WATCH_S, self._watch)

    @property
    def ranks(self) -> dict[Device, SimRank]:
        return self._crew.ranks

    @property
    def is_reachable(self) -> bool:
        return not (self.frozen or self.cut or self.is_gone or self.node in self.place.unplugged)

    @property
    def at_work(self) -> Generation:
        """The one its ranks were told to form and not yet to leave; 0 where there is none."""
        return self._formed if self._formed > self._crew.closed else Generation(0)

    # --- the supervisor's two calls ---------------------------------------------------------------------------------------

    def handle(self, term: Term, effect: EffectId, request: HostRequest) -> None:
        """Raises StaleTerm."""
        self._hear(term)
        if effect in self._outcomes:
            return
        self._outcomes.add(effect)
        match request:
            case OpenHost():
                self._open(request)
            case PrepareSeats():
                self._prepare(request)
            case FormGeneration():
                self._form(request)
            case CloseGeneration(generation=generation):
                self._crew.close(generation)
            case BeginJoin():
                for device in sorted({move.target for move in request.moves} & set(self.ranks)):
                    rank = self.ranks[device]
                    rank.soon(0.0005, 0.005, lambda rank=rank: self._begin_join(rank, request))  # type: ignore[misc]
            case StopAfter(generation=generation):
                for _, rank in sorted(self.ranks.items()):
                    rank.soon(0.0005, 0.005, lambda rank=rank: rank.ask_to_stop(generation))  # type: ignore[misc]
            case SaveSoon(device=device):
                if device in self.ranks:
                    rank = self.ranks[device]
                    rank.soon(0.0005, 0.005, lambda rank=rank: rank.ask_to_save(request))  # type: ignore[misc]
            case SetPacing(device=device):
                if device in self.ranks:
                    rank = self.ranks[device]
                    rank.soon(0.0005, 0.005, lambda rank=rank: rank.take_pacing(request))  # type: ignore[misc]
            case EndJoin(generation=generation):
                for _, rank in sorted(self.ranks.items()):
                    rank.soon(0.001, 0.25, lambda rank=rank: rank.end_join(generation))  # type: ignore[misc]
            case KillRank():
                self._kill(request)
            case LookAround():
                self.outbox.say(self.lookout.answer(request))
            case SelfTest(device=device):
                passed = self.place.rng.random() > BROKEN
                answer = SelfTested(device=device, passed=passed, message="as good as new" if passed else "wrong answers")
                self._soon(0.5, 3.0, lambda: self.outbox.say(answer))
            case InjectFault():
                self._inject(request)
            case CloseHost():
                self.is_closed = True
                self.end()
            case _:
                assert_never(request)

    def keep(self, term: Term, memo: Memo) -> None:
        """Raises StaleTerm."""
        self._hear(term)
        self.memo = memo

    def kept(self) -> Kept:
        memo = self.memo and replace(self.memo, record=codec.loads(JobRecord, codec.dumps(self.memo.record)))
        heard = max(self._formed, self._crew.closed)
        return Kept(job=self.job, node=self.node, term=self.term, heard=heard, at_work=self.at_work, memo=memo)

    def fetch(self, term: Term, after: int, acked: int) -> tuple[Envelope, ...]:
        """Raises StaleTerm."""
        self._hear(term)
        return self.outbox.fetch(after, acked)

    def _hear(self, term: Term) -> None:
        if term < self.term:
            raise StaleTerm(f"term {term} has been replaced by {self.term}")
        self.term = term
        self._heard_at = self.place.clock.now

    # --- requests ---------------------------------------------------------------------------------------------------------

    def _open(self, order: OpenHost) -> None:
        if self._order is None:
            self._order = order
            self._soon(0.5, 3.0, self._warm)
        elif self._opened is not None:
            self.outbox.say(self._opened)

    def _warm(self) -> None:
        self._opened = HostOpened(seconds=1.0)
        self.outbox.say(self._opened)

    def _prepare(self, request: PrepareSeats) -> None:
        if self._opened is None:
            raise Violation(f"{self.node} is asked for seats before it was opened")
        if not self._failed:
            self._crew.prepare(request)

    def _form(self, form: FormGeneration) -> None:
        if form.generation <= max(self._crew.closed, self._formed):
            return
        self._formed = form.generation
        self._moved_at = self.place.clock.now
        for device, rank in sorted(self.ranks.items()):
            if device not in form.plan.seat_of and device not in form.donors:
                self.kill(rank)
            elif form.addresses.get(device, rank.address) == rank.address:
                rank.soon(0.0005, 0.005, lambda rank=rank: rank.form(form))  # type: ignore[misc]

    def _begin_join(self, rank: SimRank, begin: BeginJoin) -> None:
        begin_join(rank, self._arenas.of.get((self.job, begin.of)), begin)

    def _leave_s(self) -> float:
        assert self._order is not None
        return self._order.spec.recovery.leave_s

    def _kill(self, request: KillRank) -> None:
        rank = self.ranks.get(request.device)
        if rank is None or request.pid not in (0, rank.pid):
            return
        if request.mark and not self.lookout.has_blamed(rank, request.mark):
            raise Violation(f"{rank.device} never did anything but what it should and is {request.why}")
        sight = self.lookout.sight(rank)
        if request.mark and not (request.mark == sight.mark and sight.is_guilty):
            return
        self.kill(rank)

    def _inject(self, request: InjectFault) -> None:
        fault = request.fault
        match fault.fault:
            case FaultKind.HOST_KILL:
                self.end(0.02)
                return
            case FaultKind.ZYGOTE_KILL:
                self._struck(request)
                self.fail()
                return
            case FaultKind.CUT_LINK | FaultKind.SLOW_LINK:
                self._struck(request)
                return
        rank = self.ranks.get(request.device) if request.device else None
        if rank is None or not rank.alive:
            self._struck(request, refused=True)
            return
        if fault.at:
            rank.armed[fault.at] = lambda: self._strike(request, rank)
        else:
            self._strike(request, rank)

    def _strike(self, request: InjectFault, rank: SimRank) -> None:
        self._struck(request)
        if request.fault.fault is FaultKind.KILL:
            self.kill(rank)
        elif request.fault.fault is FaultKind.STOP:
            rank.frozen = True
            self.place.clock.after(request.fault.duration_s, rank.thaw)

    def _struck(self, request: InjectFault, *, refused: bool = False) -> None:
        now = self.place.clock.now
        self.outbox.say(FaultCarriedOut(id=request.fault.id, message=request.fault.fault, at=now, refused=refused))

    # --- ranks ------------------------------------------------------------------------------------------------------------

    def meet(self, form: FormGeneration) -> Arena:
        assert self._order is not None
        return self._arenas.meet(self.job, self._order.spec, form)

    def met(self, generation: Generation) -> Arena | None:
        return self._arenas.of.get((self.job, generation))

    def kill(self, rank: SimRank, raised: str = "") -> None:
        self._crew.kill(rank, raised)

    def rank_says(self, rank: SimRank, event: HostEvent) -> None:
        self._soon(0.0002, 0.003, lambda: self.outbox.say(event))

    def rank_passed(self, rank: SimRank, generation: Generation, answer: Answer) -> None:
        def leave() -> None:
            rank.is_unheard = rank.is_unheard or (not rank.alive and self.place.rng.random() < LAST_WORDS_LOST)
            if not rank.is_unheard:  # what has left it is heard, however late; of the rest only its page knows
                self._soon(0.0, 0.002, take)

        arena = self.met(generation)
        pace_s = arena.pace(rank.device, answer.step) if arena is not None else 0.0

        def take() -> None:
            if pace_s:
                self.outbox.note_pace(generation, rank.device, pace_s)
            if self.outbox.is_new(generation, answer):
                self._moved_at = self.place.clock.now
                if not self.outbox.has_steps:
                    self._soon(FLUSH_S, FLUSH_S, self.outbox.flush)
                self.outbox.add_passed(generation, answer, self.place.clock.now)

        self.place.clock.after(self.place.rng.uniform(0.0002, 0.001), leave)

    def rank_saved(self, rank: SimRank, generation: Generation, step: Step, kind: CheckpointKind, is_last: bool) -> None:
        """It has handed a snapshot over, which is written whatever becomes of it; or cannot be. One after the other."""
        device, rng = rank.device, self.place.rng
        queue = self._to_write[device]

        def write() -> None:
            if not is_last and rng.random() < DISK_FULL:
                self.outbox.say(ShardNotSaved(device=device, generation=generation, step=step, message="the disk is full"))
            else:
                self.place.shards.add((self.job, generation, step, device))
                shard = ShardRef(
                    device=device,
                    index=f"{step}-{generation}-{device}",
                    sha256="0",
                    kind=kind,
                    write_s=WRITE_S[kind],
                    stall_s=WRITE_S[kind] / 20,
                )
                self.outbox.say(ShardSaved(generation=generation, step=step, shard=shard))
            queue.popleft()
            if queue:
                self._soon(*queue[0])

        queue.append((0.01, WRITE_S[kind], write))
        if len(queue) == 1:
            self._soon(*queue[0])

    def copies_seen(self, copies: tuple[Copying, ...]) -> None:
        self.outbox.say(CopiesSeen(copies=copies))

    def rank_skipped(self, rank: SimRank, generation: Generation, step: Step) -> None:
        self.rank_says(
            rank,
            ShardNotSaved(
                device=rank.device, generation=generation, step=step, message="the disk is too slow", is_skipped=True
            ),
        )

    # --- its own life -----------------------------------------------------------------------------------------------------

    def end(self, silent_s: float = 0.0) -> None:
        """Its process ends, and its ranks follow it."""
        if self.is_gone:
            return
        self.is_gone = True
        self.silent_until = self.place.clock.now + silent_s
        self._crew.vanish()

    def fail(self) -> None:
        """Its zygote ends."""
        if not self._failed and self._opened is not None:
            self._failed = True
            self.outbox.say(HostFailed(message="the zygote ended with exit code -9", exit_code=-9))
            self._crew.kill_all()

    def thaw(self) -> None:
        self.frozen = False
        waiting, self._when_thawed = self._when_thawed, []
        for do in waiting:
            do()

    def _soon(self, low_s: float, high_s: float, do: Callable[[], None]) -> None:
        def now() -> None:
            if self.is_gone:
                return
            if self.frozen:
                self._when_thawed.append(now)
            else:
                do()

        self.place.clock.after(self.place.rng.uniform(low_s, high_s), now)

    def _watch(self) -> None:
        """The isolation rule."""
        if self.is_gone:
            return
        now = self.place.clock.now
        self.place.clock.after(WATCH_S, self._watch)
        if self.frozen or self._order is None:
            return
        silent_s, still_s = now - self._heard_at, now - self._moved_at
        allowed = self._order.spec.recovery.max_isolation_s
        if (0 < allowed < silent_s) or (silent_s > GRACE_S and still_s > GRACE_S):
            self._crew.kill_all()
        if 0 < allowed < silent_s - FORSAKEN_S:
            self.end()
