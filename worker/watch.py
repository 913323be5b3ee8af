"""Which of a host's ranks do not move, judged by what their generation has taught about moving.

Pure: instants, pages and processes are arguments. It learns how long a rank of this host has gone without progress in each
kind of phase, in a wait and outside one, and belongs to one generation: the next starts to learn anew.

    what is seen                              limit                                      what follows
    stopped (SIGSTOP)                         STOPPED_S                                  guilty
    asleep outside a wait                     max(floor of the kind, ASLEEP_X longest)   guilty
    burning CPU, in disk or behind its own    max(floor of the kind, BURNING_X longest)  guilty; where a peer's message is
    device outside a wait                                                                waited for inside it, looked into
    runnable and given no CPU                 none: the machine is busy                  nothing
    in a wait in which nothing moves          max(floor of the kind, WAIT_X longest)     looked into: another's doing

Only a guilty rank is ever killed, so a machine under load raises no alarm. An alarm is raised once per stall and again
after twice the time; a stall that ends by itself has been learned, so it takes a longer one to be told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from orchestrator.domain.ids import Device, Generation
from orchestrator.domain.sight import Phase

from .page.reader import Glance

LOOK_S = 0.1
"""How often somebody should look, as soon as a rank stands still,"""
CALM_LOOK_S = 0.25
"""and while all of them move."""
STOPPED_S = 0.4
ASLEEP_X, BURNING_X, WAIT_X = 5.0, 20.0, 4.0
CURIOUS_S = 0.15
"""Processes of ranks that have been still for less are not looked at."""
DEAF_S = 0.5
"""A wait that tells whom it is for does so every tenth of a second; one that has gone silent is none."""
BLINKED_S = 1.0
"""A watch that was itself not run for so long has seen nothing of that time, and counts none of it."""


class Kind(StrEnum):
    FORM = "form"
    RESTORE = "restore"
    FIRST = "first step"
    STEP = "step"
    SAVE = "save"
    EVALUATION = "evaluation"


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """The least limits, in seconds."""

    wait_s: float
    asleep_s: float
    burning_s: float


FLOORS = {
    Kind.FORM: Floor(wait_s=2.0, asleep_s=5.0, burning_s=60.0),
    # State may come from a slow disk, and the program may set up whatever it likes when it is built.
    Kind.RESTORE: Floor(wait_s=3.0, asleep_s=10.0, burning_s=120.0),
    # Compilers, caches, autotuning: the first step of a generation teaches nothing about the second.
    Kind.FIRST: Floor(wait_s=3.0, asleep_s=8.0, burning_s=120.0),
    Kind.STEP: Floor(wait_s=1.0, asleep_s=1.5, burning_s=8.0),
    Kind.SAVE: Floor(wait_s=3.0, asleep_s=20.0, burning_s=120.0),
    # A pass without a backward may run in other kernels, so it is the first of its kind as a first step is.
    Kind.EVALUATION: Floor(wait_s=3.0, asleep_s=8.0, burning_s=120.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process at one instant: what the system charges it with since it was born."""

    is_stopped: bool
    is_in_disk: bool
    cpu_s: float
    """Of all its threads."""
    starved_s: float
    """In which its main thread could have run and was not let."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opinion:
    """What to make of one rank. why: in words, without who and where; empty while nothing is strange."""

    still_s: float = 0.0
    in_wait: bool = False
    is_stopped: bool = False
    is_guilty: bool = False
    why: str = ""


@dataclass(slots=True)
class _Still:
    """A rank since it last moved."""

    mark: tuple[object, ...]
    kind: Kind
    still_s: float = 0.0
    quiet_s: float = 0.0
    """The longest that nothing moved in the wait it is in."""
    asleep_s: float = 0.0
    burning_s: float = 0.0
    stopped_s: float | None = None
    """Since it was first seen stopped."""
    process: Process | None = None
    told_s: float = 0.0
    """How long it had been still when that was last told."""
    opinion: Opinion = field(default_factory=Opinion)


class Watch:
    """tells_waits: whether ranks say in a wait whom it is for; then one that no longer says so does not wait.

    waits_inside: whether a device waits for peers, so that who waits for its device may be waiting for anybody. hang_s: a
    floor of the job's own, for whoever is outside a wait and not stopped.
    """

    def __init__(
        self, generation: Generation, now: float, *, tells_waits: bool, waits_inside: bool = False, hang_s: float = 0.0
    ) -> None:
        self.generation = generation
        self.looked_at = now
        self._tells_waits = tells_waits
        self._waits_inside = waits_inside
        self._hang_s = hang_s
        self._still: dict[Device, _Still] = {}
        self._longest_wait: dict[Kind, float] = {}
        self._longest_work: dict[Kind, float] = {}

    def look(
        self, now: float, glances: Mapping[Device, Glance], process_of: Callable[[Device], Process | None]
    ) -> tuple[Device, ...]:
        """Those whose stall is to be told now. process_of is asked only about ranks that have not moved lately."""
        passed_s, self.looked_at = now - self.looked_at, now
        if passed_s > BLINKED_S:
            self._still.clear()
            passed_s = 0.0
        for device in self._still.keys() - glances.keys():
            del self._still[device]
        return tuple([d for d, glance in glances.items() if self._judge(d, glance, now, passed_s, process_of)])

    @property
    def sees_stillness(self) -> bool:
        """Whether anybody had not moved when it last looked."""
        return any(still.still_s for still in self._still.values())

    def opinion(self, device: Device) -> Opinion:
        still = self._still.get(device)
        return still.opinion if still else Opinion()

    def limits(self, kind: Kind) -> Floor:
        """As they are now."""
        floor, work = FLOORS[kind], self._longest_work.get(kind, 0.0)
        return Floor(
            wait_s=max(floor.wait_s, WAIT_X * self._longest_wait.get(kind, 0.0)),
            asleep_s=max(floor.asleep_s, self._hang_s, ASLEEP_X * work),
            burning_s=max(floor.burning_s, self._hang_s, BURNING_X * work),
        )

    def is_waiting(self, glance: Glance, now: float) -> bool:
        if not glance.in_wait:
            return False
        if not self._tells_waits:
            return True
        return now - max(glance.told_at, glance.waiting_since) < DEAF_S

    def _judge(
        self,
        device: Device,
        glance: Glance,
        now: float,
        passed_s: float,
        process_of: Callable[[Device], Process | None],
    ) -> bool:
        mark = (glance.generation, glance.phase, glance.step, glance.collective, glance.in_wait, glance.progressed_at)
        still = self._still.get(device)
        if still is None or still.mark != mark:
            if still is not None and still.mark[0] == self.generation:
                self._learn(still, passed_s)
            self._still[device] = _Still(mark, self._kind(glance))
            return False
        still.still_s += passed_s
        if glance.generation == self.generation and glance.phase is Phase.IDLE:
            return False  # it waits for orders, or holds the final state
        if still.still_s < CURIOUS_S or (process := process_of(device)) is None:
            return False
        in_wait = self.is_waiting(glance, now)
        self._account(still, process, passed_s, in_wait, glance.is_behind)
        quiet_s = min(still.still_s, now - glance.quiet_since) if glance.quiet_since else still.still_s
        still.quiet_s = max(still.quiet_s, quiet_s)
        still.opinion = self._opinion(still, in_wait, quiet_s)
        return self._is_to_be_told(still)

    def _kind(self, glance: Glance) -> Kind:
        if glance.generation != self.generation or glance.phase is Phase.FORM:
            return Kind.FORM
        if glance.phase is Phase.RESTORE:
            return Kind.RESTORE
        if glance.phase is Phase.SAVE:
            return Kind.SAVE
        if glance.phase is Phase.EVALUATE:
            return Kind.EVALUATION
        return Kind.STEP if glance.has_passed else Kind.FIRST

    def _learn(self, still: _Still, passed_s: float) -> None:
        longest = self._longest_wait if still.mark[4] else self._longest_work
        # Messages may have moved all through a long wait.
        longest[still.kind] = max(longest.get(still.kind, 0.0), (still.quiet_s or still.still_s) + passed_s)

    def _account(self, still: _Still, process: Process, passed_s: float, in_wait: bool, is_behind: bool) -> None:
        """Where the time since the last look has gone."""
        before, still.process = still.process, process
        if not process.is_stopped:
            still.stopped_s = None
        else:
            still.stopped_s = 0.0 if still.stopped_s is None else still.stopped_s + passed_s
        if before is None or in_wait or process.is_stopped:
            return
        used_s = min(passed_s, max(0.0, process.cpu_s - before.cpu_s))
        starved_s = min(passed_s, max(0.0, process.starved_s - before.starved_s))
        if process.is_in_disk or is_behind:
            used_s = max(used_s, passed_s - starved_s)
        still.burning_s += used_s
        still.asleep_s += max(0.0, passed_s - used_s - starved_s)

    def _opinion(self, still: _Still, in_wait: bool, quiet_s: float) -> Opinion:
        limits = self.limits(still.kind)
        # Two looks apart it is no accident of the moment, and the stillness before the first look counts, too.
        if still.stopped_s and still.still_s >= STOPPED_S:
            return Opinion(
                still_s=still.still_s,
                is_stopped=True,
                is_guilty=True,
                why=f"has been stopped (SIGSTOP) for {still.still_s:.1f} s",
            )
        if in_wait:
            over = quiet_s >= limits.wait_s
            why = f"has waited {quiet_s:.1f} s, longer than {limits.wait_s:.1f} s" if over else ""
            return Opinion(still_s=quiet_s, in_wait=True, why=why)
        why = ""
        if still.asleep_s >= limits.asleep_s:
            why = f"has slept outside any wait for {still.asleep_s:.1f} s ({still.kind} limit {limits.asleep_s:.1f} s)"
        elif still.burning_s >= limits.burning_s:
            why = f"has used {still.burning_s:.0f} s of CPU without progress ({still.kind} limit {limits.burning_s:.0f} s)"
            if self._waits_inside:
                return Opinion(still_s=still.still_s, in_wait=True, why=f"{why}; its device may wait for a peer's")
        return Opinion(still_s=still.still_s, is_guilty=bool(why), why=why)

    def _is_to_be_told(self, still: _Still) -> bool:
        if not still.opinion.why or still.still_s < 2 * still.told_s:
            return False
        still.told_s = still.still_s
        return True


def in_words(stalled: Iterable[tuple[Device, Opinion]]) -> str:
    return "; ".join(f"{device} {opinion.why}" for device, opinion in stalled)
