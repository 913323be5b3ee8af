"""How often a job saves and what: as its file says, or, where that says auto, what is expected to cost it least.

    saves ──> measured costs ──> recovery/pace.py ──> another pace, said with its reason ──> the generation that trains

It owns the pace. It refuses to know how saves are committed (keeping.py) and carried out: ranks are told, and agree.
"""

from __future__ import annotations

from statistics import median

from orchestrator.domain.checkpoint import Pacing
from orchestrator.domain.ids import Generation
from orchestrator.domain.job import JobRecord
from orchestrator.domain.requests import SetPacing
from orchestrator.domain.state import Running
from orchestrator.recovery.pace import Costs, choose, failure_rate, is_worth_it, price

from .draft import Draft

FEWEST = 3
"""Whole states that must have been saved before anything is changed: the first ones go to memory that is not there yet."""
SHARE_OF_ENTRY = 1 / 3
"""Of a state's bytes that a gradient has."""
LEAST_S = 1e-3
"""Steps count as that long at least."""


def pacing_of(record: JobRecord) -> Pacing:
    return record.pacing or Pacing.asked_for(record.spec.checkpoint)


def paced(draft: Draft, generation: Generation) -> Pacing:
    """What a generation that is being formed is told."""
    draft.set(pacing_told=generation)
    return pacing_of(draft.record)


def keep_pace(draft: Draft) -> None:
    """Another pace, where the file leaves it open and what was measured speaks for it; who trains is told."""
    state = draft.state
    if not isinstance(state, Running):
        return
    _reconsider(draft)
    record = draft.record
    if record.pacing_told != state.generation:
        device = state.plan.devices[0]
        draft.set(pacing_told=state.generation)
        draft.call(device.node, SetPacing(generation=state.generation, device=device, pacing=pacing_of(record)))


def _reconsider(draft: Draft) -> None:
    """Once for each save whose cost has become known."""
    record, spec = draft.record, draft.record.spec.checkpoint
    is_open = spec.policy == "auto" or spec.every == "auto"
    if not is_open or not spec.every or record.num_costs == record.num_weighed:
        return
    draft.set(num_weighed=record.num_costs)
    costs = _costs(record)
    if costs is None:
        return
    observed_s = max(0.0, draft.now - (record.started_at or draft.now) - record.paused_until(draft.now))
    rate = failure_rate(sum("checkpoint" in one.source for one in record.incidents), observed_s)
    best = choose(costs, rate, policy=spec.policy, every=None if spec.every == "auto" else spec.every)
    now, then = pacing_of(record), Pacing(every=best.every, is_journal=best.policy == "journal")
    if then == now or not is_worth_it(price(costs, rate, "journal" if now.is_journal else "full", now.every), best.cost_s):
        return
    draft.set(pacing=then, pacing_told=Generation(0))
    draft.say(
        "checkpoint_pace",
        f"checkpoints: {then.describe()} instead of {now.describe()}; {best.reason} ({_words(costs, rate)})",
        every=then.every,
        policy=best.policy,
        cost_s=best.cost_s,
    )


def _costs(record: JobRecord) -> Costs | None:
    """Medians; None before there is enough to go by. Before there was an entry it is taken for a third of a base."""
    bases = [one for one in record.costs if one.kind == "base"]
    entries = [one for one in record.costs if one.kind == "journal"]
    if len(bases) < FEWEST or record.typical_step_s is None:
        return None
    stall, write = median(one.stall_s for one in bases), median(one.write_s for one in bases)
    entry_stall = median(one.stall_s for one in entries) if entries else stall * SHARE_OF_ENTRY
    entry_write = median(one.write_s for one in entries) if entries else write * SHARE_OF_ENTRY
    return Costs(
        step=max(record.typical_step_s, LEAST_S),
        stall=stall,
        write=write,
        entry_stall=entry_stall,
        entry_write=entry_write,
        # Nothing may ever have been restored: reading takes no longer than coding and writing did.
        read=write,
        replay=entry_write,
    )


def _words(costs: Costs, rate: float) -> str:
    return (
        f"a step takes {costs.step:.3g} s, a whole state stops it for {costs.stall * 1e3:.3g} ms and is written in "
        f"{costs.write:.3g} s, a gradient {costs.entry_stall * 1e3:.3g} ms and {costs.entry_write:.3g} s; "
        f"a failure that memory does not survive is expected every {1 / rate / 3600:.3g} h"
    )
