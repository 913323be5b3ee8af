"""What devices a job wants: when a plan is asked for, what becomes of the answer, and moving to a larger one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from orchestrator.domain.cluster import Node, NodeStatus
from orchestrator.domain.effects import ChoosePlan
from orchestrator.domain.events import PlanChosen
from orchestrator.domain.ids import Device, NodeId
from orchestrator.domain.plan import Infeasible, Plan
from orchestrator.domain.rungs import Rung
from orchestrator.domain.state import PLANNING, Failed, Queued, Reforming, Running
from orchestrator.jobs.arbitration import Allotment
from orchestrator.planner.strength import replaced
from orchestrator.recovery.balance import GAIN
from orchestrator.recovery.ladder import HORIZON_S

from .draft import Draft
from .forming import begin_forming, open_host
from .joining import advance_join, drop_join
from .laddering import nothing_fits, planned
from .moving import cannot_move, why_move
from .sparing import reserved, stand_ins
from .speeds import about, slow_nodes, stage_times
from .stopping import stop

IN_THE_QUEUE = "it waits in the queue for devices that others hold"


def plan_chosen(draft: Draft, chosen: PlanChosen) -> None:
    if not draft.record.planning or chosen.generation != draft.next_generation():
        return
    usable = draft.usable  # while it is planned for: what it is offered counts as declined once no plan is awaited
    draft.set(planning=False)
    state, result = draft.state, chosen.result
    whether = draft.record.turn.asks_whether
    _learn(draft, result)
    if whether and isinstance(result, Plan):
        if isinstance(state, Queued):
            draft.become(Queued(reason=IN_THE_QUEUE))  # it waits for what others hold
        return
    if isinstance(result, Infeasible):
        if draft.record.barred and not isinstance(state, Running):
            draft.set(barred=frozenset(), considered=frozenset())  # a node with a bad link is better than none
        if isinstance(state, Queued):
            if result.forever:
                stop(draft, Failed(at=draft.now, message=result.reason))
            elif state.reason != result.reason:
                draft.become(Queued(reason=result.reason))
                draft.say("queued", result.reason)
        elif isinstance(state, Running):
            if why := why_move(draft, state.plan):
                cannot_move(draft, why, result.reason)
        elif isinstance(state, Reforming) and state.forming is None and state.waiting != result.reason:
            draft.become(replace(state, waiting=result.reason))
            draft.say("waiting", f"{result.reason}; survivors keep step {draft.record.committed} in memory")
            if not {d for d in draft.usable if d.node not in draft.record.avoided} - draft.record.considered:
                nothing_fits(draft)
        return
    if not usable >= set(result.devices) or draft.record.avoided & set(result.nodes):
        draft.set(considered=frozenset())  # the cluster changed meanwhile: ask again
        return
    if isinstance(state, Queued) or (isinstance(state, Reforming) and state.forming is None):
        planned(draft, result)
        begin_forming(draft, result)
    elif isinstance(state, Running) and (
        why := why_move(draft, state.plan) or _why_better(draft, draft.record.target or state.plan, result)
    ):
        _warm_up_to(draft, result, why)


def _why_better(draft: Draft, plan: Plan, other: Plan) -> str:
    """Why the other plan is worth a pause, in words; "" where it is not. Of several kinds fewer devices may be faster."""
    if other.world_size > plan.world_size:
        return "new devices"
    request = about(draft, (*plan.devices, *other.devices))
    times = 1.0 if request is None else replaced(request, plan, other)
    return f"steps take {1 - 1 / times:.0%} less on other devices" if times >= 1 + GAIN else ""


def _learn(draft: Draft, result: Plan | Infeasible) -> None:
    """What an answer says of sizes, for the arbiter: on so many devices the job fits or does not."""
    turn, state = draft.record.turn, draft.state
    draft.turn(asks_whether=False)
    if turn.asked >= draft.everything:
        draft.turn(judged=turn.asked, infeasible=result.reason if isinstance(result, Infeasible) else "")
    core = set(state.plan.devices) if isinstance(state, Running) else set()
    yields = bool(turn.yields & core)
    if isinstance(result, Infeasible) and not turn.asks_whether and (yields or not isinstance(state, Running)):
        draft.turn(floor=max(turn.floor, len(turn.asked) + 1, len(core - turn.yields) + 1))


def _warm_up_to(draft: Draft, plan: Plan, why: str) -> None:
    """Train on while the hosts of another plan start; the next generation begins when they are warm."""
    assert isinstance(draft.state, Running)
    idle = {node: spare for node, spare in draft.record.spares.items() if node not in plan.nodes}
    draft.set(target=plan, spares=idle)
    kind = "growing" if plan.world_size > draft.state.plan.world_size else "moving"
    draft.say(kind, f"{why}: {plan.describe()} next; its hosts are warmed while training goes on")
    for node in plan.nodes:
        open_host(draft, node)


def want_devices(draft: Draft, nodes: Mapping[NodeId, Node], allotment: Allotment | None) -> None:
    """Ask for a plan where one could be better than what there is, and move to a larger one that is ready.

    One that waits in the queue asks once what has all it starts with, and before that whether the cluster could hold it.
    """
    lost = draft.record.avoided - draft.num_devices.keys()
    if lost:  # should they come back, they are new machines
        draft.set(avoided=draft.record.avoided - lost)
    _grow_if_warm(draft)
    record, state = draft.record, draft.state
    if record.profile is None or record.planning or not isinstance(draft.state, Queued | Running | Reforming):
        return
    if isinstance(state, Queued) and draft.awaits_nodes:
        return  # a moment more, and it need not begin small and grow
    if isinstance(state, Queued) and (allotment is None or allotment.wait is not None):
        _ask_whether(draft, nodes)
        return
    usable = draft.usable
    trusted = frozenset(device for device in usable if device.node not in record.avoided)
    # What it declined is offered to others: were that forgotten as soon as they have it, it would be offered back at once,
    # and two jobs would ask for plans with it in turn for ever (simulated seed 421).
    gone = record.considered - usable
    if gone and (gone := gone - draft.everything):
        draft.set(considered=record.considered - gone)
    considered = draft.record.considered
    match draft.state:
        case Queued():
            if allotment is None or not allotment.minimum <= usable:
                return  # others are still leaving it
            if trusted <= considered:
                _ask_whether(draft, nodes)
                return
            options = [trusted - reserved(draft, nodes, trusted), trusted]
        case Running(plan=plan):
            must = bool(why_move(draft, plan))
            considered = considered if must else considered | set(plan.devices)
            # Machines that come one after another are warmed together, until newcomers are being given their state.
            # One larger plan once all tests have ended, not one after each; and while a part of this one cannot be reached,
            # whatever were planned from the rest would be no larger.
            waits = record.join is not None or draft.ward.awaits_tests or draft.awaits_nodes or _is_silent(plan, nodes)
            waits = waits or (must and record.target is not None) or record.pause is not None
            draining = draft.draining
            leaving = frozenset(device for device in trusted if device.node in draining)
            kept = draft.spare_devices - stand_ins(draft, plan)
            options = [] if waits else [trusted - kept - leaving]
        case Reforming(forming=None):
            options = [draft.warm_devices(trusted), trusted]  # what is warm takes a blink, what is not takes seconds
            if draft.incident and draft.incident.rung is Rung.REPLAN_ALL:
                options = [trusted]
        case _:
            return
    grows = isinstance(draft.state, Running)
    for devices in options:
        # Parts of the cluster that were offered one after another may be worth something together.
        is_more = grows and len(devices) > len(record.turn.asked)
        if devices - considered or is_more or (isinstance(state, Queued) and state.reason == PLANNING):
            # Of one that does not train, what is not here now was not asked about together with these.
            draft.set(considered=(considered if grows else considered & usable) | devices)
            _ask(draft, nodes, devices)
            return


def _ask_whether(draft: Draft, nodes: Mapping[NodeId, Node]) -> None:
    """Nothing is free for it: could the cluster hold it at all?"""
    state, turn, everything = draft.state, draft.record.turn, draft.everything
    if everything - turn.judged or (isinstance(state, Queued) and state.reason == PLANNING):
        draft.turn(infeasible="", floor=0 if turn.infeasible else turn.floor)
        _ask(draft, nodes, everything, whether=True)


def _ask(draft: Draft, nodes: Mapping[NodeId, Node], devices: frozenset[Device], *, whether: bool = False) -> None:
    """whether: only to know if there is a plan, which others' devices are in. A question that a pause cut short is over."""
    record = draft.record
    assert record.profile is not None
    speeds = slow_nodes(draft)
    draft.set(planning=True)
    draft.turn(asked=devices, asks_whether=whether)
    if speeds:
        draft.set(is_rebalanced=True)
    here = sorted({device.node for device in devices})
    running, its_kinds = _broken(draft)
    draft.emit(
        ChoosePlan(
            job=record.id,
            generation=draft.next_generation(),
            spec=record.sized_spec,
            profile=record.profile,
            devices=tuple((device, nodes[device.node].kind) for device in sorted(devices)),
            keep=tuple(sorted(set(record.pids) - draft.spare_devices)),
            domains={node: domain for node in here if (domain := nodes[node].domain)},
            running=running,
            lost=its_kinds,
            speeds=speeds,
            measured=stage_times(draft),
            rows=draft.rows,
            horizon_steps=HORIZON_S / (record.typical_step_s or 1.0) if running else 0.0,
        )
    )


def _broken(draft: Draft) -> tuple[Plan | None, tuple[tuple[Device, str], ...]]:
    """The plan that a fault has broken, and its devices with their kinds; none where a kind is not known any more."""
    state, kinds = draft.state, draft.kinds
    plan = draft.record.plans.get(state.closing.generation) if isinstance(state, Reforming) else None
    if plan is None or not set(plan.nodes) <= set(kinds):
        return None, ()
    return plan, tuple((device, kinds[device.node]) for device in plan.devices)


def _is_silent(plan: Plan, nodes: Mapping[NodeId, Node]) -> bool:
    return any(nodes[node].status is NodeStatus.UNREACHABLE for node in plan.nodes if node in nodes)


def _grow_if_warm(draft: Draft) -> None:
    record, state = draft.record, draft.state
    if record.target is None and record.join is not None:
        drop_join(draft)
    if record.target is None or not isinstance(state, Running):
        return
    needed = {*state.plan.nodes, *record.target.nodes}
    if not set(record.target.nodes) <= set(draft.num_devices):
        draft.set(target=None, considered=frozenset())  # the rest of it is still there
        drop_join(draft)
    elif record.planning or not draft.usable >= set(record.target.devices):
        return  # a larger one is being made, or a part of this one is silent just now
    elif record.warm >= needed and not record.unreachable & needed:  # what trains is never closed for one that cannot form
        advance_join(draft)
