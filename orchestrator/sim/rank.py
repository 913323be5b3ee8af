"""One simulated training process: obeys like the real one, reports once per generation, remembers only what it holds.

It owns its memory and what it saw of votes. It refuses to know when anything happens: its arena and its host say so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import Protocol

from orchestrator.domain import copying
from orchestrator.domain.checkpoint import CheckpointKind
from orchestrator.domain.generation import Answer, Arrived, Disagrees, Finding, RankReport
from orchestrator.domain.host_events import HostEvent, RankReady, RankReported
from orchestrator.domain.ids import Device, Generation, JobId, Rank, Step
from orchestrator.domain.origin import FromMemory, Restore
from orchestrator.domain.profile import Interval, joined
from orchestrator.domain.requests import FormGeneration, SaveSoon, SetPacing
from orchestrator.domain.sight import Traffic

from .memory import Flip, Memory, Violation, uncovered
from .place import Place

STUCK = 0.03
"""How often a rank does not leave when told, so that its host has to kill it."""

WEARS = 0.2
"""How often leaving costs a thread, as it can on a transport that cannot be left."""


class Meeting(Protocol):
    """The generation that a rank is in, as far as it and who looks at it know."""

    @property
    def form(self) -> FormGeneration: ...
    @property
    def generation(self) -> Generation: ...
    @property
    def stage(self) -> int:
        """Exchanges begun so far."""
        ...

    @property
    def done(self) -> Set[Device]:
        """Who has sent its part of this one."""
        ...

    def pace(self, device: Device, step: Step) -> float: ...
    def updated_wrongly(self, rank: SimRank) -> None: ...
    def traffic(self, me: Device) -> Mapping[Rank, Traffic]: ...
    def join(self, rank: SimRank) -> None: ...
    def left(self, rank: SimRank) -> None: ...
    def gone(self, rank: SimRank) -> None: ...


class Copying(Protocol):
    """What a newcomer receives while others train."""

    @property
    def of(self) -> Generation: ...
    @property
    def generation(self) -> Generation: ...


class Home(Protocol):
    """A rank's host, as far as its rank and who trains with it know."""

    @property
    def place(self) -> Place: ...
    @property
    def job(self) -> JobId: ...
    def meet(self, form: FormGeneration) -> Meeting: ...
    def met(self, generation: Generation) -> Meeting | None: ...
    def kill(self, rank: SimRank, raised: str = "") -> None: ...
    def rank_says(self, rank: SimRank, event: HostEvent) -> None: ...
    def rank_passed(self, rank: SimRank, generation: Generation, answer: Answer) -> None: ...
    def rank_skipped(self, rank: SimRank, generation: Generation, step: Step) -> None: ...
    def copies_seen(self, copies: tuple[copying.Copying, ...]) -> None: ...
    def rank_saved(
        self, rank: SimRank, generation: Generation, step: Step, kind: CheckpointKind, is_last: bool
    ) -> None: ...


class SimRank:
    def __init__(self, host: Home, device: Device, pid: int, born: Generation) -> None:
        self.host = host
        self.device = device
        self.pid = pid
        self.born = born
        self.alive = True
        self.frozen = False
        self.hung = False
        """Its training thread never does anything again."""
        self.strange_at = float("-inf")
        """When it was last seen frozen or hung."""
        self.memory: Memory | None = None
        self.arrived: list[Interval] = []
        """What a transfer has brought that is not over, all of it at `arrived_at`."""
        self.arrived_at = Step(0)
        self.newcomer: Copying | None = None
        self.stop_after = Generation(0)
        self.save_soon = Generation(0)
        self.rest = Generation(0)
        self.pacing: SetPacing | None = None
        self.arena: Meeting | None = None
        self.session_of = Generation(0)
        self.closed = Generation(0)
        self.reported = Generation(0)
        self.voted = Step(0)
        self.answer: Answer | None = None
        self.answered_in = Generation(0)
        self.finished = False
        self.found: tuple[Generation, Finding] | None = None
        self.noted: tuple[Generation, Step, frozenset[Flip]] | None = None
        """What it held right after its last update."""
        self.is_unheard = False
        """Its host has missed a word of its last, so it hears none after it."""
        self.stuck = 0
        self.raised = ""
        self._when_thawed: list[Callable[[], None]] = []
        self.armed: dict[str, Callable[[], None]] = {}
        """What happens on purpose at a fault point, once."""

    @property
    def address(self) -> str:
        """Where it listens: another process on its device listens elsewhere."""
        return f"{self.device.node}:{self.pid}"

    def soon(self, low_s: float, high_s: float, do: Callable[[], None]) -> None:
        """Do it in a while, if this process lives then; a frozen one does it when it thaws."""

        def now() -> None:
            if self.hung:
                return
            if self.alive and self.frozen:
                self._when_thawed.append(now)
            elif self.alive:
                do()

        self.host.place.clock.after(self.host.place.rng.uniform(low_s, high_s), now)

    def thaw(self) -> None:
        self.frozen = False
        self.strange_at = self.host.place.clock.now
        waiting, self._when_thawed = self._when_thawed, []
        for do in waiting:
            do()

    def reaches(self, point: str) -> bool:
        """Whether it lives on after `point`."""
        if (strike := self.armed.pop(point, None)) is not None:
            strike()
        return self.alive

    def die(self) -> None:
        self.alive = False
        if self.arena is not None:
            self.arena.gone(self)
            self.arena = None

    # --- orders -----------------------------------------------------------------------------------------------------------

    def form(self, form: FormGeneration) -> None:
        if form.generation <= max(self.closed, self.session_of):
            return
        if self.arena is not None:
            self.arena.left(self)
        if self.newcomer is not None:  # what a copy that was not ended had brought is dropped with it
            self.newcomer = None
            self.arrived.clear()
        self.session_of = form.generation
        self.reported = max(self.reported, Generation(form.generation - 1))
        self.finished = False
        self.arena = self.host.meet(form)
        self.arena.join(self)

    def close(self, generation: Generation) -> None:
        self.closed = max(self.closed, generation)
        if self.host.place.rng.random() < STUCK and not self.host.place.scenario.gentle:
            return
        newcomer = self.newcomer
        if newcomer is not None and newcomer.of == generation:  # made for an earlier join, it is told of both ends
            self.soon(0.001, 0.25, lambda: self.end_join(newcomer.generation))
            return
        if self.arena is not None and self.arena.generation <= generation:
            self.stuck += self.host.place.rng.random() < WEARS
            self.leave(None, "closed")
        if self.reported < generation:
            self.soon(0.001, 0.01, lambda: self._report(generation, None, "closed while it waited"))

    def end_join(self, generation: Generation) -> None:
        newcomer = self.newcomer
        if newcomer is not None and newcomer.generation == generation:
            self.newcomer = None
            self._report(newcomer.of, None, "training stopped for this newcomer")

    def ask_to_stop(self, generation: Generation) -> None:
        self.stop_after = max(self.stop_after, generation)

    def ask_to_save(self, order: SaveSoon) -> None:
        if order.rests:
            self.rest = order.generation
        else:
            self.save_soon = order.generation

    def take_pacing(self, order: SetPacing) -> None:
        self.pacing = order

    def stopped(self) -> None:
        """Between two steps, as asked: its connections stay open."""
        arena = self.arena
        assert arena is not None
        self.arena = None
        self.soon(0.001, 0.015, lambda: self._report(arena.generation, None, "asked to stop", stopped=True))

    def leave(self, lost_peer: Rank | None, cause: str, found: Finding | None = None) -> None:
        """Stop where it is and report."""
        arena = self.arena
        assert arena is not None
        if found is not None:
            self.found = arena.generation, found
        arena.left(self)
        self.arena = None
        self.soon(0.001, 0.015, lambda: self._report(arena.generation, lost_peer, cause))

    def _report(self, generation: Generation, lost_peer: Rank | None, cause: str, *, stopped: bool = False) -> None:
        if self.reported >= generation or not self.reaches("before_report"):
            return
        self.reported = generation
        arena = self.host.met(generation)
        changed = None
        if self.has_changed:
            if arena is not None and self.device in arena.form.plan.seat_of:
                changed = Disagrees(rank=arena.form.plan.seat_of[self.device].rank, about="memory")
            self.memory = None
        report = RankReport(
            device=self.device,
            generation=generation,
            voted=self.voted,
            answer=self.answer,
            answered_in=self.answered_in,
            held=self.memory.held if self.memory else None,
            lost_peer=lost_peer,
            cause=cause,
            arrived=Arrived(step=self.arrived_at, intervals=joined(self.arrived)) if self.arrived else None,
            stopped=stopped,
            found=self._found_in(generation) or changed,
            stuck=self.stuck,
        )
        self.host.rank_says(self, RankReported(report=report))

    def last_report(self, generation: Generation) -> RankReport:
        """What its progress page says after its death."""
        return RankReport(
            device=self.device,
            generation=generation,
            voted=self.voted if self.session_of == generation else Step(0),
            answer=self.answer if self.answered_in == generation else None,
            answered_in=generation,
            held=None,
            cause="dead",
            found=found if isinstance(found := self._found_in(generation), Disagrees) else None,
        )

    def _found_in(self, generation: Generation) -> Finding | None:
        return self.found[1] if self.found and self.found[0] == generation else None

    @property
    def has_changed(self) -> bool:
        """It no longer has the bits that its last update left."""
        memory = self.memory
        if memory is None or self.noted is None:
            return False
        generation, step, wrong = self.noted
        return (memory.generation, memory.step) == (generation, step) and memory.wrong != wrong

    # --- what happens to it in its arena ----------------------------------------------------------------------------------

    def settle(self, restore: Restore) -> None:
        """Accept what was recorded as committed."""
        if not isinstance(restore, FromMemory):
            self.memory, self.answer, self.answered_in, self.voted = None, None, Generation(0), Step(0)
            self.arrived.clear()
            return
        if self.arrived_at != restore.step:
            self.arrived.clear()
        self.arrived_at = restore.step
        held, answer = self.memory, restore.answer
        if held and answer and held.step == restore.step - 1 and self.voted == restore.step == answer.step:
            held.step = restore.step
            self.note()
        self.answer, self.answered_in = answer, Generation(0)

    def whole_at(self, step: Step) -> tuple[Interval, ...]:
        """What of its memory is whole at a step."""
        held = self.memory.intervals if self.memory is not None and self.memory.step == step else ()
        return joined((*held, *(self.arrived if self.arrived_at == step else ())))

    def kept_beside(self, moved: list[Interval], step: Step) -> tuple[Interval, ...]:
        """The same, without what is sent again: it came after the report, or in a join that nobody asks about.

        That costs bytes and no more: the same element of the same step has the same bits.
        """
        held = self.memory.intervals if self.memory is not None and self.memory.step == step else ()
        arrived = self.arrived if self.arrived_at == step else ()
        return joined((*held, *uncovered(arrived, moved)))

    def note(self) -> None:
        """Its bits are right, as far as it can know."""
        assert self.memory is not None
        self.noted = self.memory.generation, self.memory.step, self.memory.wrong

    def covers(self, interval: Interval, step: Step) -> bool:
        """Whether it can be the source of an interval at a step."""
        return not uncovered((interval,), self.whole_at(step))

    def restored(self, memory: Memory) -> None:
        self.memory = memory
        self.note()
        self.arrived.clear()
        self.voted = memory.step
        self.host.rank_says(self, RankReady(device=self.device, generation=memory.generation, phases={"form": 0.01}))

    def passed(self, generation: Generation, answer: Answer) -> None:
        held = self.memory
        if held is None or held.generation != generation or held.step != answer.step - 1 or self.voted != answer.step:
            raise Violation(f"{self.device} passes step {answer.step} of generation {generation} holding {held}")
        self.answer, self.answered_in = answer, generation
        held.step = answer.step
        self.note()
        self.host.rank_passed(self, generation, answer)
        self.reaches("after_vote")
