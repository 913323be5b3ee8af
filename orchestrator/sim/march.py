"""The steps of one generation while it trains undisturbed: implied by when it began and what a step takes, at any time.

Which devices make a step take as long as it does is tempo.py's to say; what ends a generation it refuses to know.
"""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.domain.ids import Step
from orchestrator.domain.plan import Plan
from orchestrator.domain.requests import FormGeneration

NEARLY = 1e-9
"""Of a step: what is that near its end has passed."""


@dataclass(frozen=True, slots=True)
class _Leg:
    """Steps after `first`, which had passed at `at`, take step_s each, of which slow_s because devices are slow."""

    first: Step
    at: float
    step_s: float
    slow_s: float


class March:
    """ready_at: when its ranks are; trains_at: from when on its steps take what they take."""

    def __init__(self, form: FormGeneration, ready_at: float, trains_at: float, step_s: float, slow_s: float) -> None:
        self.form = form
        self.ready_at = ready_at
        self.trains_at = trains_at
        self._legs = [_Leg(form.committed, trains_at, step_s, slow_s)]

    @property
    def plan(self) -> Plan:
        return self.form.plan

    @property
    def step_s(self) -> float:
        return self._legs[-1].step_s

    def reached(self, now: float) -> Step:
        """The newest step that has passed by now."""
        leg = next((leg for leg in reversed(self._legs) if now >= leg.at), None)
        return Step(leg.first + int((now - leg.at) / leg.step_s + NEARLY)) if leg else self.form.committed

    def at(self, step: Step) -> float:
        """When this step passes, or has; not of one before it began."""
        leg = next(leg for leg in reversed(self._legs) if step >= leg.first)
        return leg.at + (step - leg.first) * leg.step_s

    def underway_s(self, now: float) -> float:
        """For how long the step that has not passed yet has been computed."""
        return max(0.0, now - self.at(self.reached(now)))

    def change(self, now: float, step_s: float, slow_s: float) -> None:
        """From the end of the step under way on."""
        first = Step(self.reached(now) + 1) if now > self.trains_at else self.form.committed
        leg = _Leg(first, self.at(first), step_s, slow_s)
        self._legs = [*(one for one in self._legs if one.first < first), leg]

    def slowed_s(self, now: float) -> float:
        """Of the time of all steps so far, what slow devices have made it longer."""
        ends = [*(leg.first for leg in self._legs[1:]), None]
        reached, total = self.reached(now), 0.0
        for leg, end in zip(self._legs, ends, strict=True):
            last = reached if end is None else min(end, reached)
            total += leg.slow_s * max(0, last - leg.first)
        return total
