"""A rank stands still, says its host: every host is asked what it sees, and what they see together is acted on.

    RanksStalled ──> LookAround to all ──> RanksSeen from all, or LOOK_S ──> diagnosis ──> culprits killed, nodes given up,
                          ^                                                             links made anew, the program's own
    a host goes silent ───┘ and again when waiting has lasted                           fault told

What rests on comparing sights of different hosts must be found twice with nobody having moved between, because no two
hosts look at one instant. What hosts saw before a supervisor was away, or another one's time began, is looked at again.
A silent host is no evidence, and neither is a wait: its node is given up where everybody who can be asked waits for it,
and has for so long that it is neither a slow step nor a cable that is put back at once. This refuses to know how a
stall is noticed and how sights are read (detection/waitfor.py).
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
from orchestrator.domain.failure import Cause, Fault
from orchestrator.domain.faults import Verdict
from orchestrator.domain.host_events import RanksSeen, RanksStalled
from orchestrator.domain.ids import Device, Generation, NodeId, Rank
from orchestrator.domain.job import Looking
from orchestrator.domain.requests import KillRank, LookAround
from orchestrator.domain.sight import RankSight
from orchestrator.domain.state import Failed, Running

from .draft import Draft
from .faulting import fault_seen
from .forming import at_work, current_forming
from .losing import host_lost
from .reforming import begin_reform
from .stopping import stop

MAX_LOST_LINKS = 32
MAX_BAD_ENDS = 32
FORGOTTEN_S = 3600.0
"""A link that is lost after so long without any such trouble is lost for the first time, and so is a node given up."""
SILENT_STILL_S = 1.5
"""After a cut of a second the kernel's next attempt to send has brought the links back by then."""
SILENT_STEPS = 2.0
"""Nothing moves anywhere for so many typical steps: whoever waits for a silent host does not wait for a slow one."""
LOOK_AGAIN_S = 0.3
FRESH_S = 2.0
"""What was seen so long ago is looked at again; where asking itself takes longer, for twice as long each time."""
ASLEEP_S = 2.0
"""A host's watch that has not looked for so long watches nothing."""


def ranks_stalled(draft: Draft, node: NodeId, said: RanksStalled) -> None:
    """One look at a time; whoever is still then has to be seen in it."""
    at_it, looking = at_work(draft), draft.record.looking
    if at_it is not None and at_it[0] == said.generation and (looking is None or looking.after_s):
        _look(draft, said.generation, f"{node}: {said.why}")


def ranks_seen(draft: Draft, node: NodeId, said: RanksSeen) -> None:
    looking = draft.record.looking
    if said.looked_s_ago > ASLEEP_S:
        draft.say("watch_asleep", f"the watch on {node} had not looked at its ranks for {said.looked_s_ago:.1f} s")
    if looking is None or (looking.generation, looking.number) != (said.generation, said.number):
        return
    draft.set(looking=replace(looking, seen={**looking.seen, node: said.sights}))
    _conclude_if_seen(draft)


def host_silent(draft: Draft, node: NodeId) -> None:
    """A look under way waits for it no longer; without one, the others are asked whether they wait for its ranks."""
    looking, at_it = draft.record.looking, at_work(draft)
    if looking is not None and not looking.after_s:
        _conclude_if_seen(draft)
    elif at_it is not None and node in {device.node for device in _ranks(draft).values()}:
        _look(draft, at_it[0], f"{node} is silent", is_alarm=False)


def host_answers(draft: Draft) -> None:
    """Where nobody is silent any more, nobody needs to be asked."""
    looking = draft.record.looking
    if looking is not None and looking.after_s and not draft.record.unreachable:
        draft.set(looking=None)


def conclude(draft: Draft) -> None:
    """Act on what has been seen so far, or ask where that was put off."""
    looking = draft.record.looking
    assert looking is not None
    draft.set(looking=None)
    at_it = at_work(draft)
    if at_it is None or at_it[0] != looking.generation:
        return
    if looking.after_s:
        _look(draft, looking.generation, looking.why, is_alarm=looking.is_alarm)
        return
    if not looking.seen:
        return  # where nobody answers the control plane is cut off, which says nothing about ranks
    if not 0.0 <= draft.now - looking.asked_at <= looking.fresh_s:
        _look_once_more(draft, looking)
        return
    sights = {sight.device: sight for seen in looking.seen.values() for sight in seen}
    ranks = _ranks(draft)
    silent = draft.record.unreachable & {device.node for device in ranks.values()}
    found = diagnose(ranks, looking.generation, sights, silent)
    if silent and looking.asked - draft.record.unreachable - set(looking.seen):
        # Whoever is late with an answer is none of the silent ones: it is asked again.
        draft.set(looking=replace(looking, after_s=LOOK_AGAIN_S, asked=frozenset(), seen={}))
        return
    if not looking.is_alarm and not isinstance(found, NodesSilent):
        return  # nobody has complained
    match found:
        case Culprits():
            _kill(draft, found, {device: sights[device].mark for device in found.devices})
        case NodesSilent():
            _give_up(draft, looking, found, sights)
        case LinksLost() | Circle() | Standstill():
            evidence = (type(found).__name__, *fingerprint(sights))
            if looking.suspected == evidence:
                _act(draft, found)
            else:
                _look(draft, looking.generation, looking.why, evidence, fresh_s=looking.fresh_s)
        case AtWork():
            pass  # its host speaks up once there is evidence against it, and whoever waits after twice the time
        case Moving(message=message):
            draft.set(false_alarms=draft.record.false_alarms + 1)
            draft.say("false_alarm", f"{message} ({looking.why})")
        case _:
            assert_never(found)


# --- what is done about it -----------------------------------------------------------------------------------------------


def _give_up(draft: Draft, looking: Looking, found: NodesSilent, sights: Mapping[Device, RankSight]) -> None:
    """Nodes that are silent and waited for, once that has lasted; until then it is looked at again."""
    enough_s = _patience(draft, sights)
    if enough_s is None:
        return  # whoever waits longer than its generation has taught says so
    if found.still_s < enough_s:
        draft.set(looking=replace(looking, after_s=enough_s - found.still_s, asked=frozenset(), seen={}))
        return
    for node in found.nodes:
        fault = replace(host_fault(node, found.message, draft.now), at=draft.now - found.still_s)
        had = [device for device in draft.record.pids if device.node == node]
        host_lost(draft, node, fault, False)
        fault_seen(draft, fault, had)


def _patience(draft: Draft, sights: Mapping[Device, RankSight]) -> float | None:
    """How long nothing may move while a host is silent; None where nobody can say yet how long that usually is."""
    if any(sight.in_wait and sight.why for sight in sights.values()):
        return SILENT_STILL_S  # its host has learned how long waits last, and this one is longer
    record = draft.record
    has_committed = isinstance(record.state, Running) and record.last_step_at is not None
    if not has_committed or record.typical_step_s is None:
        return None
    return max(SILENT_STILL_S, SILENT_STEPS * record.typical_step_s)


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
    is_recent = draft.now - draft.record.links_lost_at < FORGOTTEN_S
    before = draft.record.lost_links if is_recent else ()
    draft.set(lost_links=(*before, *pairs)[-MAX_LOST_LINKS:], links_lost_at=draft.now)
    if not is_recent:
        # How long a bar lasts is told by how often: of one that stands, that is not forgotten.
        draft.set(bad_ends={bad: times for bad, times in draft.record.bad_ends.items() if bad in draft.record.barred})
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
        _bar(draft, worst.node)
        host_lost(draft, worst.node, fault, False)


def _bar(draft: Draft, node: NodeId) -> None:
    ends, barred = dict(draft.record.bad_ends), draft.record.barred | {node}
    times = ends.pop(node, 0) + 1
    ends[node] = times  # behind the others: the oldest are forgotten first
    kept = barred | set(list(ends)[-MAX_BAD_ENDS:])
    draft.set(barred=barred, bad_ends={bad: count for bad, count in ends.items() if bad in kept})
    draft.say("barred", f"{node} is not used for a while: messages to or from it are lost", node=node, times=times)


def unbar(draft: Draft, key: str) -> None:
    """It may be tried again; key: of the deadline, bar:NODE:TIMES."""
    draft.set(barred=draft.record.barred - {NodeId(key.removeprefix("bar:").rpartition(":")[0])})


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


def _look_once_more(draft: Draft, looking: Looking) -> None:
    """Nobody governed for a while, or asking and answering took that long: who was seen still may be at work again."""
    fresh_s = max(FRESH_S, 2 * looking.fresh_s)
    _look(draft, looking.generation, looking.why, looking.suspected, is_alarm=looking.is_alarm, fresh_s=fresh_s)


def _look(
    draft: Draft,
    generation: Generation,
    why: str,
    suspected: tuple[str, ...] = (),
    *,
    is_alarm: bool = True,
    fresh_s: float = FRESH_S,
) -> None:
    number = draft.record.looks + 1
    nodes = {device.node for device in _ranks(draft).values()} & draft.trusted_hosts
    asked = frozenset(nodes - draft.record.unreachable)
    looking = Looking(
        generation=generation,
        number=number,
        asked=asked,
        why=why,
        suspected=suspected,
        is_alarm=is_alarm,
        asked_at=draft.now,
        fresh_s=fresh_s,
    )
    draft.set(looks=number, looking=looking)
    for node in sorted(asked):
        draft.call(node, LookAround(generation=generation, number=number))


def _conclude_if_seen(draft: Draft) -> None:
    """No answer may be missing any more but those of hosts that nobody reaches."""
    looking = draft.record.looking
    if looking is not None and looking.asked - draft.record.unreachable <= set(looking.seen):
        conclude(draft)


def _ranks(draft: Draft) -> dict[Rank, Device]:
    """Of the generation at work: members, then donors in the order in which the form names them."""
    at_it = at_work(draft)
    assert at_it is not None
    plan = at_it[1]
    forming = current_forming(draft)
    donors = sorted(set(forming.addresses) - set(plan.devices)) if forming else []
    members = {seat.rank: seat.device for seat in plan.seats}
    return members | {Rank(plan.world_size + place): donor for place, donor in enumerate(donors)}
