"""The ladder as the kernel climbs it: what is known is put before it, what it chooses is written down and begun."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from orchestrator.domain.ids import Step
from orchestrator.domain.plan import Infeasible, Plan
from orchestrator.domain.rungs import Option, Rung
from orchestrator.domain.state import Reforming
from orchestrator.planner.strength import replaced, throughput
from orchestrator.recovery.ladder import Situation, options, substitute

from .draft import Draft
from .forming import begin_forming
from .speeds import about

SLOW = frozenset({Rung.REPLAN_ALL, Rung.WAIT})
"""Until these have come to an end, what was mirrored by the lost is held once."""


def climb(draft: Draft, plan: Plan) -> None:
    """Take the cheapest way out; what needs no planning begins here, all else when devices are wanted next."""
    assert isinstance(draft.state, Reforming)
    seen = _situation(draft, plan)
    found = options(seen)
    chosen = found[0]
    _record(draft, found, chosen)
    if chosen.rung in SLOW and seen.lost:
        draft.risk(f"{len(seen.lost)} ranks are lost, and what they held is held once until they are replaced")
    match chosen.place or chosen.rung:
        case Rung.FORK:
            begin_forming(draft, replace(plan, reason=f"same plan, lost ranks are forked again: {plan.describe()}"))
        case Rung.SPARE:
            taken = substitute(plan, seen.missing, seen.spares, seen.domains)
            assert not isinstance(taken, Infeasible)
            begin_forming(draft, taken)
        case _:
            pass


def planned(draft: Draft, plan: Plan) -> None:
    """A plan was chosen where another rung may have been expected: now it is known on which hosts it is."""
    state, incident = draft.state, draft.incident
    if not isinstance(state, Reforming) or incident is None or incident.rung in (None, Rung.CHECKPOINT):
        return
    rung = Rung.REPLAN_WARM if draft.record.warm >= set(plan.nodes) else Rung.REPLAN_ALL
    if rung is not incident.rung:
        found = options(_situation(draft, draft.record.plans.get(state.closing.generation, plan)))
        _record(draft, found, next(option for option in found if option.rung is rung))


def nothing_fits(draft: Draft) -> None:
    incident = draft.incident
    option = next((one for one in incident.options if one.rung is Rung.WAIT), None) if incident else None
    if incident and option and incident.rung is not Rung.WAIT:
        _record(draft, incident.options, option)
    draft.risk("no plan fits what is left, and what the lost ranks held is held once until a node comes")


def _situation(draft: Draft, plan: Plan) -> Situation:
    state, record = draft.state, draft.record
    assert isinstance(state, Reforming) and record.profile is not None
    trusted = frozenset(device for device in draft.usable if device.node not in record.avoided)
    again = frozenset(device for device in trusted if device.node in draft.trusted_hosts)
    # One that the cluster has no more, or that does not answer, may be as lost as what it would replace.
    ready = {
        node: spare
        for node, spare in record.spares.items()
        if spare.is_ready and trusted >= set(spare.devices) and node not in record.unreachable
    }
    # In a generation that never got to a step, and in a second failure, who holds what only the reports say.
    is_whole = state.attempt == 1 and record.started_at is not None
    seen = Situation(
        plan=plan,
        holders=record.plans.get(state.closing.generation) if is_whole else None,
        lost=state.lost,
        missing=frozenset(plan.devices) - again,
        usable=trusted,
        warm=draft.warm_devices(trusted),
        spares={node: spare.devices for node, spare in ready.items()},
        domains={node: spare.domain for node, spare in ready.items() if spare.domain},
        spec=record.sized_spec,
        profile=record.profile,
        elapsed_s=max(0.0, draft.now - (draft.incident.fault.at if draft.incident else draft.now)),
        step_s=record.typical_step_s,
        committed=record.committed,
        checkpoint=record.checkpoint.step if record.checkpoint else Step(0),
        incidents=record.incidents,
    )
    # Where nobody is missing the same ranks form again, and nothing else comes near that.
    return replace(seen, strength=_strength(draft, seen)) if seen.missing else seen


def _strength(draft: Draft, seen: Situation) -> dict[Rung, float | None]:
    """How fast the job would be after each rung, as its planner has it."""
    spares = (device for spare in seen.spares.values() for device in spare)
    request = about(draft, (*seen.plan.devices, *seen.usable, *spares))
    if request is None:
        return {}
    found: dict[Rung, float | None] = {Rung.REPLAN_WARM: throughput(request, seen.warm, seen.plan)}
    all_alike = seen.usable == seen.warm
    found[Rung.REPLAN_ALL] = found[Rung.REPLAN_WARM] if all_alike else throughput(request, seen.usable, seen.plan)
    taken = substitute(seen.plan, seen.missing, seen.spares, seen.domains)
    if isinstance(taken, Plan):
        found[Rung.SPARE] = replaced(request, seen.plan, taken)
    return found


def _record(draft: Draft, found: Sequence[Option], chosen: Option) -> None:
    draft.update_incident(
        rung=chosen.rung,
        predicted_pause_s=chosen.pause_s,
        predicted=dict(chosen.phases),
        options=tuple(replace(option, phases={}) for option in found),
    )
    others = "; ".join(_words(option) for option in found if option.rung is not chosen.rung)
    expected = f", expected pause {chosen.pause_s:.2f} s" if chosen.pause_s is not None else ""
    draft.say(
        "rung_taken",
        f"{_words(chosen)}{expected}. Not taken: {others}",
        rung=chosen.rung,
        predicted_pause_s=chosen.pause_s,
        prices={option.rung.value: option.price_s for option in found},
    )


def _words(option: Option) -> str:
    name = option.rung.value.replace("_", " ")
    price = f"{option.price_s:.2f} s" if option.price_s is not None else "not possible"
    return f"{name} {price} ({option.why})"
