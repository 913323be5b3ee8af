"""Balance while running: what ranks say of how fast they compute, and another share of the work where a device is slow.

reports ──> detection/straggler.py ──> who is slow ──> planner/rebalance.py ──> offers ──> recovery/balance.py ──> target

How the job gets to the other plan is what any change of plan does (joining.py): it stops between two steps, nobody joins.
What devices take is an observation, kept beside the record and learned anew by a new supervisor; who is slow is recorded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from heapq import nlargest, nsmallest
from statistics import median

from orchestrator.detection.straggler import KEPT, Seen, look, usual_of
from orchestrator.domain.balance import Rebalance, Remedy, Straggler
from orchestrator.domain.failure import Cause
from orchestrator.domain.host_events import StepsPassed
from orchestrator.domain.ids import Device
from orchestrator.domain.kinds import table
from orchestrator.domain.layout import layout, transfers
from orchestrator.domain.plan import Plan
from orchestrator.domain.state import Running
from orchestrator.planner.owning import with_shares
from orchestrator.planner.rebalance import compute_s, layer_bytes, room_of, with_other_ids, with_other_layers, with_spare
from orchestrator.recovery.balance import GAIN, MAX_CHANGES, Offer, choose, recent

from .draft import Draft
from .moving import why_move
from .speeds import slow_devices

FORGET_S = 3600.0
"""After which a device that was slow once has never been."""
LATELY = 4
"""Steps whose median is what a step takes now."""
SHOWN = 6
"""Steps after which it is known what a change came to."""
PAUSE_S = 0.2
"""Of a change in which nothing moves, before there was one."""
STATE_BYTES, MEMORY_BYTES_S = 12, 1e9
MAX_BUSY = 32
"""Ranks whose computing time a step tells of: steps are read by the ten thousand."""
PLANNED = frozenset({Cause.BALANCE, Cause.GROW, Cause.SHRINK})


def paces_seen(draft: Draft, said: StepsPassed) -> None:
    """Looked at once all that is new has been heard."""
    state = draft.state
    if isinstance(state, Running) and said.generation == state.generation:
        draft.paces.update(said.paces)


def balance(draft: Draft) -> None:
    """Once per kernel step."""
    state = draft.state
    if not isinstance(state, Running):
        return
    if not draft.paces:
        return  # nothing is known that was not known before
    _look(draft, state)
    if draft.record.rebalance is not None:
        _conclude(draft, state, draft.record.rebalance)
    elif _is_open_to_change(draft, state):
        _consider(draft, state)


# --- who is slow ---------------------------------------------------------------------------------------------------------


def _look(draft: Draft, state: Running) -> None:
    plan, record, now = state.plan, draft.record, draft.now
    spans = {seat.device: plan.stage_at(seat) for seat in plan.seats}
    reports = {
        device: Seen(seconds=seconds / (spans[device].last - spans[device].first), step=record.committed, at=now)
        for device, seconds in draft.paces.items()
        if device in spans
    }
    kinds = draft.kinds
    work = {device: f"{kinds.get(device.node, '')} {stage.first}-{stage.last}" for device, stage in spans.items()}
    draft.tracks, changed = look(draft.tracks, reports, work, state.generation, record.stragglers)
    there = draft.num_devices
    kept = {
        device: one
        for device, one in record.stragglers.items()
        if device.node in there and ((one.is_slow and device in spans) or 0 <= now - one.since < FORGET_S)
    }
    if changed or len(kept) != len(record.stragglers):
        draft.set(stragglers={**kept, **changed})
    if draft.steps and draft.steps[-1].generation == state.generation:
        draft.steps[-1] = replace(draft.steps[-1], busy=_busy(draft, plan))
    for device, straggler in sorted(changed.items()):
        _tell(draft, device, straggler)


def _busy(draft: Draft, plan: Plan) -> dict[Device, float]:
    """For how much of a step each rank computes, to four digits."""
    found = {
        device: track.seconds * (stage.last - stage.first) * len(pipeline.micro_batches)
        for pipeline in plan.pipelines
        for stage in pipeline.stages
        for device in stage.devices
        if (track := draft.tracks.get(device)) is not None and track.reports
    }
    told: Iterable[Device] = found
    if len(found) > MAX_BUSY:
        half, order = MAX_BUSY // 2, lambda device: (found[device], device)
        told = (*nsmallest(half, found, order), *nlargest(half, found, order))
    return {device: float(f"{found[device]:.4g}") for device in told}


def _tell(draft: Draft, device: Device, straggler: Straggler) -> None:
    now_s, usual_s = draft.tracks[device].seconds, straggler.usual_s
    said = f"{device} takes {now_s * 1e3:.3g} ms for a layer of a micro-batch"
    if straggler.is_slow:
        times = f"{straggler.factor:.2g} times the {usual_s * 1e3:.3g} ms that are usual"
        draft.say("straggler", f"{said}, {times}", device=str(device), factor=straggler.factor)
    else:
        draft.say("straggler_well", f"{said} again, {usual_s * 1e3:.3g} ms are usual", device=str(device))


# --- what is done about it -----------------------------------------------------------------------------------------------


def _is_open_to_change(draft: Draft, state: Running) -> bool:
    """It trains undisturbed, it is known how fast each device is, and that is not what its plan was made for."""
    record, plan = draft.record, state.plan
    slow = slow_devices(draft, plan)
    if (
        not (slow or record.is_rebalanced)
        or record.target
        or record.join
        or record.planning
        or record.looking
        or record.pause
    ):
        return False
    if record.failures or record.unreachable & set(plan.nodes) or why_move(draft, plan):
        return False
    if len(record.recent_step_s) < LATELY or (draft.incident and draft.incident.pause_s is None):
        return False
    if any((track := draft.tracks.get(device)) is not None and track.odd_since for device in slow):
        return False  # it may be well again, which is about to be known
    return all(
        (track := draft.tracks.get(device)) is not None
        and track.generation == state.generation
        and track.num_reports >= KEPT
        for device in plan.devices
    )


def _consider(draft: Draft, state: Running) -> None:
    record, plan = draft.record, state.plan
    changes = recent(record.rebalanced_at, draft.now)
    if len(changes) >= MAX_CHANGES:
        _tell_why_not(draft, plan, f"shares were changed {len(changes)} times within an hour")
        return
    speeds = _speeds(draft, plan)
    step_s = median(record.recent_step_s[-LATELY:])
    now_s = compute_s(plan, speeds)
    plans: dict[Remedy, Plan] = {}
    offers = []
    for remedy, other, its_speeds in _others(draft, plan, speeds):
        plans[remedy] = other
        gain_s = min(now_s - compute_s(other, its_speeds), step_s)
        # What moves is only counted where it could matter: in a large plan that takes longer than all the rest.
        pause_s = _pause_s(draft, remedy, plan, other) if gain_s >= GAIN * step_s else 0.0
        offers.append(Offer(remedy=remedy, gain_s=gain_s, pause_s=pause_s))
    chosen = choose(offers, step_s, record.spec.train.steps - record.committed)
    if chosen.taken is None:
        if not slow_devices(draft, plan):
            draft.set(is_rebalanced=False)
        _tell_why_not(draft, plan, "; ".join(chosen.why_not) or "no other share of whole ids and layers is better")
        return
    taken = chosen.taken
    expected_s = step_s - taken.gain_s
    why = f"{_why(draft, plan)}: {_shares(plan, plans[taken.remedy])}"
    target = replace(plans[taken.remedy], reason=why)
    change = Rebalance(
        remedy=taken.remedy, plan=target, why=why, before_s=step_s, expected_s=expected_s, pause_s=taken.pause_s
    )
    draft.set(
        target=target,
        spares={node: spare for node, spare in record.spares.items() if node not in target.nodes},
        rebalance=change,
        rebalanced_at=(*changes, draft.now),
        is_rebalanced=True,
    )
    others = f" Not taken: {'; '.join(chosen.why_not)}." if chosen.why_not else ""
    draft.say(
        "rebalancing",
        f"{why}; steps of {step_s:.3g} s are to take {expected_s:.3g} s, for a pause of {taken.pause_s:.2g} s.{others}",
        remedy=taken.remedy.value,
        before_s=step_s,
        expected_s=expected_s,
        predicted_pause_s=taken.pause_s,
    )


def _conclude(draft: Draft, state: Running, change: Rebalance) -> None:
    """What it came to, once that can be said; nothing where the job went elsewhere meanwhile."""
    record = draft.record
    if state.plan.pipelines != change.plan.pipelines:
        if record.target != change.plan:
            draft.set(rebalance=None)
        return
    if change.from_step is None:
        draft.set(rebalance=replace(change, from_step=record.committed))
        return
    passed = record.committed - change.from_step
    if passed < SHOWN or len(record.recent_step_s) < SHOWN - 1:
        return
    now_s = median(record.recent_step_s[-(SHOWN - 1) :])
    draft.set(rebalance=None)
    draft.say(
        "balanced",
        f"steps take {now_s:.3g} s, {change.expected_s:.3g} were expected, it was {change.before_s:.3g}: {change.why}",
        remedy=change.remedy.value,
        step_s=now_s,
        expected_s=change.expected_s,
        before_s=change.before_s,
    )


def _tell_why_not(draft: Draft, plan: Plan, why: str) -> None:
    """Once for what has been found since."""
    news = [one.since for device, one in draft.record.stragglers.items() if one.is_slow and device in plan.seat_of]
    if news and max(news) > draft.record.balance_told_at:
        draft.set(balance_told_at=draft.now)
        draft.say("not_rebalanced", f"{_why(draft, plan)}, and everything stays as it is: {why}")


def _speeds(draft: Draft, plan: Plan) -> dict[Device, float]:
    """What slow devices take, and what is usual of all others: their differences are noise."""
    record, tracks = draft.record, draft.tracks
    usual = {work: median(found.values()) for work, found in usual_of(tracks, record.stragglers).items()}
    slow = slow_devices(draft, plan)
    return {
        device: tracks[device].seconds if device in slow else usual.get(tracks[device].work, tracks[device].seconds)
        for device in plan.devices
    }


def _others(draft: Draft, plan: Plan, speeds: Mapping[Device, float]) -> list[tuple[Remedy, Plan, Mapping[Device, float]]]:
    """Other plans in the order in which they are tried, and how fast their devices are expected to be."""
    record = draft.record
    assert record.profile is not None
    found = [(Remedy.IDS, with_other_ids(plan, speeds))]
    if plan.pp > 1:
        kinds = draft.kinds
        known = table(draft.rows)
        room = {device: room_of(kinds.get(device.node, ""), known) for device in plan.devices}
        each = layer_bytes(record.profile, record.spec, plan)
        cut = with_other_layers(plan, speeds, room, each)
        if cut is not None and any(stage.shares for pipeline in plan.pipelines for stage in pipeline.stages):
            named = {device: kinds.get(device.node, "") for device in plan.devices}
            cut = with_shares(cut, record.spec, record.profile, named, table=known)
        found.append((Remedy.LAYERS, cut))
    others = [(remedy, other, speeds) for remedy, other in found if other is not None]
    return [*others, *_with_spare(draft, plan, speeds)]


def _with_spare(
    draft: Draft, plan: Plan, speeds: Mapping[Device, float]
) -> list[tuple[Remedy, Plan, Mapping[Device, float]]]:
    """A spare of its kind, all of whose devices are well, for the node that has the slowest device."""
    record, kinds = draft.record, draft.kinds
    slow = sorted(slow_devices(draft, plan), key=lambda device: (-record.stragglers[device].factor, device))
    if not slow:
        return []
    left = slow[0].node
    seats = sorted(plan.by_node[left])
    suspects = {device.node for device in record.stragglers}
    for node, spare in sorted(record.spares.items()):
        is_fit = spare.is_ready and node not in record.unreachable and node not in suspects
        if is_fit and kinds.get(node) == kinds.get(left) and len(spare.devices) >= len(seats):
            taken = dict(zip(seats, sorted(spare.devices), strict=False))
            usual = {
                taken[device]: record.stragglers[device].usual_s if device in slow else speeds[device] for device in seats
            }
            its_speeds = {**speeds, **usual}
            domains = {node: spare.domain} if spare.domain else {}
            return [(Remedy.SPARE, with_spare(plan, taken, its_speeds, domains), its_speeds)]
    return []


def _pause_s(draft: Draft, remedy: Remedy, plan: Plan, other: Plan) -> float:
    record = draft.record
    assert record.profile is not None
    known = [one.pause_s for one in record.incidents if one.fault.cause in PLANNED and one.pause_s is not None]
    pause_s = median(known[-5:]) if known else PAUSE_S
    if remedy is Remedy.IDS:
        return pause_s
    mirrors = record.spec.recovery.mirrors
    held = layout(plan, record.profile, mirrors=mirrors)
    moves = transfers({d: held.held(d) for d in plan.devices}, layout(other, record.profile, mirrors=mirrors)).moves
    moved = sum(len(move.interval) for move in moves if move.source != move.target)
    return pause_s + moved * STATE_BYTES / MEMORY_BYTES_S


# --- words ---------------------------------------------------------------------------------------------------------------


def _why(draft: Draft, plan: Plan) -> str:
    found = draft.record.stragglers
    slow = [
        f"{device} takes {draft.tracks[device].seconds / found[device].usual_s:.2g} times as long as usual"
        for device in sorted(slow_devices(draft, plan))
    ]
    return ", ".join(slow) or "all devices are as fast as usual again"


def _shares(plan: Plan, other: Plan) -> str:
    said = []
    if came := sorted(set(other.nodes) - set(plan.nodes)):
        said.append(f"{', '.join(came)} takes the place of {', '.join(sorted(set(plan.nodes) - set(other.nodes)))}")
    for before, after in zip(plan.pipelines, other.pipelines, strict=True):
        where = "+".join(str(stage.devices[0]) for stage in after.stages)
        cuts = [stage.last - stage.first for stage in after.stages]
        if cuts != [stage.last - stage.first for stage in before.stages]:
            said.append(f"{where} take {'+'.join(map(str, cuts))} layers")
        if len(before.micro_batches) != len(after.micro_batches):
            said.append(f"{where} {len(after.micro_batches)} micro-batches instead of {len(before.micro_batches)}")
    return ", ".join(said)
