"""Ranks that leave a generation say so once: what their reports are evidence of, and what becomes of those that never come.

It owns who is waited for and how long that is worth it. It refuses to know what the reports add up to (settling.py).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from orchestrator.detection.classify import host_fault
from orchestrator.domain.failure import Cause, Fault
from orchestrator.domain.generation import RankReport, Settlement, Unreadable
from orchestrator.domain.ids import NodeId
from orchestrator.domain.state import Reforming, Running

from .believing import distrust_unreadable
from .deadlines import silent_seats
from .doubting import found_fault
from .draft import Draft
from .forming import at_work, loses_steps
from .joining import newcomer_reported, resize
from .losing import doubt, host_lost
from .reforming import begin_reform
from .settling import settle_by, try_settle


def rank_reported(draft: Draft, report: RankReport) -> None:
    """A survivor left. In a running generation that is news: somebody it talked to is gone."""
    if isinstance(report.found, Unreadable):
        distrust_unreadable(draft, report.found, report.cause)
    state = draft.state
    if isinstance(state, Reforming) and report.generation == state.closing.generation:
        _take_report(draft, report)
    elif report.stopped and isinstance(state, Running) and report.generation == state.generation:
        target = draft.record.join.plan if draft.record.join else None
        begin_reform(draft, resize(draft, target), reports={report.device: report}, target=target)
    elif (at_it := at_work(draft)) and at_it[0] == report.generation and not newcomer_reported(draft, report):
        fault = found_fault(draft, report, at_it[0]) or _link_fault(draft, report)
        begin_reform(draft, fault, reports={report.device: report})


def ask_for_patience(draft: Draft) -> None:
    """The deadline for reports ran out. Silent hosts are given up, unless that would cost committed steps."""
    state = draft.state
    assert isinstance(state, Reforming)
    found = settle_by(draft.record, state.closing)
    if not loses_steps(draft, _without(found, {device.node for device in state.closing.awaited})):
        give_up_waiting(draft)
        return
    silent = ", ".join(sorted({device.node for device in state.closing.awaited}))
    reason = f"{silent} did not report and may hold the only copy of what step {found.step} needs"
    draft.become(replace(state, is_patient=True))
    draft.risk(reason)
    draft.say("waiting", reason)


def give_up_waiting(draft: Draft) -> None:
    """Time is up: whoever has not answered is treated as gone, and its host is avoided.

    Safe, because at least one rank of the generation has left, so no later step of it can pass; or because hosts that
    nobody reaches have ended their ranks by themselves by now.
    """
    state = draft.state
    assert isinstance(state, Running | Reforming)
    awaited = state.closing.awaited if isinstance(state, Reforming) else frozenset(state.plan.devices)
    silent = sorted({device.node for device in awaited})
    draft.say("hosts_given_up", f"no report from {', '.join(silent)}; their ranks count as gone")
    cause = Cause.CONTACT_LOST if draft.record.unreachable >= set(silent) else Cause.NODE_LOST
    for node in silent:
        host_lost(draft, node, host_fault(node, "it did not report in time", draft.now, cause), False)


def dispensable_suspects(draft: Draft) -> frozenset[NodeId]:
    """Silent nodes to whose ranks a survivor's connection broke, once nobody else is waited for.

    A broken connection is evidence against one rank, and silence is none against its node: together they are enough to go
    on without it, and not enough to lose what it may hold the only copy of. For that there is `ask_for_patience`.
    """
    state = draft.state
    if not draft.record.unreachable or not isinstance(state, Reforming) or state.closing.settlement is not None:
        return frozenset()
    awaited = frozenset(device.node for device in state.closing.awaited)
    found = awaited & draft.record.unreachable
    if not found or found != awaited or not found <= _suspects(draft, state):
        return frozenset()
    return frozenset() if loses_steps(draft, _without(settle_by(draft.record, state.closing), found)) else found


def _suspects(draft: Draft, state: Reforming) -> frozenset[NodeId]:
    plan = draft.record.plans.get(state.closing.generation)
    lost = {report.lost_peer for report in state.closing.reports.values() if report.lost_peer is not None}
    return frozenset(plan.seats[rank].device.node for rank in lost if rank < plan.world_size) if plan else frozenset()


def give_up_silent(draft: Draft) -> None:
    """Seats on silent nodes hold up a generation that all others are ready for: form it elsewhere if nothing is lost."""
    state = draft.state
    assert isinstance(state, Reforming)
    silent, settlement = silent_seats(draft.record), state.closing.settlement
    if settlement is not None and loses_steps(draft, _without(settlement, silent)):
        return
    for node in sorted(silent):
        host_lost(draft, node, host_fault(node, "silent, and a seat is to be prepared there", draft.now), False)


def _without(settlement: Settlement, nodes: Collection[NodeId]) -> Settlement:
    """What is left where their hosts are given up: with those who have not reported go all the others that they have."""
    return replace(
        settlement,
        holders=tuple(one for one in settlement.holders if one[0].node not in nodes),
        arrived=tuple(one for one in settlement.arrived if one[0].node not in nodes),
    )


def _take_report(draft: Draft, report: RankReport) -> None:
    state = draft.state
    assert isinstance(state, Reforming)
    if state.closing.settlement is not None or report.device in state.lost:
        return  # later reports of a settled generation change nothing
    closing = replace(
        state.closing,
        awaited=state.closing.awaited - {report.device},
        reports={**state.closing.reports, report.device: report},
    )
    draft.become(replace(state, closing=closing))
    doubt(draft, report)
    try_settle(draft)


def _link_fault(draft: Draft, report: RankReport) -> Fault:
    plan = draft.record.plans.get(report.generation)
    peer = report.lost_peer
    if plan is None or peer is None or peer >= plan.world_size:
        return Fault(
            cause=Cause.LINK_LOST,
            message=f"{report.device} left by itself: {report.cause}",
            at=draft.now,
            is_external=True,
        )
    suspect = plan.seats[peer].device
    return Fault(
        cause=Cause.LINK_LOST,
        message=f"the connection of {report.device} to rank {peer} on {suspect} broke",
        at=draft.now,
        devices=(suspect,),
        is_external=True,
    )
