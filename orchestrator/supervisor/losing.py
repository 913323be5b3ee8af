"""A rank's process or a host is gone: whatever runs is closed, and what closes or forms already goes on without it.

It owns telling a loss that ends a generation from one that only takes a reporter or a seat away from what is under way. It
refuses to know how it was noticed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from orchestrator.domain.failure import Cause, Fault
from orchestrator.domain.generation import RankReport
from orchestrator.domain.host_events import RankExited
from orchestrator.domain.ids import Device, NodeId
from orchestrator.domain.requests import CloseHost
from orchestrator.domain.state import Queued, Reforming, Running, Starting

from .charging import charge, recharge
from .doubting import accuse, found_fault
from .draft import Draft
from .forming import at_work, current_forming, prepare_again
from .laddering import climb
from .reforming import begin_reform
from .settling import try_settle


def rank_exited(draft: Draft, exited: RankExited, fault: Fault) -> None:
    """A rank's process is gone and its host lives."""
    device, gone, said = exited.device, frozenset({exited.device}), {exited.device: exited.report}
    draft.forget_rank(device)
    if at_it := at_work(draft):
        fault = found_fault(draft, exited.report, at_it[0]) or fault
    state = draft.state
    if isinstance(state, Running):
        if device in state.plan.seat_of:
            begin_reform(draft, fault, lost=gone, reports=said, exited=exited)
    elif isinstance(state, Starting):
        if state.forming.formed:
            begin_reform(draft, fault, lost=gone, reports=said, exited=exited)
        else:
            _fork_again(draft, exited, fault)
    elif isinstance(state, Reforming):
        _explain(draft, fault, gone, exited)
        if isinstance(draft.state, Reforming) and not _lose(draft, gone, said, fault, exited):
            doubt(draft, exited.report)
            _fork_again(draft, exited, fault)
            try_settle(draft)


def end_explained(draft: Draft, exited: RankExited, fault: Fault) -> None:
    """How a rank ended whose end was acted on already."""
    incident, state, known = draft.incident, draft.state, fault
    if incident is not None and incident.fault.cause is Cause.LINK_LOST and exited.device in incident.fault.devices:
        known = replace(fault, at=min(fault.at, incident.fault.at))
        draft.update_incident(fault=known)
        if isinstance(state, Reforming) and state.fault == incident.fault:
            draft.become(replace(state, fault=known))
    elif not fault.signature:
        return  # what is known already explains it
    recharge(draft, known, exited.report.generation, exited)


def host_lost(draft: Draft, node: NodeId, fault: Fault, is_gone: bool = True) -> None:
    """A host's process is known to have ended, and its ranks with it; or it is given up, and closed once reached."""
    if not isinstance(draft.state, Queued | Running | Starting | Reforming):
        return  # the job ended with an earlier one
    processes = {*draft.record.pids, *draft.record.ending}
    had = frozenset(device for device in processes if device.node == node) - draft.spare_devices
    if node in draft.record.spares:
        draft.say("spare_lost", f"{node} stood by and is lost: {fault.message}", node=node)
    if not is_gone or node not in draft.record.warm:
        draft.set(avoided=draft.record.avoided | {node})
    draft.forget_processes(node)
    if is_gone:
        draft.set(hosts=draft.record.hosts - {node})
    else:
        draft.call(node, CloseHost())
    state = draft.state
    if isinstance(state, Running) and node in state.plan.nodes:
        begin_reform(draft, fault, lost=frozenset(d for d in state.plan.devices if d.node == node))
    elif isinstance(state, Starting) and node in state.forming.plan.nodes:
        begin_reform(draft, fault, lost=frozenset(d for d in state.forming.plan.devices if d.node == node))
    elif isinstance(state, Reforming):
        gone = had | {d for d in state.closing.awaited if d.node == node}
        _explain(draft, fault, gone)
        if isinstance(draft.state, Reforming) and not _lose(draft, gone, {}, fault):
            _drop_plan_on(draft, node)
            try_settle(draft)
    if draft.record.target and node in draft.record.target.nodes:
        # What else there is may do without it, and it may be tried again.
        draft.set(target=None, considered=frozenset())


def doubt(draft: Draft, report: RankReport) -> None:
    """A rank of the generation that closes found worse than why it closes: nothing may be formed on those devices."""
    state = draft.state
    assert isinstance(state, Reforming)
    fault = found_fault(draft, report, state.closing.generation)
    if state.closing.settlement is not None or fault is None or fault.cause is not Cause.CORRUPTION:
        return
    if state.fault.cause is not Cause.CORRUPTION:
        known = replace(fault, at=min(fault.at, state.fault.at))
        draft.become(replace(state, fault=known))
        draft.update_incident(fault=known)
    if accuse(draft, fault, state.closing.generation):
        for device in fault.devices:
            _drop_plan_on(draft, device.node)


def _fork_again(draft: Draft, exited: RankExited, fault: Fault) -> None:
    """A seat of a generation that is not formed yet lost its process. That is charged where it was made for it."""
    forming = current_forming(draft)
    if forming is None or forming.formed or exited.device not in forming.plan.seat_of:
        return
    if exited.report.generation < forming.generation or not charge(
        draft, fault, forming.generation, was_formed=False, exited=exited
    ):
        prepare_again(draft, exited.device)


def _explain(draft: Draft, fault: Fault, devices: frozenset[Device], exited: RankExited | None = None) -> None:
    """Survivors felt it before anybody said why: now it is known. Stops the job where that is one too many."""
    state = draft.state
    assert isinstance(state, Reforming)
    felt, generation = state.fault, state.closing.generation
    if felt.cause is Cause.LINK_LOST and (not felt.devices or devices & set(felt.devices)):
        known = replace(fault, at=min(fault.at, felt.at))
        draft.become(replace(state, fault=known))
        draft.update_incident(fault=known)
        recharge(draft, known, generation, exited)
    elif fault.signature and exited is not None and exited.report.generation == generation:
        recharge(draft, fault, generation, exited)  # what was felt first was only a consequence


def _lose(
    draft: Draft,
    devices: frozenset[Device],
    reports: Mapping[Device, RankReport],
    fault: Fault,
    exited: RankExited | None = None,
) -> bool:
    """More of them are gone: a second failure closes a formed successor too (True); an unformed one goes on forming."""
    state = draft.state
    assert isinstance(state, Reforming)
    if state.forming and state.forming.formed and devices & set(state.forming.addresses):
        begin_reform(draft, fault, lost=devices, reports=reports, exited=exited)
        return True
    said = {d: r for d, r in reports.items() if r.generation == state.closing.generation}
    closing = replace(state.closing, awaited=state.closing.awaited - devices, reports={**said, **state.closing.reports})
    draft.become(replace(state, closing=closing, lost=state.lost | devices))
    return False


def _drop_plan_on(draft: Draft, node: NodeId) -> None:
    state = draft.state
    if not isinstance(state, Reforming) or state.forming is None or state.forming.formed:
        return
    if node in state.forming.plan.nodes:
        plan = state.forming.plan
        draft.become(replace(state, forming=None))
        draft.set(considered=frozenset())
        climb(draft, plan)
