"""The training of a fleet's job, implied: what the kernel is told of steps, when, and for how long there were none.

It is told of the first step of a generation, because that ends a pause; of the newest two when it is told anything else;
and of every step while it may have to judge how fast devices are, or where it is to be told densely. It refuses to know
what befalls a fleet (fleet.py) and what hosts answer (answers.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from orchestrator.detection.straggler import KEPT, LEARNED, MIN_STEPS
from orchestrator.domain.checkpoint import CheckpointRef
from orchestrator.domain.events import CheckpointCommitted, HostSaid, Input
from orchestrator.domain.host_events import StepsPassed
from orchestrator.domain.ids import Device, Generation, JobId, Step
from orchestrator.domain.job import JobRecord
from orchestrator.domain.plan import Plan
from orchestrator.domain.requests import FormGeneration
from orchestrator.domain.spec import JobSpec
from orchestrator.recovery.balance import WITHIN_S
from orchestrator.supervisor.balancing import FORGET_S

from .crews import Crews, answer_of
from .march import March
from .pace import Tally
from .tempo import Tempo

JOB = JobId("job")
JUDGED = {"straggler": FORGET_S, "straggler_well": FORGET_S, "not_rebalanced": WITHIN_S}
"""Entries of the history that count for so long, and are looked at again then."""
WATCHED = LEARNED + KEPT + MIN_STEPS
"""Steps at least that are told one by one where there may be something to judge; and then for as long as there is."""
AHEAD = 10
"""Steps before a device's pace changes from which on all are told: the kernel has to know what was usual."""


class Clockwork(Protocol):
    """Time, and the kernel in it."""

    now: float
    tally: Tally

    @property
    def record(self) -> JobRecord: ...
    @property
    def is_judging(self) -> bool:
        """Whether the kernel is about to find somebody slow or well, or to see what a change has come to."""
        ...

    def after(self, delay_s: float, what: Callable[[], Sequence[Input]]) -> None: ...
    def step(self, inputs: Sequence[Input]) -> None: ...


class Training:
    """why_change: what a plan is left for where nothing has failed. dense: every step is told, always."""

    def __init__(
        self,
        clockwork: Clockwork,
        spec: JobSpec,
        tempo: Tempo,
        crews: Crews,
        why_change: Callable[[Plan], str],
        *,
        dense: bool,
    ) -> None:
        self._clockwork = clockwork
        self._every = int(spec.checkpoint.every)
        self._tempo, self._crews, self._why_change, self._dense = tempo, crews, why_change, dense
        self.march: March | None = None
        self.said = Step(0)
        """The newest step of this generation that the kernel has been told of."""
        self._told: March | None = None
        """The one of which every step is told."""
        self._watched_until = Step(0)
        self._expects_until = 0.0
        self._cause = ""
        self._down_since: float | None = None

    def has(self, device: Device) -> bool:
        return self.march is not None and device in self.march.plan.seat_of

    # --- from one generation to the next ----------------------------------------------------------------------------------

    def struck(self, cause: str) -> None:
        """Somebody who has a seat is lost: the step under way is run again."""
        self.catch_up()
        if self.march is not None:
            self._clockwork.tally.rerun_s += self.march.underway_s(self._clockwork.now)
        self._freeze(cause)

    def closed(self, generation: Generation) -> None:
        """Whoever lives has left it, and holds what it has reached."""
        march = self.march
        if march is not None and march.form.generation <= generation:
            self._hold(march)
            self._freeze(self._why_change(march.plan))

    def formed(self, form: FormGeneration, ready_at: float, first_s: float) -> None:
        """first_s: by how much its first step is longer than others."""
        self._tempo.learn(form.plan)
        self.said = form.committed
        self._crews.hold(form.plan.devices, form.generation, form.committed)
        self.march = March(form, ready_at, ready_at + first_s, *self._step_takes(form.plan))

    def began(self, march: March) -> None:
        """Training goes on; the first step ends the pause."""
        clockwork, first = self._clockwork, Step(march.form.committed + 1)

        def passed() -> Sequence[Input]:
            if self.march is not march or self.said >= first:
                return []
            self._end_pause(march)
            news = self._news(march, range(first, first + 1), paced=self._dense or self._is_judged(march))
            if self._dense or self._is_judged(march):
                self.watch()
            return news

        clockwork.after(max(0.0, march.at(first) - clockwork.now), passed)

    def end(self) -> None:
        """Of the time that is looked at."""
        self.catch_up()
        self._count_slowness()
        if self._down_since is not None:
            self._clockwork.tally.lose(self._cause, self._clockwork.now - self._down_since)

    def _freeze(self, cause: str) -> None:
        """Nobody gets any further in this generation."""
        self._count_slowness()
        self.march = None
        if self._down_since is None:
            self._down_since, self._cause = self._clockwork.now, cause

    def _end_pause(self, march: March) -> None:
        if self._down_since is None:
            return
        pause = max(0.0, self._clockwork.now - march.step_s - self._down_since)
        self._clockwork.tally.pauses.append((self._cause, pause))
        self._clockwork.tally.lose(self._cause, pause)
        self._down_since, self._cause = None, ""

    # --- what is told -----------------------------------------------------------------------------------------------------

    def catch_up(self) -> None:
        """Tell the kernel what has passed since it was told last."""
        march = self.march
        if march is None or self._clockwork.now <= march.trains_at:
            return
        if news := self.untold():
            self._clockwork.step(news)
        self._hold(march)

    def untold(self) -> list[Input]:
        """What has passed unseen: the newest two steps, and the newest checkpoint."""
        march = self.march
        if march is None or not self._has_begun(march):
            return []
        reached = march.reached(self._clockwork.now)
        return self._news(march, range(max(self.said + 1, reached - 1), reached + 1)) if reached > self.said else []

    def saved(self) -> list[Input]:
        """The newest step, because somebody has asked for a checkpoint."""
        march = self.march
        if march is None or not self._has_begun(march):
            return []
        return self._checkpoint(march.form, march.reached(self._clockwork.now))

    def _hold(self, march: March) -> None:
        now = self._clockwork.now
        if now > march.trains_at:
            self._crews.hold(march.plan.devices, march.form.generation, march.reached(now))

    def _has_begun(self, march: March) -> bool:
        return self._clockwork.now > march.trains_at and self.said > march.form.committed

    def _news(self, march: March, steps: range, *, paced: bool = False) -> list[Input]:
        """paced: with how fast devices were."""
        form = march.form
        passed = StepsPassed(
            generation=form.generation,
            answers=tuple(answer_of(Step(s)) for s in steps),
            at=tuple(march.at(Step(s)) for s in steps),
            paces=self._tempo.told(form.plan) if paced else {},
        )
        self.said = Step(steps[-1])
        told: list[Input] = [HostSaid(job=JOB, node=form.plan.devices[0].node, event=passed)]
        newest = Step(steps[-1] // self._every * self._every if self._every else 0)
        return [*told, *self._checkpoint(form, newest)] if newest > form.committed else told

    def _checkpoint(self, form: FormGeneration, at: Step) -> list[Input]:
        known = self._clockwork.record.checkpoint
        if known is not None and known.step >= at:
            return []
        path = f"/shared/{JOB}/{at}-{form.generation}"
        saved = CheckpointRef(step=at, generation=form.generation, path=path, answer=answer_of(at))
        return [CheckpointCommitted(job=JOB, checkpoint=saved)]

    # --- how fast devices are ---------------------------------------------------------------------------------------------

    def change_speed(self, device: Device, times: float) -> None:
        """It takes so many times as long as others of its kind, from the next step on."""
        march = self.march if self.has(device) else None
        if times > 1.0:
            self._tempo.slow[device] = times
        else:
            self._tempo.slow.pop(device, None)
        if march is not None:
            march.change(self._clockwork.now, *self._step_takes(march.plan))
            self.watch()

    def expect_change(self, at: float) -> None:
        """Of some device's pace: until then, and shortly before, every step is told."""

        def begin() -> Sequence[Input]:
            self._expects_until = max(self._expects_until, at)
            return self.watch()

        now, march = self._clockwork.now, self.march
        ahead_s = AHEAD * (march.step_s if march is not None else 0.0)
        self._clockwork.after(max(0.0, at - ahead_s - now), begin)

    def look_again(self) -> None:
        """Something has come that may stand in for a slow device."""
        if self.march is not None and self._is_judged(self.march):
            self.watch()

    def watch(self) -> Sequence[Input]:
        """For as long as it takes to find who is slow, or well again, and to see what was done about it."""
        march = self.march
        if march is not None and self.said > march.form.committed:
            self._watched_until = Step(march.reached(self._clockwork.now) + WATCHED)
            if self._told is not march:
                self._told = march
                self._tell_next(march)
        return []

    def _is_judged(self, march: March) -> bool:
        """Whether somebody of it is slow, or taken for that, or would be planned with by what it was measured to take."""
        record, plan = self._clockwork.record, march.plan
        if self._clockwork.now < self._expects_until:
            return True
        taken_for_slow = any(one.is_slow and device in plan.seat_of for device, one in record.stragglers.items())
        return self._tempo.is_mixed or record.is_rebalanced or taken_for_slow or self._tempo.has_slow(plan)

    def _step_takes(self, plan: Plan) -> tuple[float, float]:
        """And how much of that because devices are slow, or have been and still have less to do."""
        is_uneven = self._clockwork.record.is_rebalanced or self._tempo.has_slow(plan)
        return self._tempo.step_s(plan), self._tempo.slow_s(plan) if is_uneven else 0.0

    def _count_slowness(self) -> None:
        if self.march is not None and (slowed_s := self.march.slowed_s(self._clockwork.now)):
            self._clockwork.tally.lose("straggler", slowed_s)

    def _tell_next(self, march: March) -> None:
        now = self._clockwork.now
        self._clockwork.after(march.at(Step(march.reached(now) + 1)) - now, lambda: self._tell(march))

    def _tell(self, march: March) -> Sequence[Input]:
        if self.march is not march:
            return []
        reached = march.reached(self._clockwork.now)
        is_early = reached <= self._watched_until or self._clockwork.now < self._expects_until
        if self._dense or is_early or self._clockwork.is_judging:
            self._tell_next(march)
        else:
            self._told = None
        return (
            self._news(march, range(max(self.said + 1, reached - 1), reached + 1), paced=True)
            if reached > self.said
            else []
        )
