"""Promises about what is recorded, whatever happens outside: terms, settlements, ends, budgets, ledgers, who is left alone.

Beside checkers.py, which knows what training has come to. It refuses to know how the kernel decides: each check is written
from the promise, not from the code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from orchestrator.domain.failure import Cause
from orchestrator.domain.generation import Answer
from orchestrator.domain.ids import Generation, JobId, Step, Term
from orchestrator.domain.incident import Incident
from orchestrator.domain.job import JobRecord
from orchestrator.domain.state import TERMINAL, Reforming, Running, Stopping
from orchestrator.ports import Commit

from .memory import Violation

NO_FAILURE = frozenset({Cause.GROW, Cause.SHRINK, Cause.BALANCE, Cause.PAUSE, Cause.CONTACT_LOST})
"""Asked for, or trouble of the control plane: nobody's budget pays for these."""
HARSH = frozenset({Cause.NODE_LOST, Cause.CONTACT_LOST})
"""What a generation may be closed for that nobody could reach: only once it has had its time alone."""
LEDGER_S = 0.05


class Promises:
    """now: virtual time. healthy_s: for how long a generation has trained with nothing wrong in it, 0 where it does not."""

    def __init__(self, now: Callable[[], float], healthy_s: Callable[[JobId, Generation], float]) -> None:
        self._now = now
        self._healthy_s = healthy_s
        self._term = Term(0)
        self._settled: dict[tuple[JobId, Generation], tuple[Step, Answer | None]] = {}
        self._alone_since: dict[JobId, float] = {}
        """When all of a running plan's hosts had fallen silent."""
        self._judged: set[tuple[JobId, int]] = set()

    def went_back(self, term: Term) -> None:
        """The store has forgotten which terms it had given, how generations were settled and how recoveries went."""
        self._term = term
        self._settled.clear()
        self._judged.clear()

    def committed(self, term: Term, before: Mapping[JobId, JobRecord], commit: Commit) -> None:
        if term < self._term:
            raise Violation(f"term {term} commits after term {self._term} has")
        self._term = term
        for job, record in commit.jobs.items():
            old = before.get(job)
            if old is not None and isinstance(old.state, TERMINAL):
                raise Violation(f"{job} was {type(old.state).__name__} and becomes {type(record.state).__name__}")
            self._check_settled(record)
            self._check_budgets(record)
            self._check_ledger(record)
            self._check_left_alone(old, record)

    def _check_settled(self, record: JobRecord) -> None:
        """What was recorded of a generation once is what it came to; a distrusted one may still turn out worse."""
        state = record.state
        if not isinstance(state, Reforming) or (found := state.closing.settlement) is None:
            return
        key = (record.id, state.closing.generation)
        says = (found.step, found.answer)
        first = self._settled.setdefault(key, says)
        if first != says:
            raise Violation(f"generation {key[1]} of {key[0]} was settled at {first[0]} and is settled at {says[0]} now")
        if found.generation != key[1]:
            raise Violation(f"generation {key[1]} of {key[0]} is settled by what generation {found.generation} came to")

    def _check_budgets(self, record: JobRecord) -> None:
        if isinstance(record.state, (*TERMINAL, Stopping)):
            return
        charged = Counter((one.fault.cause, one.fault.is_external) for one in record.failures if one.counts)
        for (cause, is_external), times in charged.items():
            if cause in NO_FAILURE:
                raise Violation(f"{record.id} is charged with {cause}, which is nobody's failure")
            budget = record.spec.recovery
            allowed = budget.max_external_attempts if is_external else budget.max_attempts
            if times > allowed:
                raise Violation(f"{record.id} goes on after {times} failures by {cause}, where {allowed} are allowed")
        outside = {Cause.NODE_LOST, Cause.CONTACT_LOST, Cause.LINK_LOST}
        if found := [one.fault for one in record.failures if one.fault.cause in outside and not one.fault.is_external]:
            raise Violation(f"{record.id} is charged as its own with {found[0].message!r}")

    def _check_ledger(self, record: JobRecord) -> None:
        """The phases of a recovery that took one attempt are all of its pause, and of the step that ended it."""
        for incident in record.incidents[-2:]:
            key = (record.id, incident.number)
            if incident.pause_s is None or incident.attempts > 1 or key in self._judged:
                continue
            if "first_step" not in incident.phases:
                continue  # lost before its first step: what ended the next incident ended this pause too
            self._judged.add(key)
            spent = sum(incident.phases.values())
            if spent + LEDGER_S < incident.pause_s or min(incident.phases.values(), default=0.0) < 0:
                raise Violation(_ledger(record, incident, spent))

    def _check_left_alone(self, old: JobRecord | None, record: JobRecord) -> None:
        """Healthy ranks that cannot be reached train on for max_isolation_s."""
        state = record.state
        if isinstance(state, Running):
            if set(state.plan.nodes) <= record.unreachable:
                self._alone_since.setdefault(record.id, self._now())
            else:
                self._alone_since.pop(record.id, None)
        if old is None or not isinstance(old.state, Running) or not isinstance(state, Reforming):
            return
        fault, generation = state.fault, old.state.generation
        if fault.cause not in HARSH or self._healthy_s(record.id, generation) < 1.0:
            return
        allowed = record.spec.recovery.max_isolation_s
        alone_s = self._now() - self._alone_since.pop(record.id, self._now())
        if not allowed or alone_s < allowed:
            said = f"generation {generation} of {record.id} trains well and is closed: {fault.message}"
            raise Violation(f"{said}; it was out of reach for {alone_s:.1f} s, and may be for {allowed:g} (0: for ever)")


def _ledger(record: JobRecord, incident: Incident, spent_s: float) -> str:
    phases = ", ".join(f"{name} {seconds:.3f}" for name, seconds in incident.phases.items())
    return f"incident {incident.number} of {record.id} lasted {incident.pause_s:.3f} s, its phases {spent_s:.3f}: {phases}"
