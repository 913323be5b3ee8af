"""Faults on purpose: asked for, carried out or refused, and what became of each.

It owns their record and the verdicts. It refuses to know whom they hit (aiming.py) and how they are carried out (requests
to hosts and loose effects say what), and takes no part in recovering: it reads the incidents others write.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from orchestrator.domain.effects import KillNode, Loose, Sabotage, StrikeNode
from orchestrator.domain.events import NodeStruck
from orchestrator.domain.failure import Cause, Fault
from orchestrator.domain.faults import (
    IN_THE_NEXT_PROCESS,
    ON_CONTROL,
    ON_RANKS,
    FaultKind,
    FaultRequested,
    Injected,
    Verdict,
)
from orchestrator.domain.host_events import FaultCarriedOut
from orchestrator.domain.ids import Device, NodeId
from orchestrator.domain.requests import InjectFault
from orchestrator.domain.state import Running, Stopping, Succeeded

from .aiming import DESTRUCTIVE, PASSING, matching, objection, still_open, victims
from .draft import Draft

MAX_INJECTED = 100
"""Kept in a record; older ones stay in the history stream."""
QUIET_STEPS = 10
"""Committed after a fault without an incident: it did no harm, or nobody noticed."""
QUIET_S = 3.0

NOTICEABLE = DESTRUCTIVE - PASSING | {FaultKind.NAN, FaultKind.BIT_FLIP}
"""Have to be noticed; others may pass before anybody minds."""

SHOWS_AS = {FaultKind.NAN: Cause.NOT_FINITE, FaultKind.BIT_FLIP: Cause.CORRUPTION}
"""The vote and the comparison of copies see that something is wrong, not always where."""


def inject(drafts: Sequence[Draft], asked: FaultRequested) -> tuple[Loose, ...]:
    """Pick the victims and have it done; the records say so, or say why not.

    drafts: the job it was asked for; every job where a machine is to die, with all that any of them has there.
    """
    if asked.fault is FaultKind.NODE_KILL:
        return _kill_node(drafts, asked)
    if asked.fault in ON_CONTROL:
        for draft in drafts:
            _begin(draft, _named(draft, asked), (), None, carried_out=f"{asked.fault} asked for")
        return (Sabotage(fault=asked),)
    if asked.job is None:
        return ()  # the API refuses it in words: a rank is always some job's
    for draft in drafts:
        _do(draft, asked, objection(draft, asked))
    return ()


def _kill_node(drafts: Sequence[Draft], asked: FaultRequested) -> tuple[Loose, ...]:
    """Every job with ranks there keeps a record, and any of them may refuse: what it has there dies too."""
    first = next((draft for draft in drafts if draft.record.id == asked.job), None)
    if asked.job is not None and first is None:
        return ()  # its job is over
    if first is not None and not matching(first, asked):
        _do(first, asked, objection(first, asked))
        return ()
    node = victims(first, asked)[0].node if first is not None else asked.node
    if node is None:
        return ()
    there = replace(asked, node=node, rank=None, device=None, pipeline=None, stage=None, tp=None)
    hit = [] if first is None else [(first, asked)]
    hit += [(draft, there) for draft in drafts if draft is not first and matching(draft, there)]
    refusals = [(draft, why) for draft, what in hit if (why := objection(draft, what))]
    why = refusals[0][1] if refusals else ""
    if refusals and len(hit) > 1:
        why = f"{refusals[0][0].record.id} has ranks on {node}: {why}"
    for draft, what in hit:
        _do(draft, what, why)
    if why:
        return ()
    if not hit:
        return (KillNode(node=node),)
    keeper = hit[0][0]
    keeper.emit(StrikeNode(job=keeper.record.id, node=node))
    return ()


def _do(draft: Draft, asked: FaultRequested, why_not: str) -> None:
    named = _named(draft, asked)
    if why_not:
        _refuse(draft, named, why_not)
    else:
        _send(draft, named)


def _send(draft: Draft, asked: FaultRequested) -> None:
    device, devices = victims(draft, asked)
    if asked.fault in ON_RANKS:
        _begin(draft, asked, devices, None)
        draft.call(device.node, InjectFault(fault=asked, device=device))
    elif asked.fault is FaultKind.NODE_KILL:
        _begin(draft, asked, devices, device.node)
    else:
        # A host that ends may not live to say so.
        said = f"the host on {device.node} is killed" if asked.fault is FaultKind.HOST_KILL else ""
        _begin(draft, asked, devices, device.node, carried_out=said)
        draft.call(device.node, InjectFault(fault=asked))


def _named(draft: Draft, asked: FaultRequested) -> FaultRequested:
    number = draft.record.next_fault
    draft.set(next_fault=number + 1)
    return replace(asked, id=asked.id or f"f{number}")


# --- what becomes of it --------------------------------------------------------------------------------------------------


def fault_carried_out(draft: Draft, said: FaultCarriedOut) -> None:
    for one in draft.record.injected:
        if one.id != said.id or one.carried_out_at is not None or one.verdict is not Verdict.OPEN:
            continue
        if said.refused:
            _judge(draft, one, Verdict.REFUSED, said.message)
        else:
            step = said.step or draft.record.committed
            _update(draft, one, carried_out_at=said.at, step=step, message=said.message, **_heard(draft))
            draft.say("fault_carried_out", f"{one.asked.fault}: {said.message}", fault=one.id, step_of_fault=step)


def node_struck(draft: Draft, said: NodeStruck) -> None:
    for one in still_open(draft):
        if not _is_under_way(one) or one.node != said.node:
            continue
        if said.refused:
            _judge(draft, one, Verdict.REFUSED, said.refused)
        else:
            _strike(draft, one, draft.now)


def fault_seen(draft: Draft, fault: Fault, devices: Iterable[Device]) -> None:
    """Somebody was found dead: that is what explains open faults on them; what they had yet to do they never will."""
    hit = frozenset(devices)
    for one in still_open(draft):
        if _is_under_way(one) and hit & set(one.devices):
            _strike(draft, one, one.asked_at)  # its processes end one after another, and that is heard before the last has
    concerned = [one for one in still_open(draft) if hit & set(one.devices)]
    # A slow link or a stop that passed does not end a process where something else was told to.
    killers = [one for one in concerned if one.asked.fault in NOTICEABLE and one.carried_out_at is not None]
    for one in concerned:
        if killers and one not in killers and one.carried_out_at is not None:
            continue
        if one.carried_out_at is None and one.asked.at in IN_THE_NEXT_PROCESS:
            continue
        if one.carried_out_at is None:
            _judge(draft, one, Verdict.HARMLESS, f"its rank ended before it got there: {fault.message}")
        elif one.incident is None and draft.incident is not None:
            _explain(draft, one, draft.incident.number, fault)
        elif one.incident is not None:
            _update(draft, one, cause=fault.cause, seen=fault.message)


def judge_faults(draft: Draft) -> None:
    """Once per kernel step: whatever can be said by now about the faults still open."""
    state = draft.state
    for one in still_open(draft):
        if isinstance(state, Stopping) or draft.is_over:
            _judge_at_the_end(draft, one)
            continue
        if one.carried_out_at is None:
            continue
        if one.incident is None:
            _look_for_incident(draft, one)
        elif (incident := next((i for i in draft.record.incidents if i.number == one.incident), None)) is None:
            _judge(draft, one, Verdict.RECOVERED, "its incident is no longer kept")
        elif incident.pause_s is not None and isinstance(state, Running):
            done = replace(one, cause=incident.fault.cause, pause_s=incident.pause_s, rolled_back=incident.rolled_back)
            _replace(draft, one, done)
            _judge(draft, done, Verdict.RECOVERED, incident.fault.message)


def _is_under_way(one: Injected) -> bool:
    """A node is told to die, and whoever kills it has not said yet that it has."""
    return one.asked.fault is FaultKind.NODE_KILL and one.carried_out_at is None


def _strike(draft: Draft, one: Injected, at: float) -> None:
    said = f"every process of {one.node} is killed"
    _update(draft, one, carried_out_at=at, step=draft.record.committed, message=said, **_heard(draft))


def _heard(draft: Draft) -> dict[str, Any]:
    """The supervisor's own clock and count: hosts have clocks of their own, and the difference may be any."""
    incident = draft.incident
    is_over = incident is not None and incident.pause_s is not None
    before = 0 if incident is None else incident.number if is_over else incident.number - 1
    return {"heard_at": draft.now, "after": before}


def _look_for_incident(draft: Draft, one: Injected) -> None:
    incident = draft.incident
    assert one.carried_out_at is not None
    is_new = incident is not None and incident.number > one.after
    others = [other for other in still_open(draft) if incident is not None and other.incident == incident.number]
    if one.asked.fault not in NOTICEABLE and any(other.asked.fault in NOTICEABLE for other in others):
        is_new = False  # it has its explanation
    if is_new and incident is not None and incident.pause_s is None and _shows(one, incident.fault):
        _explain(draft, one, incident.number, incident.fault)
        return
    heard_at = one.heard_at if one.heard_at is not None else one.carried_out_at
    over_at = heard_at + one.asked.duration_s + QUIET_S
    quiet_steps = draft.record.committed - one.step
    enough = QUIET_STEPS
    # A clock that has jumped back says nothing about how long it has been: steps alone are enough then. More of them where
    # somebody should have noticed, because those made while no supervisor listened are all told at once.
    is_late = draft.now >= over_at or (draft.now < heard_at and not _has_to_be_noticed(draft, one))
    is_over = (is_late and quiet_steps >= enough) or quiet_steps >= 10 * enough
    if isinstance(draft.state, Running) and is_over:
        _judge(
            draft,
            one,
            Verdict.UNDETECTED if _has_to_be_noticed(draft, one) else Verdict.HARMLESS,
            f"step {draft.record.committed} is committed and nothing had to be recovered",
        )


def _has_to_be_noticed(draft: Draft, one: Injected) -> bool:
    """An exact job votes on a step whose numbers are bad once more before anybody leaves."""
    again = one.asked.fault is FaultKind.NAN and bool(draft.record.spec.train.exact)
    return one.asked.fault in NOTICEABLE and not again


def _shows(one: Injected, fault: Fault) -> bool:
    """Whether this is what it looks like: something of its victims broke, or numbers that nobody can be blamed for."""
    return bool(set(fault.devices) & set(one.devices)) or fault.cause is SHOWS_AS.get(one.asked.fault)


def _judge_at_the_end(draft: Draft, one: Injected) -> None:
    outcome = draft.state.outcome if isinstance(draft.state, Stopping) else draft.state
    message = getattr(outcome, "message", "")
    if one.carried_out_at is None:
        _judge(draft, one, Verdict.HARMLESS, "the job ended before it got there")
    elif message:
        _judge(draft, one, Verdict.JOB_FAILED, message)
    elif one.incident is not None:
        _judge(draft, one, Verdict.RECOVERED, "the job ended well")
    elif _has_to_be_noticed(draft, one) and isinstance(outcome, Succeeded) and one.step < draft.record.committed:
        _judge(draft, one, Verdict.UNDETECTED, "the job succeeded and nobody had noticed")
    else:
        _judge(draft, one, Verdict.HARMLESS, "the job ended before anybody minded")


# --- the record ----------------------------------------------------------------------------------------------------------


def _begin(
    draft: Draft, asked: FaultRequested, devices: tuple[Device, ...], node: NodeId | None, *, carried_out: str = ""
) -> None:
    one = Injected(
        id=asked.id,
        asked=asked,
        asked_at=draft.now,
        devices=devices,
        node=node,
        carried_out_at=draft.now if carried_out else None,
        step=draft.record.committed,
        message=carried_out,
        **(_heard(draft) if carried_out else {}),
    )
    draft.set(injected=(*draft.record.injected, one)[-MAX_INJECTED:])
    whom = ", ".join(map(str, devices)) or "the control plane"
    where = f" at {asked.at}" * bool(asked.at) + f" from step {asked.step}" * bool(asked.step)
    draft.say("fault_asked", f"{asked.fault} of {whom}{where}", fault=asked.id, fault_kind=asked.fault)


def _refuse(draft: Draft, asked: FaultRequested, why: str) -> None:
    one = Injected(id=asked.id, asked=asked, asked_at=draft.now, step=draft.record.committed)
    draft.set(injected=(*draft.record.injected, one)[-MAX_INJECTED:])
    _judge(draft, one, Verdict.REFUSED, why)


def _explain(draft: Draft, one: Injected, incident: int, fault: Fault) -> None:
    assert one.carried_out_at is not None
    detected_s = max(0.0, draft.now - one.carried_out_at)
    _update(draft, one, incident=incident, cause=fault.cause, seen=fault.message, detected_s=detected_s)


def _judge(draft: Draft, one: Injected, verdict: Verdict, why: str) -> None:
    _update(draft, one, verdict=verdict, why=why)
    draft.say(
        "fault_judged",
        f"{one.asked.fault} {one.id}: {verdict.replace('_', ' ')}, {why}",
        fault=one.id,
        fault_kind=one.asked.fault,
        verdict=verdict,
        cause=one.cause,
        detected_s=one.detected_s,
        pause_s=one.pause_s,
        rolled_back=one.rolled_back,
    )


def _update(draft: Draft, one: Injected, **changes: Any) -> None:
    _replace(draft, one, replace(one, **changes))


def _replace(draft: Draft, one: Injected, by: Injected) -> None:
    draft.set(injected=tuple(by if other.id == one.id else other for other in draft.record.injected))
