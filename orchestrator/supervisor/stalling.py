"""A rank stands still, says its host: every host is asked what it sees, and what they see together is acted on.

    RanksStalled ──> LookAround to all ──> RanksSeen from all, or LOOK_S ──> diagnosis ──> culprits killed, nodes given up,
                                                                        links made anew, the program's own fault told

What rests on comparing sights of different hosts must be found twice with nobody having moved between, because no two
hosts look at one instant. It refuses to know how a stall is noticed and how sights are read (detection/waitfor.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import assert_never

from orchestrator.detection.classify import host_fault
from orchestrator.detection.waitfor import (
    AtWork,
    Circle,
    Culprits,
    LinksLost,
    Moving,
    NodesSilent,
    Standstill,
    diagnose,
    fingerprint,
)
from orchestrator.domain.faults import Verdict
from orchestrator.domain.ids import Device, Generation, NodeId, Rank
from orchestrator.domain.job import Cause, Failed, Fault, Looking
from orchestrator.domain.protocol import KillRank, LookAround, RanksSeen, RanksStalled

from .draft import Draft
from .faulting import fault_seen
from .forming import at_work, current_forming
from .losing import host_lost
from .reforming import begin_reform
from .stopping import stop

MAX_LOST_LINKS = 32
ASLEEP_S = 2.0
"""A host's watch that has not looked for so long watches nothing."""


def ranks_stalled(draft: Draft, node: NodeId, said: RanksStalled) -> None:
    """One look at a time; whoever is still then has to be seen in it."""
    at_it = at_work(draft)
    if at_it is not None and at_it[0] == said.generation and draft.record.looking is None:
        _look(draft, said.generation, f"{node}: {said.why}")


def ranks_seen(draft: Draft, node: NodeId, said: RanksSeen) -> None:
    looking = draft.record.looking
    if said.looked_s_ago > ASLEEP_S:
        draft.say("watch_asleep", f"the watch on {node} had not looked at its ranks for {said.looked_s_ago:.1f} s")
    if looking is None or (looking.generation, looking.number) != (said.generation, said.number):
        return
    draft.set(looking=replace(looking, seen={**looking.seen, node: said.sights}))
    host_silent(draft)


def host_silent(draft: Draft) -> None:
    """No answer may be missing any more but those of hosts that nobody reaches."""
    looking = draft.record.looking
    if looking is not None and looking.asked - draft.record.unreachable <= set(looking.seen):
        conclude(draft)


def conclude(draft: Draft) -> None:
    """Act on what has been seen so far."""
    looking = draft.record.looking
    assert looking is not None
    draft.set(looking=None)
    at_it = at_work(draft)
    if at_it is None or at_it[0] != looking.generation or not looking.seen:
        return  # where nobody answers the control plane is cut off, which says nothing about ranks
    sights = {sight.device: sight for seen in looking.seen.values() for sight in seen}
    ranks = _ranks(draft)
    silent = draft.record.unreachable & {device.node for device in ranks.values()}
    found = diagnose(ranks, looking.generation, sights, silent)
    match found:
        case Culprits():
            _kill(draft, found, {device: sights[device].mark for device in found.devices})
        case NodesSilent(nodes=nodes, message=message):
            for node in nodes:
                fault = replace(host_fault(node, message, draft.now), at=draft.now - found.still_s)
                had = [device for device in draft.record.pids if device.node == node]
                host_lost(draft, node, fault, False)
                fault_seen(draft, fault, had)
        case LinksLost() | Circle() | Standstill():
            evidence = (type(found).__name__, *fingerprint(sights))
            if looking.suspected == evidence:
                _act(draft, found)
            else:
                _look(draft, looking.generation, looking.why, evidence)
        case AtWork():
            pass  # its host speaks up once there is evidence against it, and whoever waits after twice the time
        case Moving(message=message):
            draft.set(false_alarms=draft.record.false_alarms + 1)
            draft.say("false_alarm", f"{message} ({looking.why})")
        case _:
            assert_never(found)


# --- what is done about it -----------------------------------------------------------------------------------------------


def _kill(draft: Draft, found: Culprits, marks: Mapping[Device, str]) -> None:
    """Those who wait leave while the culprit's stack is read; its own process is replaced like any that died."""
    for device in found.devices:
        pid = draft.record.pids.get(device, 0)
        why = f"killed, {found.message}"
        draft.call(device.node, KillRank(device=device, why=why, dump=True, pid=pid, mark=marks[device]))
    fault = _fault(draft, Cause.HANG, found, found.devices)
    # A program that hangs in the same place of the same step again would do so for ever.
    is_own = bool(found.where) and not _is_on_purpose(draft, found.devices)
    begin_reform(draft, replace(fault, signature=f"hang in {found.where}" if is_own else "", is_external=not is_own))


def _is_on_purpose(draft: Draft, devices: tuple[Device, ...]) -> bool:
    hit = [one.devices for one in draft.record.injected if one.verdict is Verdict.OPEN and one.carried_out_at is not None]
    return any(set(devices) & set(them) for them in hit)


def _act(draft: Draft, found: LinksLost | Circle | Standstill) -> None:
    match found:
        case LinksLost(pairs=pairs):
            _renew_links(draft, found, pairs)
        case Circle(message=message):
            stop(draft, Failed(at=draft.now, message=message))
        case Standstill():
            begin_reform(draft, _fault(draft, Cause.HANG, found, ()))


def _renew_links(draft: Draft, found: LinksLost, pairs: tuple[tuple[Device, Device], ...]) -> None:
    """The same members form anew, with fresh connections. Where a pair fails again one end of it is given up."""
    before = draft.record.lost_links
    draft.set(lost_links=(*before, *pairs)[-MAX_LOST_LINKS:])
    again = [pair for pair in pairs if pair in before]
    if not again:
        begin_reform(draft, _fault(draft, Cause.LINK_LOST, found, tuple(sorted({d for pair in pairs for d in pair}))))
        return
    worst = _worst(again, draft.record.lost_links)
    fault = _fault(draft, Cause.LINK_LOST, found, (worst,))
    if all(a.node == b.node for a, b in again):
        pid = draft.record.pids.get(worst, 0)
        draft.call(worst.node, KillRank(device=worst, why=f"killed, {found.message}", pid=pid))
        begin_reform(draft, fault)
    else:
        host_lost(draft, worst.node, fault, False)


def _worst(pairs: list[tuple[Device, Device]], history: tuple[tuple[Device, Device], ...]) -> Device:
    """The end that has been part of more lost links than any other."""
    ends = [device for pair in history for device in pair]
    return max({device for pair in pairs for device in pair}, key=lambda d: (sum(e.node == d.node for e in ends), d))


def _fault(draft: Draft, cause: Cause, found: Culprits | LinksLost | Standstill, devices: tuple[Device, ...]) -> Fault:
    return Fault(
        cause=cause,
        message=found.message,
        at=draft.now - found.still_s,
        devices=devices,
        is_external=cause is Cause.LINK_LOST,
    )


# --- looking -------------------------------------------------------------------------------------------------------------


def _look(draft: Draft, generation: Generation, why: str, suspected: tuple[str, ...] = ()) -> None:
    number = draft.record.looks + 1
    nodes = {device.node for device in _ranks(draft).values()} & draft.trusted_hosts
    asked = frozenset(nodes - draft.record.unreachable)
    draft.set(
        looks=number,
        looking=Looking(generation=generation, number=number, asked=asked, why=why, suspected=suspected),
    )
    for node in sorted(asked):
        draft.call(node, LookAround(generation=generation, number=number))


def _ranks(draft: Draft) -> dict[Rank, Device]:
    """Of the generation at work: members, then donors in the order in which the form names them."""
    at_it = at_work(draft)
    assert at_it is not None
    plan = at_it[1]
    forming = current_forming(draft)
    donors = sorted(set(forming.addresses) - set(plan.devices)) if forming else []
    members = {seat.rank: seat.device for seat in plan.seats}
    return members | {Rank(plan.world_size + place): donor for place, donor in enumerate(donors)}
