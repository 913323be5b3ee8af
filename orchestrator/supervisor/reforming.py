"""A generation ends, for whatever reason: it is closed, and the next is chosen and prepared while its ranks report.

It owns what a closing begins with. It refuses to know what counts as a reason (losing.py, reporting.py and others call it).
"""

from __future__ import annotations

from collections.abc import Mapping

from orchestrator.domain.failure import Fault
from orchestrator.domain.generation import RankReport
from orchestrator.domain.host_events import RankExited
from orchestrator.domain.ids import Device, Generation, Step
from orchestrator.domain.incident import Incident
from orchestrator.domain.plan import Plan
from orchestrator.domain.requests import CloseGeneration, EndJoin
from orchestrator.domain.state import Closing, Reforming, Running, Starting

from .charging import charge
from .doubting import accuse
from .draft import Draft
from .forming import at_work, begin_forming
from .laddering import climb
from .settling import try_settle


def begin_reform(
    draft: Draft,
    fault: Fault,
    *,
    lost: frozenset[Device] = frozenset(),
    reports: Mapping[Device, RankReport] | None = None,
    target: Plan | None = None,
    exited: RankExited | None = None,
) -> None:
    """Close what runs or forms now.

    lost: have no process any more. target: the next plan where it is known already. exited: the end of a rank that is
    the reason, for the verdict where it is one too many.
    """
    state = draft.state
    assert isinstance(state, Running | Starting | Reforming)
    generation, plan, members = _broken(draft)
    if charge(draft, fault, generation, was_formed=at_work(draft) is not None, exited=exited):
        return
    accuse(draft, fault, generation)
    again = isinstance(state, Reforming)
    # Devices lost earlier have new processes by now, which report like everybody else.
    said = {d: r for d, r in (reports or {}).items() if r.generation == generation}
    newcomers = _newcomers(draft) if target is not None else _caught_up(draft)
    members = members - _prepared(draft) | newcomers
    closing = Closing(generation=generation, awaited=members - lost - set(said), reports=said)
    reforming = Reforming(
        fault=fault,
        closing=closing,
        forming=None,
        lost=lost,
        attempt=state.attempt + 1 if isinstance(state, Reforming) else 1,
    )
    draft.become(reforming)
    if draft.record.planning:
        # That plan was asked for under the next number: skip it, so that its late answer is not taken for ours.
        draft.set(generation=draft.next_generation(), planning=False)
    draft.set(saving={}, unsaved=(), adrift=None, base_asked=Step(0), target=None, considered=frozenset(), looking=None)
    if again:
        draft.update_incident(attempts=reforming.attempt)
    else:
        draft.open_incident(
            Incident(
                number=draft.incident.number + 1 if draft.incident else 1,
                fault=fault,
                generation=generation,
                committed=draft.record.committed,
                phases={"detect": max(0.0, draft.now - fault.at)},
                closed_at=draft.now,
            )
        )
    draft.say(
        "generation_closing",
        f"generation {generation} is closed: {fault.message}",
        cause=fault.cause,
        lost=[str(device) for device in sorted(lost)],
    )
    if draft.record.join:
        for node in sorted({device.node for device in newcomers} & draft.trusted_hosts):
            draft.call(node, EndJoin(generation=draft.record.join.generation))
    draft.set(join=None)
    for node in sorted({device.node for device in members} & draft.trusted_hosts):
        draft.call(node, CloseGeneration(generation=generation))
    _choose_next(draft, plan, target)
    try_settle(draft)


def _broken(draft: Draft) -> tuple[Generation, Plan, frozenset[Device]]:
    """The generation that ends, its plan, and whose reports settle it."""
    state = draft.state
    if isinstance(state, Running):
        # Donors that have given idle on with what they held, which is the newest there is until a step is committed.
        return state.generation, state.plan, frozenset(state.plan.devices) | frozenset(draft.record.pids)
    if isinstance(state, Starting):
        return state.forming.generation, state.forming.plan, frozenset(state.forming.addresses)
    assert isinstance(state, Reforming)
    assert state.forming is not None
    # Donors and survivors without a seat hold state too: everybody who has a process is asked.
    return state.forming.generation, state.forming.plan, frozenset(draft.record.pids) - draft.spare_devices


def _newcomers(draft: Draft) -> frozenset[Device]:
    """Who has been receiving what the next plan gives it, and reports how far that has come."""
    join = draft.record.join
    return frozenset(move.target for move in join.moves) & set(draft.record.pids) if join else frozenset()


def _caught_up(draft: Draft) -> frozenset[Device]:
    """Who has everything that the next plan gives it: where a fault ends the generation, it may be the last to have it.

    Of a job that is at risk so may everybody who was to get it: how far they have come may not have been heard yet. Who
    is given nothing has never been told of the join, and has nothing to say.
    """
    record, join = draft.record, draft.record.join
    if join is None or not isinstance(draft.state, Running):
        return frozenset()
    return _newcomers(draft) if record.at_risk else _newcomers(draft) & join.done


def _prepared(draft: Draft) -> frozenset[Device]:
    """Whose processes were made for a join and have not caught up: nobody asks them, they hold nothing whole."""
    state, join = draft.state, draft.record.join
    if join is None or not isinstance(state, Running):
        return frozenset()
    return frozenset(join.addresses) - set(state.plan.devices) - join.idle


def _choose_next(draft: Draft, plan: Plan, target: Plan | None) -> None:
    if target is not None:
        begin_forming(draft, target)
    else:
        climb(draft, plan)
