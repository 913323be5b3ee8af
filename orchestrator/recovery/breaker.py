"""When to stop trying: one pure function of the failures since a job last made progress.

| rule            | what ends the job                                                                                   |
|-----------------|-----------------------------------------------------------------------------------------------------|
| repeated_error  | one error of the program or the machinery twice at the same step, even if steps were rolled back    |
| no_progress     | three generations that were formed and ended without a committed step, by faults of their own       |
| out_of_attempts | more failures of one cause in a row than its budget: small for the job's own, larger for all others |

Control-plane trouble and resizes are never charged, so they are not among the failures. Nor is waiting for capacity.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from orchestrator.domain.failure import Cause, Failure
from orchestrator.domain.spec import RecoverySpec

NEVER_CHARGED = frozenset({Cause.GROW, Cause.SHRINK, Cause.BALANCE, Cause.PAUSE, Cause.CONTACT_LOST})
BARREN = 3
"""Generations without progress after which another one would be the same."""


RESTED = frozenset({Cause.LINK_LOST, Cause.CHECKPOINT})
"""Where the next try is as good as a rest is long: a network, or storage, that is away."""
TRIES = 3
"""What broke for no known reason is tried anew so often at once; then it is left alone for a while."""
REST_S, MAX_REST_S = 0.5, 10.0
"""Doubled each time: a network that breaks every connection for minutes must not use up a budget in seconds."""


class Rule(StrEnum):
    REPEATED_ERROR = "repeated_error"
    NO_PROGRESS = "no_progress"
    OUT_OF_ATTEMPTS = "out_of_attempts"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    rule: Rule
    message: str


def judge(failures: Sequence[Failure], budget: RecoverySpec) -> Verdict | None:
    """Whether the newest failure was one too many."""
    if not failures:
        return None
    newest = failures[-1]
    same = [f for f in failures if f.fault.signature and _is_like(f, newest)]
    if len(same) > 1:
        who = ", ".join(sorted({name for f in same for name in f.ranks}))
        where = f" ({who})" if who else ""
        return Verdict(
            rule=Rule.REPEATED_ERROR,
            message=f"step {newest.step} failed twice in the same way{where}: {newest.fault.message}",
        )
    barren = [f for f in failures if f.counts and f.is_barren]
    if len(barren) >= BARREN:
        first, last = barren[0].generation, barren[-1].generation
        return Verdict(
            rule=Rule.NO_PROGRESS,
            message=f"{len(barren)} generations ({first} to {last}) ended at step {newest.step} without a committed step; "
            f"the last fault: {newest.fault.message}",
        )
    used = attempts(failures)[newest.fault.cause, newest.fault.is_external]
    if used > limit(budget, newest.fault.is_external):
        return Verdict(
            rule=Rule.OUT_OF_ATTEMPTS,
            message=f"{used} generations in a row ended without a committed step by {newest.fault.cause}; "
            f"the last fault: {newest.fault.message}",
        )
    return None


def rest_s(failures: Sequence[Failure]) -> float:
    """How long to wait before the next generation is formed; 0 where links or storage have not failed again and again."""
    broken = 0
    for failure in reversed([f for f in failures if f.counts]):
        if failure.fault.cause not in RESTED:
            break
        broken += 1
    return min(MAX_REST_S, REST_S * 2.0 ** (broken - TRIES - 1)) if broken > TRIES else 0.0


def attempts(failures: Sequence[Failure]) -> Counter[tuple[Cause, bool]]:
    """Used so far, by cause and whether it came from outside."""
    return Counter((f.fault.cause, f.fault.is_external) for f in failures if f.counts)


def limit(budget: RecoverySpec, is_external: bool) -> int:
    return budget.max_external_attempts if is_external else budget.max_attempts


def _is_like(one: Failure, other: Failure) -> bool:
    return one.step == other.step and one.fault.signature == other.fault.signature
