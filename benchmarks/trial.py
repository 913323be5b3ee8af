"""One failure in a running job, from the signal to the next committed step at full strength, and what the job says of it.

Read from outside: instants of commits from the API, phases from the job's ledger. What is struck, and how it is repaired,
is the victims' business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from statistics import median

from api.views import IncidentView, JobView, StepView

from .cluster import Job, NotMeasured, say
from .stats import medians_by_name, quantile
from .victims import Kind, Victims
from .workload import WORLD_SIZE

QUIET_STEPS = 12
"""Undisturbed steps before each failure."""
QUIET_ATTEMPTS = 5
RECOVER_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """One failure, in seconds. step_s: median of the undisturbed steps before it."""

    step_s: float
    fault_to_commit_s: float
    commit_to_commit_s: float
    supervisor_s: float
    """What the supervisor itself recorded as the pause."""
    rolled_back: int
    """Committed steps to run again, as the job's ledger says."""
    incident: int
    """The number of its last incident."""
    causes: tuple[str, ...]
    rung: str
    """The way out that was taken last."""
    phases: dict[str, float]

    @property
    def pause_s(self) -> float:
        return self.fault_to_commit_s - self.step_s


def trial(job: Job, victims: Victims, random: Random, title: str, seen: int) -> tuple[Recovery, tuple[IncidentView, ...]]:
    """A failure at a random instant of a step; the recovery, and recoveries since incident `seen` that nobody caused.

    The cluster is whole again when this returns. Raises NotMeasured.
    """
    before = _undisturbed(job, victims.kind)
    strike = victims.strike(before, random.uniform(0.0, before.typical_step_s or 0.0))
    try:
        after = job.wait(lambda view: is_recovered(view, before), f"recovery of {strike.whom}", RECOVER_S)
    finally:
        victims.end(strike)  # what stands still could not be ended in good order
    victims.repair(strike)
    new = incidents_after(after, last_incident(before))
    one = recovery(job.fetch(), before, after.generation, new, strike.at)
    pause = f"pause {one.pause_s:.3f} s of steps of {one.step_s:.3f} s"
    say(f"{title}: {strike.whom}, {pause}, {one.rung}, {in_words(one.phases)}")
    uncaused = [found for found in incidents_after(before, seen) if not found.is_resize]
    return one, tuple(uncaused)


def _undisturbed(job: Job, kind: Kind) -> JobView:
    """After QUIET_STEPS in one generation, and ready still."""
    for _ in range(QUIET_ATTEMPTS):
        try:
            begun = job.wait(lambda view: why_not_ready(view, kind) == "", "readiness", RECOVER_S)
        except NotMeasured as error:
            raise NotMeasured(f"{why_not_ready(job.view(), kind)} ({error})") from error
        before = job.wait_for_step(begun.step + QUIET_STEPS)
        if before.generation == begun.generation and why_not_ready(before, kind) == "":
            return before
        say(f"generation {begun.generation} ended by itself; waiting for {QUIET_STEPS} undisturbed steps of another")
    raise NotMeasured(f"{QUIET_ATTEMPTS} times there were no {QUIET_STEPS} undisturbed steps; look at the job's incidents")


def why_not_ready(view: JobView, kind: Kind) -> str:
    """Why this is no moment for a failure that is to be the only one; empty where it is."""
    if view.status != "RUNNING" or view.plan is None or view.plan.generation != view.generation:
        return f"the job is {view.status}: {view.reason}"
    if len(view.plan.seats) != WORLD_SIZE:
        return f"it has {len(view.plan.seats)} of {WORLD_SIZE} ranks"
    ready = sum(spare.is_ready for spare in view.spares)
    if ready < kind.spares:
        return f"{ready} of {kind.spares} spares are ready"
    return f"it is at risk: {view.at_risk}" if view.at_risk else ""


def is_recovered(view: JobView, before: JobView) -> bool:
    """Whether it trains at the strength it had, in a generation of its own, and its ledger is closed."""
    if view.status != "RUNNING" or view.plan is None or before.plan is None:
        return False
    new = incidents_after(view, last_incident(before))
    is_whole = view.plan.generation == view.generation and len(view.plan.seats) == len(before.plan.seats)
    return bool(new) and is_whole and all(incident.pause_s is not None for incident in new)


def recovery(
    steps: Sequence[StepView], before: JobView, generation: int, incidents: Sequence[IncidentView], struck_at: float
) -> Recovery:
    """generation: the first one at full strength again. struck_at: wall clock, s."""
    undisturbed = [step for step in steps if step.generation == before.generation and step.at.timestamp() <= struck_at]
    back = next((step for step in steps if step.generation == generation), None)
    if back is None or not undisturbed:
        raise NotMeasured(f"no commit of generation {before.generation} before the failure or of {generation} after it")
    at = back.at.timestamp()
    return Recovery(
        step_s=median(step.seconds for step in undisturbed[-QUIET_STEPS:] if step.seconds is not None),
        fault_to_commit_s=at - struck_at,
        commit_to_commit_s=at - undisturbed[-1].at.timestamp(),
        supervisor_s=sum(incident.pause_s or 0.0 for incident in incidents),
        rolled_back=sum(incident.rolled_back for incident in incidents),
        incident=incidents[-1].number,
        causes=tuple(incident.cause for incident in incidents),
        rung=incidents[-1].rung or "no rung",
        # The ledger begins where a host noticed; how long that took only who struck knows.
        phases={"notice": incidents[0].at.timestamp() - struck_at, **incidents[-1].phases},
    )


def steps_lost(steps: Sequence[StepView]) -> int:
    """Committed steps that were not kept: those committed again later, and those missing from what was committed.

    Counted from the commits themselves, in their order, whatever the job says of itself.
    """
    kept: list[int] = []
    lost = 0
    for step in steps:
        while kept and kept[-1] >= step.step:
            kept.pop()
            lost += 1
        lost += step.step - (kept[-1] if kept else step.step - 1) - 1
        kept.append(step.step)
    return lost


def figures(recoveries: Sequence[Recovery]) -> dict[str, object]:
    """Of one kind, in seconds; at least one recovery."""
    pauses = [one.pause_s for one in recoveries]
    seconds = {
        "median_s": median(pauses),
        "p95_s": quantile(pauses, 0.95),
        "max_s": max(pauses),
        # With the step that is run again, and from commit to commit: also what was computed in vain before the failure.
        "with_rerun_step_median_s": median(one.fault_to_commit_s for one in recoveries),
        "commit_to_commit_median_s": median(one.commit_to_commit_s - one.step_s for one in recoveries),
        "supervisor_median_s": median(one.supervisor_s for one in recoveries),
        "step_s": median(one.step_s for one in recoveries),
    }
    rungs = [one.rung for one in recoveries]
    causes = [cause for one in recoveries for cause in one.causes]
    return {name: round(value, 4) for name, value in seconds.items()} | {
        "phases": {name: round(value, 4) for name, value in medians_by_name([r.phases for r in recoveries]).items()},
        "trials": len(recoveries),
        "rungs": {rung: rungs.count(rung) for rung in sorted(set(rungs))},
        "causes": {cause: causes.count(cause) for cause in sorted(set(causes))},
    }


def last_incident(view: JobView) -> int:
    """Its number; 0 before the first. Only the newest are in a view, so their count says nothing."""
    return max((incident.number for incident in view.incidents), default=0)


def incidents_after(view: JobView, number: int) -> list[IncidentView]:
    return [incident for incident in view.incidents if incident.number > number]


def in_words(phases: dict[str, float]) -> str:
    return ", ".join(f"{name} {seconds * 1000:.0f} ms" for name, seconds in phases.items())
