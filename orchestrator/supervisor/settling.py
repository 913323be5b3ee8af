"""The answer to a closed generation is recorded, once, when everybody has reported or is known to be gone.

It owns that moment and what hangs on it: a step that nobody could report, plans that are needed no longer, worn processes.
What was committed is decided in recovery/settle.py.
"""

from __future__ import annotations

from dataclasses import replace

from orchestrator.domain.generation import Settlement
from orchestrator.domain.job import JobRecord
from orchestrator.domain.requests import KillRank
from orchestrator.domain.state import Closing, Reforming
from orchestrator.domain.status import RESIZES
from orchestrator.recovery.breaker import rest_s
from orchestrator.recovery.settle import settle

from .believing import void_where_canary_failed
from .draft import Draft
from .forming import loses_steps, plan_of_copies, try_form
from .training import record_step

MAX_STUCK = 2
"""Threads of a process that may be stuck in transfers before it is replaced at the first opportunity."""


def try_settle(draft: Draft) -> None:
    """Record the answer once everybody has reported or is known to be gone."""
    state = draft.state
    if not isinstance(state, Reforming) or state.closing.awaited or state.closing.settlement:
        return
    record = draft.record
    settlement = settle_by(record, state.closing)
    is_void = record.void == settlement.generation
    if settlement.answer and settlement.step > record.committed and not is_void:
        record_step(draft, settlement.generation, settlement.answer, None)
        if not void_where_canary_failed(draft, settlement.generation):
            return
    if draft.record.void == settlement.generation:
        settlement = Settlement(
            generation=settlement.generation, step=draft.record.committed, answer=None, holders=(), is_distrusted=True
        )
    if settlement.is_distrusted:
        draft.set(doubted=settlement.generation)
    draft.become(replace(state, closing=replace(state.closing, settlement=settlement)))
    incident = draft.incident
    if incident and incident.closed_at:
        draft.update_incident(phases={"settle": max(0.0, draft.now - incident.closed_at)}, closed_at=draft.now)
    _retire_worn(draft)
    held = {generation for _, generation in settlement.holders}
    forming = draft.state.forming.generation if isinstance(draft.state, Reforming) and draft.state.forming else None
    draft.set(plans={**plan_of_copies(draft), **{g: p for g, p in record.plans.items() if g in held or g == forming}})
    draft.say(
        "settled",
        f"generation {settlement.generation} had committed step {settlement.step}; {len(settlement.holders)} ranks hold it",
        step=settlement.step,
    )
    if rest := rest_s(record.failures):
        draft.say(
            "resting", f"connections broke again and again: the network is left alone for {rest:g} s before the next try"
        )
    try_form(draft)


def settle_by(record: JobRecord, closing: Closing) -> Settlement:
    """What the reports so far come to."""
    return settle(closing.generation, record.committed, record.last_answer, closing.reports, record.doubted)


def _retire_worn(draft: Draft) -> None:
    """One process with stuck threads is replaced, where others hold what it holds and its seat is not formed yet.

    In a resize, which nobody's death has brought about, or when it has become too many: until the successor has mirrored
    them again, there is one copy of its intervals.
    """
    state = draft.state
    assert isinstance(state, Reforming) and state.closing.settlement is not None
    forming, settlement = state.forming, state.closing.settlement
    if forming is None:
        return
    bearable = 0 if state.fault.cause in RESIZES else MAX_STUCK
    worn = [device for device, report in sorted(state.closing.reports.items()) if report.stuck > bearable]
    for device in worn:
        if device not in draft.record.pids or device not in forming.addresses:
            continue
        rest = replace(settlement, holders=tuple(holder for holder in settlement.holders if holder[0] != device))
        if not loses_steps(draft, rest):
            left = {d: a for d, a in forming.addresses.items() if d != device}
            draft.become(replace(state, forming=replace(forming, addresses=left), lost=state.lost | {device}))
            draft.call(device.node, KillRank(device=device))
            draft.say("rank_worn", f"threads of the rank on {device} are stuck for good: it is replaced")
            return
