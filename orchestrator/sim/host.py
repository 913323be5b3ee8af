"""One simulated host: carries out requests as the real one does, numbers its events, keeps them until they are recorded.

It checks what a real host relies on: terms never go back, a repeated effect is carried out once, no rank is lost sight of.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, assert_never

from orchestrator.domain.checkpoint import ShardRef
from orchestrator.domain.errors import StaleTerm
from orchestrator.domain.faults import FaultKind
from orchestrator.domain.generation import Answer, RankReport
from orchestrator.domain.ids import Device, EffectId, Generation, JobId, NodeId, Step, Term
from orchestrator.domain.protocol import (
    BeginJoin,
    CloseGeneration,
    CloseHost,
    EndJoin,
    Envelope,
    FaultCarriedOut,
    FormGeneration,
    HostEvent,
    HostFailed,
    HostOpened,
    HostRequest,
    InjectFault,
    KillRank,
    LookAround,
    OpenHost,
    PrepareSeats,
    RankEnding,
    RankExited,
    SeatsPrepared,
    SelfTest,
    SelfTested,
    ShardNotSaved,
    ShardSaved,
    StepsPassed,
    StopAfter,
)

from .lookout import SimLookout
from .memory import Violation
from .rank import SimRank

if TYPE_CHECKING:
    from .world import World

FLUSH_S = 0.2
DISK_FULL = 0.03
LAST_WORDS_LOST = 0.5
BROKEN = 0.2
"""How often a device that is tested turns out to be."""
GRACE_S = 60.0
WATCH_S = 5.0


class SimHost:
    def __init__(self, world: World, job: JobId, node: NodeId) -> None:
        self.world = world
        self.job = job
        self.node = node
        self.is_gone = False
        self.is_closed = False
        self.frozen = False
        self.cut = False
        self.silent_until = 0.0
        """When somebody can tell that it has ended, after it has."""
        self.ranks: dict[Device, SimRank] = {}
        self.term = Term(0)
        self.wake: Callable[[], None] = lambda: None
        self._outcomes: set[EffectId] = set()
        self._events: deque[Envelope] = deque()
        self._last_number = 0
        self._passed: dict[Generation, list[tuple[Answer, float]]] = {}
        self._seen: dict[Generation, Step] = {}
        self._order: OpenHost | None = None
        self._opened: HostOpened | None = None
        self._failed = False
        self._preparing: list[PrepareSeats] = []
        self._closed = Generation(0)
        self._formed = Generation(0)
        self._heard_at = self._moved_at = world.clock.now
        self.lookout = SimLookout(self, self._say)
        self._when_thawed: list[Callable[[], None]] = []
        world.clock.after(WATCH_S, self._watch)

    @property
    def is_reachable(self) -> bool:
        return not (self.frozen or self.cut or self.is_gone or self.node in self.world.unplugged)

    @property
    def at_work(self) -> Generation:
        """The one its ranks were told to form and not yet to leave; 0 where there is none."""
        return self._formed if self._formed > self._closed else Generation(0)

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
                self._close_generation(generation)
            case BeginJoin():
                for device in sorted({move.target for move in request.moves} & set(self.ranks)):
                    rank = self.ranks[device]
                    rank.soon(0.0005, 0.005, lambda rank=rank: rank.join(request))  # type: ignore[misc]
            case StopAfter(generation=generation):
                for _, rank in sorted(self.ranks.items()):
                    rank.soon(0.0005, 0.005, lambda rank=rank: rank.ask_to_stop(generation))  # type: ignore[misc]
            case EndJoin(generation=generation):
                for _, rank in sorted(self.ranks.items()):
                    rank.soon(0.001, 0.25, lambda rank=rank: rank.end_join(generation))  # type: ignore[misc]
            case KillRank():
                self._kill(request)
            case LookAround():
                self._say(self.lookout.answer(request))
            case SelfTest(device=device):
                passed = self.world.rng.random() > BROKEN
                answer = SelfTested(device=device, passed=passed, message="as good as new" if passed else "wrong answers")
                self._soon(0.5, 3.0, lambda: self._say(answer))
            case InjectFault():
                self._inject(request)
            case CloseHost():
                self.is_closed = True
                self.end()
            case _:
                assert_never(request)

    def fetch(self, term: Term, after: int, acked: int) -> tuple[Envelope, ...]:
        """Raises StaleTerm."""
        self._hear(term)
        while self._events and self._events[0].number <= acked:
            self._events.popleft()
        return tuple(envelope for envelope in self._events if envelope.number > after)

    def _hear(self, term: Term) -> None:
        if term < self.term:
            raise StaleTerm(f"term {term} has been replaced by {self.term}")
        self.term = term
        self._heard_at = self.world.clock.now

    # --- requests ---------------------------------------------------------------------------------------------------------

    def _open(self, order: OpenHost) -> None:
        if self._order is None:
            self._order = order
            self._soon(0.5, 3.0, self._warm)
        elif self._opened is not None:
            self._say(self._opened)

    def _warm(self) -> None:
        self._opened = HostOpened(seconds=1.0)
        self._say(self._opened)

    def _prepare(self, request: PrepareSeats) -> None:
        if self._opened is None:
            raise Violation(f"{self.node} is asked for seats before it was opened")
        if self._failed:
            return
        for device in request.devices:
            if device not in self.ranks:
                self._fork(device, request.generation)
        self._preparing.append(request)
        self._answer_preparations()

    def _fork(self, device: Device, generation: Generation) -> None:
        def forked() -> None:
            if device not in self.ranks:
                rank = self.ranks[device] = SimRank(self, device, self.world.next_pid(), generation)
                if generation <= self._closed:
                    self._tell_to_leave(rank, generation)
            self._answer_preparations()

        self._soon(0.005, 0.03, forked)

    def _answer_preparations(self) -> None:
        for request in list(self._preparing):
            # The end of a device's last process is told before its successor is.
            if all(device in self.ranks and self.ranks[device].alive for device in request.devices):
                self._preparing.remove(request)
                ranks = {device: self.ranks[device] for device in request.devices}
                self._say(
                    SeatsPrepared(
                        generation=request.generation,
                        addresses={device: f"{self.node}:{rank.pid}" for device, rank in ranks.items()},
                        pids={device: rank.pid for device, rank in ranks.items()},
                    )
                )

    def _form(self, form: FormGeneration) -> None:
        if form.generation <= max(self._closed, self._formed):
            return
        self._formed = form.generation
        self._moved_at = self.world.clock.now
        for device, rank in sorted(self.ranks.items()):
            if device in form.plan.seat_of or device in form.donors:
                rank.soon(0.0005, 0.005, lambda rank=rank: rank.form(form))  # type: ignore[misc]
            else:
                self.kill(rank)

    def _close_generation(self, generation: Generation) -> None:
        self._closed = max(self._closed, generation)
        for _, rank in sorted(self.ranks.items()):
            if rank.born <= generation:
                self._tell_to_leave(rank, generation)

    def _tell_to_leave(self, rank: SimRank, generation: Generation) -> None:
        assert self._order is not None
        rank.soon(0.0005, 0.005, lambda: rank.close(generation))
        leave_s = self._order.spec.recovery.leave_s
        self._soon(leave_s, leave_s, lambda: self.kill(rank) if rank.reported < generation else None)

    def _kill(self, request: KillRank) -> None:
        rank = self.ranks.get(request.device)
        if rank is None or request.pid not in (0, rank.pid):
            return
        if request.mark and request.mark != self.lookout.sight(rank).mark:
            return
        if request.dump and not self.lookout.is_strange(rank):
            raise Violation(f"{rank.device} does what it should and is {request.why}")
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
            self.world.clock.after(request.fault.duration_s, rank.thaw)

    def _struck(self, request: InjectFault, *, refused: bool = False) -> None:
        now = self.world.clock.now
        self._say(FaultCarriedOut(id=request.fault.id, message=request.fault.fault, at=now, refused=refused))

    # --- ranks ------------------------------------------------------------------------------------------------------------

    def kill(self, rank: SimRank, raised: str = "") -> None:
        """SIGKILL, whoever sent it, or an error of its own; the host sees it a moment later."""
        if rank.alive:
            rank.raised = raised
            rank.die()
            self._soon(0.0002, 0.05, lambda: self._ending(rank))
            self._soon(0.005, 0.03, lambda: self._bury(rank))

    def _ending(self, rank: SimRank) -> None:
        if self.ranks.get(rank.device) is rank and not rank.raised:
            self._say(RankEnding(device=rank.device, pid=rank.pid, report=self._last_report(rank)))

    def _last_report(self, rank: SimRank) -> RankReport:
        owes = rank.session_of > rank.reported
        return rank.last_report(rank.session_of if owes else max(rank.session_of, rank.reported, rank.born))

    def _bury(self, rank: SimRank) -> None:
        if self.ranks.get(rank.device) is not rank:
            return
        del self.ranks[rank.device]
        report = self._last_report(rank)
        code = 1 if rank.raised else -9
        self._say(
            RankExited(
                device=rank.device,
                pid=rank.pid,
                exit_code=code,
                report=report,
                message=rank.raised,
                user_error=bool(rank.raised),
            )
        )
        for request in self._preparing:
            if rank.device in request.devices:
                self._fork(rank.device, request.generation)
                break

    def rank_says(self, rank: SimRank, event: HostEvent) -> None:
        self._soon(0.0002, 0.003, lambda: self._say(event))

    def rank_passed(self, rank: SimRank, generation: Generation, answer: Answer) -> None:
        def take() -> None:
            if not rank.alive and self.world.rng.random() < LAST_WORDS_LOST:
                return  # only its page knows
            if answer.step > self._seen.get(generation, 0):
                self._seen[generation] = answer.step
                self._moved_at = self.world.clock.now
                if not self._passed:
                    self._soon(FLUSH_S, FLUSH_S, self._flush)
                self._passed.setdefault(generation, []).append((answer, self.world.clock.now))

        self._soon(0.0002, 0.003, take)

    def rank_saved(self, rank: SimRank, generation: Generation, step: Step, is_last: bool) -> None:
        """It has handed a snapshot over, which is written whatever becomes of it; or cannot be."""
        device = rank.device

        def write() -> None:
            if not is_last and self.world.rng.random() < DISK_FULL:
                self._say(ShardNotSaved(device=device, generation=generation, step=step, message="the disk is full"))
                return
            self.world.shards.add((self.job, generation, step, device))
            shard = ShardRef(device=device, index=f"{step}-{generation}-{device}", sha256="0")
            self._say(ShardSaved(generation=generation, step=step, shard=shard))

        self._soon(0.01, 0.3, write)

    # --- its own life -----------------------------------------------------------------------------------------------------

    def end(self, silent_s: float = 0.0) -> None:
        """Its process ends, and its ranks follow it."""
        if self.is_gone:
            return
        self.is_gone = True
        self.silent_until = self.world.clock.now + silent_s
        for _, rank in sorted(self.ranks.items()):
            rank.die()
        self.ranks.clear()

    def fail(self) -> None:
        """Its zygote ends."""
        if not self._failed and self._opened is not None:
            self._failed = True
            self._say(HostFailed(message="the zygote ended with exit code -9", exit_code=-9))
            for _, rank in sorted(self.ranks.items()):
                self.kill(rank)

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

        self.world.clock.after(self.world.rng.uniform(low_s, high_s), now)

    def _say(self, event: HostEvent) -> None:
        self._flush()
        self._append(event)

    def _flush(self) -> None:
        passed, self._passed = self._passed, {}
        for generation, answers in passed.items():
            self._append(
                StepsPassed(
                    generation=generation,
                    answers=tuple(answer for answer, _ in answers),
                    at=tuple(at for _, at in answers),
                )
            )

    def _append(self, event: HostEvent) -> None:
        self._last_number += 1
        self._events.append(Envelope(number=self._last_number, event=event))
        self.wake()

    def _watch(self) -> None:
        """The isolation rule."""
        if self.is_gone:
            return
        now = self.world.clock.now
        self.world.clock.after(WATCH_S, self._watch)
        if self.frozen or self._order is None:
            return
        silent_s, still_s = now - self._heard_at, now - self._moved_at
        allowed = self._order.spec.recovery.max_isolation_s
        if (0 < allowed < silent_s) or (silent_s > GRACE_S and still_s > GRACE_S):
            for _, rank in sorted(self.ranks.items()):
                self.kill(rank)
