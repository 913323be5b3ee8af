"""The account of failures in a job's record: a fault is charged once to its generation, committed steps clear it.

It is stored with the record, so a supervisor that restarts has forgotten nothing. How much is too much is the breaker's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from orchestrator.domain.failure import Failure, Fault
from orchestrator.domain.host_events import RankExited
from orchestrator.domain.ids import Generation, Step
from orchestrator.domain.state import Failed, Running
from orchestrator.recovery.breaker import NEVER_CHARGED, judge

from .draft import Draft
from .stopping import stop


def charge(
    draft: Draft, fault: Fault, generation: Generation, *, was_formed: bool, exited: RankExited | None = None
) -> bool:
    """Write one more failure down; True where that was one too many and the job is being stopped.

    Once for each process that ended: where a supervisor died before it acknowledged that, the next one is told again.
    """
    if fault.cause in NEVER_CHARGED or (exited is not None and _is_known(draft, fault, generation)):
        return False
    record = draft.record
    failure = Failure(
        fault=fault,
        generation=generation,
        step=_step_made(draft, exited),
        ranks=_names(draft, fault, generation),
        was_formed=was_formed,
        has_committed=isinstance(record.state, Running) and record.last_step_at is not None,
    )
    _keep(draft, (*record.failures, failure))
    return _judge(draft, exited)


def recharge(draft: Draft, fault: Fault, generation: Generation, exited: RankExited | None = None) -> bool:
    """It is known better now what ended a generation that has been charged already; True as for `charge`."""
    failures = draft.record.failures
    if not failures or failures[-1].generation != generation or failures[-1].fault.signature:
        return False
    if fault.cause in NEVER_CHARGED:  # what broke its connections was no failure of anybody's
        _keep(draft, failures[:-1])
        return False
    ranks = _names(draft, fault, generation)
    known = replace(failures[-1], fault=fault, step=_step_made(draft, exited), ranks=ranks)
    _keep(draft, (*failures[:-1], known))
    return _judge(draft, exited)


def without(failures: tuple[Failure, ...], committed: Step) -> dict[str, Any]:
    """The account after a step was committed, as changes to the record.

    An error at a later step than this is remembered: training only made up for what was rolled back.
    """
    left = tuple(replace(f, counts=False) for f in failures if f.step > committed and f.fault.signature)
    return {"failures": left, "failures_in_a_row": 0}


def _is_known(draft: Draft, fault: Fault, generation: Generation) -> bool:
    """Whether this very end of a process, which has its number in it, has been charged."""
    what = (fault.message, fault.devices, generation)
    return any((one.fault.message, one.fault.devices, one.generation) == what for one in draft.record.failures)


def _names(draft: Draft, fault: Fault, generation: Generation) -> tuple[str, ...]:
    plan = draft.record.plans.get(generation)
    seats = plan.seat_of if plan else {}
    return tuple(f"rank {seats[d].rank} on {d}" if d in seats else str(d) for d in fault.devices)


def _step_made(draft: Draft, exited: RankExited | None) -> Step:
    seen = exited.report.passed if exited else Step(0)
    return Step(max(draft.record.committed, seen) + 1)


def _keep(draft: Draft, failures: tuple[Failure, ...]) -> None:
    draft.set(failures=failures, failures_in_a_row=sum(f.counts for f in failures))


def _judge(draft: Draft, exited: RankExited | None) -> bool:
    verdict = judge(draft.record.failures, draft.record.spec.recovery)
    if verdict is None:
        return False
    fault = draft.record.failures[-1].fault
    stop(
        draft,
        Failed(
            at=draft.now,
            message=verdict.message,
            device=exited.device if exited else next(iter(fault.devices), None),
            exit_code=exited.exit_code if exited else None,
            log_tail=exited.log_tail if exited else (),
            verdict=verdict.rule.value,
        ),
    )
    return True
