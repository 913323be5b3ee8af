"""How often to save and what: the whole state every so many steps, or every step's gradient between two whole ones.

Everything is weighed in one unit, seconds of training lost per step: what saving costs now, and what would have to be done
again after a failure that memory does not survive. It decides from what was measured; it refuses to know who measured it.

    full      stall / n                    + failures per step x (read + n/2 steps run again)
    journal   entry stall + stall / n      + failures per step x (read + n/2 updates made again)
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import Literal

from orchestrator.domain.checkpoint import LONGEST_JOURNAL
from orchestrator.domain.spec import Policy

LONGEST = LONGEST_JOURNAL
"""Steps from one base of a journal to the next at most."""
WORTH = 0.8
"""Of what saving costs now, which another pace must cost at most."""
SHARE = 0.5
"""Of the time there is, that writing may take: a disk that is always busy is one that soon falls behind."""
PRIOR_S = 24 * 3600.0
"""What is assumed before anything is known: one failure in as long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Measured, in seconds: medians of late saves and steps.

    step: of training. stall: by which a snapshot of the whole state makes its step longer. write: until that is on disk.
    entry_stall, entry_write: the same of a gradient. read: the whole state back. replay: to read and apply one gradient.
    """

    step: float
    stall: float
    write: float
    entry_stall: float
    entry_write: float
    read: float
    replay: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """policy; every: steps from one base to the next; cost_s: expected loss per step; reason: for people."""

    policy: Literal["full", "journal"]
    every: int
    cost_s: float
    reason: str


def failure_rate(num_failures: int, observed_s: float) -> float:
    """Failures per second that memory does not survive, expected of a job that had so many in `observed_s` seconds."""
    return (num_failures + 1) / (observed_s + PRIOR_S)


def every_auto(cost_s: float, step_s: float, rate: float) -> int:
    """Steps between saves of `cost_s` seconds each, by Daly's correction of Young's formula; at least 1.

    rate: failures per second. Where saving takes longer than failures are apart, saving once per failure is all there is.
    """
    between = 1.0 / rate
    if cost_s <= 0.0:
        return 1
    if cost_s >= 2.0 * between:
        return max(1, round(between / step_s))
    part = cost_s / (2.0 * between)
    seconds = sqrt(2.0 * cost_s * between) * (1.0 + sqrt(part) / 3.0 + part / 9.0) - cost_s
    return max(1, round(seconds / step_s))


def choose(costs: Costs, rate: float, *, policy: Policy = "auto", every: int | None = None) -> Pace:
    """The cheaper of the two, each at its best distance between bases. rate: failures per second.

    policy, every: where those are not free.
    """
    full, journal = _full(costs, rate, every), _journal(costs, rate, every)
    if policy == "journal":
        return journal or _at_any_cost(costs, rate, every or LONGEST)
    if journal is None or policy == "full":
        return full
    best, other = (journal, full) if journal.cost_s < full.cost_s else (full, journal)
    return Pace(
        policy=best.policy,
        every=best.every,
        cost_s=best.cost_s,
        reason=f"{best.reason}; {other.policy} would cost {other.cost_s * 1e3:.3g} ms a step",
    )


def price(costs: Costs, rate: float, pace: Literal["full", "journal"], every: int) -> float | None:
    """Expected loss per step; None where the disk does not keep up."""
    found = _full(costs, rate, every) if pace == "full" else _journal(costs, rate, every)
    is_slow = pace == "full" and _fewest(costs.write, costs.step) > every
    return None if found is None or is_slow or found.every != every else found.cost_s


def is_worth_it(now: float | None, then: float) -> bool:
    """Whether to change from what costs `now` to what costs `then`: near the best many are as good as another."""
    return now is None or then < WORTH * now


def _full(costs: Costs, rate: float, given: int | None) -> Pace:
    slowest = _fewest(costs.write, costs.step)
    every = given or max(slowest, every_auto(costs.stall, costs.step, rate))
    cost = costs.stall / every + rate * costs.step * (costs.read + every / 2 * costs.step)
    return Pace(policy="full", every=every, cost_s=cost, reason=_words("the whole state", every, cost, slowest))


def _journal(costs: Costs, rate: float, given: int | None) -> Pace | None:
    """None where entries cannot be written as fast as steps make them."""
    if costs.entry_write > SHARE * costs.step:
        return None
    # What entries leave of the disk's time is there for bases.
    slowest = _fewest(costs.write, costs.step - costs.entry_write / SHARE)
    if slowest > LONGEST:
        return None
    # Replaying plays the part of running again, so the same optimum with another unit of loss.
    ideal = sqrt(2.0 * costs.stall / (rate * costs.step * costs.replay)) if costs.replay > 0.0 else float(LONGEST)
    every = min(LONGEST, max(slowest, 2, given or round(ideal)))
    cost = costs.entry_stall + costs.stall / every + rate * costs.step * (costs.read + every / 2 * costs.replay)
    return Pace(policy="journal", every=every, cost_s=cost, reason=_words("a journal with a base", every, cost, slowest))


def _at_any_cost(costs: Costs, rate: float, every: int) -> Pace:
    cost = costs.entry_stall + costs.stall / every + rate * costs.step * (costs.read + every / 2 * costs.replay)
    said = f"a journal with a base every {every} steps is asked for, and the disk does not take it as fast as steps make it"
    return Pace(policy="journal", every=every, cost_s=cost, reason=said)


def _fewest(write_s: float, available_s: float) -> int:
    """Steps within which so much is written while each leaves so much of the disk's time."""
    if available_s <= 0.0:
        return LONGEST + 1
    return max(1, -int(-write_s // (SHARE * available_s)))


def _words(what: str, every: int, cost_s: float, slowest: int) -> str:
    why = ", as fast as the disk takes them" if every == slowest and every > 1 else ""
    return f"{what} every {every} steps{why} is expected to cost {cost_s * 1e3:.3g} ms a step"
