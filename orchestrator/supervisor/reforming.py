"""A generation ends: it is closed, everybody reports once, the answer is recorded; the next is planned meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from orchestrator.detection.classify import host_fault
from orchestrator.domain.generation import Answer, RankReport
from orchestrator.domain.ids import Device, Generation, NodeId
from orchestrator.domain.job import Cause, Closing, Fault, Incident, Queued, Reforming, Running, Starting
from orchestrator.domain.plan import Plan
from orchestrator.domain.protocol import CloseGeneration, CloseHost, EndJoin, KillRank, RankExited
from orchestrator.recovery.settle import settle

from .charging import charge, recharge
from .doubting import accuse, found_fault
from .draft import Draft
from .forming import at_work, begin_forming, current_forming, loses_steps, prepare_again, try_form
from .laddering import climb
from .training import record_step

MAX_STUCK = 2
"""Threads of a process that may be stuck in transfers before it is replaced at the first opportunity."""


def begin_reform(
    draft: Draft,
    fault: Fault,
    *,
    lost: frozenset[Device] = frozenset(),
    reports: Mapping[Device, RankReport] | None = None,
    target: Plan | None = None,
    exited: RankExited | None = None,
) -> None:
    """Close what runs or forms now. `lost` have no process any more; `target`: the next plan where it is known already.

    exited: the end of a rank that is the reason, for the verdict where it is one too many.
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
    newcomers = _newcomers(draft) if target is not None else frozenset()
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
    draft.set(saving={}, target=None, considered=frozenset(), looking=None)
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


def _prepared(draft: Draft) -> frozenset[Device]:
    """Whose processes were made for a join: of a generation that ends otherwise they know nothing, and nobody asks them."""
    state, join = draft.state, draft.record.join
    return frozenset(join.addresses) - set(state.plan.devices) if join and isinstance(state, Running) else frozenset()


def _choose_next(draft: Draft, plan: Plan, target: Plan | None) -> None:
    if target is not None:
        begin_forming(draft, target)
    else:
        climb(draft, plan)


# --- while it closes -----------------------------------------------------------------------------------------------------


def rank_reported(draft: Draft, report: RankReport) -> None:
    """A survivor left. In a running generation that is news: somebody it talked to is gone."""
    state = draft.state
    if isinstance(state, Reforming) and report.generation == state.closing.generation:
        _take_report(draft, report)
    elif report.stopped and isinstance(state, Running) and report.generation == state.generation:
        join = draft.record.join
        why = f"a larger plan is ready: {join.plan.describe()}" if join else "stopped for a plan that is there no longer"
        fault = Fault(cause=Cause.GROW, message=why, at=draft.now)
        begin_reform(draft, fault, reports={report.device: report}, target=join.plan if join else None)
    elif (at_it := at_work(draft)) and at_it[0] == report.generation:
        fault = found_fault(draft, report, at_it[0]) or _link_fault(draft, report)
        begin_reform(draft, fault, reports={report.device: report})
    for node in sorted(suspects(draft) & draft.record.unreachable):
        host_lost(draft, node, host_fault(node, "silent, and connections to its ranks broke", draft.now), False)


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
            _doubt(draft, exited.report)
            _fork_again(draft, exited, fault)
            try_settle(draft)


def _fork_again(draft: Draft, exited: RankExited, fault: Fault) -> None:
    """A seat of a generation that is not formed yet lost its process. That is charged where it was made for it."""
    forming = current_forming(draft)
    if forming is None or forming.formed or exited.device not in forming.plan.seat_of:
        return
    if exited.report.generation < forming.generation or not charge(
        draft, fault, forming.generation, was_formed=False, exited=exited
    ):
        prepare_again(draft, exited.device)


def host_lost(draft: Draft, node: NodeId, fault: Fault, is_gone: bool = True) -> None:
    """A host's process is known to have ended, and its ranks with it; or it is given up, and closed once reached."""
    if not isinstance(draft.state, Queued | Running | Starting | Reforming):
        return  # the job ended with an earlier one
    had = frozenset(device for device in draft.record.pids if device.node == node) - draft.spare_devices
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
        draft.set(target=None)


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


def _doubt(draft: Draft, report: RankReport) -> None:
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
    _doubt(draft, report)
    try_settle(draft)


def try_settle(draft: Draft) -> None:
    """Record the answer once everybody has reported or is known to be gone."""
    state = draft.state
    if not isinstance(state, Reforming) or state.closing.awaited or state.closing.settlement:
        return
    record = draft.record
    settlement = settle(state.closing.generation, record.committed, record.last_answer, state.closing.reports)
    if settlement.answer and settlement.step > record.committed:
        _record_unreported(draft, settlement.generation, settlement.answer)
    draft.become(replace(state, closing=replace(state.closing, settlement=settlement)))
    incident = draft.incident
    if incident and incident.closed_at:
        draft.update_incident(phases={"settle": max(0.0, draft.now - incident.closed_at)}, closed_at=draft.now)
    _retire_worn(draft)
    held = {generation for _, generation in settlement.holders}
    forming = draft.state.forming.generation if isinstance(draft.state, Reforming) and draft.state.forming else None
    draft.set(plans={g: p for g, p in record.plans.items() if g in held or g == forming})
    draft.say(
        "settled",
        f"generation {settlement.generation} had committed step {settlement.step}; {len(settlement.holders)} ranks hold it",
        step=settlement.step,
    )
    try_form(draft)


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
    bearable = 0 if state.fault.cause in (Cause.GROW, Cause.SHRINK) else MAX_STUCK
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


def _record_unreported(draft: Draft, generation: Generation, answer: Answer) -> None:
    record_step(draft, generation, answer, draft.now)


def ask_for_patience(draft: Draft) -> None:
    """The deadline for reports ran out. Silent hosts are given up, unless that would cost committed steps."""
    state = draft.state
    assert isinstance(state, Reforming)
    record = draft.record
    found = settle(state.closing.generation, record.committed, record.last_answer, state.closing.reports)
    if not loses_steps(draft, found):
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


# --- evidence ------------------------------------------------------------------------------------------------------------


def suspects(draft: Draft) -> frozenset[NodeId]:
    """Nodes to whose ranks a survivor's connection broke: positive evidence, where the node does not answer either."""
    state = draft.state
    if not isinstance(state, Reforming):
        return frozenset()
    plan = draft.record.plans.get(state.closing.generation)
    lost = {report.lost_peer for report in state.closing.reports.values() if report.lost_peer is not None}
    return frozenset(plan.seats[rank].device.node for rank in lost if rank < plan.world_size) if plan else frozenset()


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
