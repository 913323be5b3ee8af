"""How fast devices have been seen to be, for whoever plans anew or prices what another plan would be worth."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from statistics import median

from orchestrator.detection.straggler import KEPT
from orchestrator.domain.balance import StageTime
from orchestrator.domain.effects import ChoosePlan
from orchestrator.domain.ids import Device, NodeId
from orchestrator.domain.plan import Plan
from orchestrator.domain.state import Reforming, Running

from .draft import Draft


def slow_devices(draft: Draft, plan: Plan) -> frozenset[Device]:
    found = draft.record.stragglers
    return frozenset(device for device, one in found.items() if one.is_slow and device in plan.seat_of)


def slow_nodes(draft: Draft) -> dict[NodeId, float]:
    """What nodes with slow devices reach of what they should, for whoever plans anew."""
    found = {device: one.factor for device, one in draft.record.stragglers.items() if one.is_slow}
    sizes = draft.num_devices
    return {
        node: sum(1 / found.get(Device(node, index), 1.0) for index in range(sizes[node])) / sizes[node]
        for node in sorted({device.node for device in found} & set(sizes))
    }


def about(draft: Draft, devices: Iterable[Device]) -> ChoosePlan | None:
    """A question about these devices, for whoever prices plans by what is known of them (planner/strength.py). None where
    a device's node is gone for good: its kind is not known any more.
    """
    record, kinds, named = draft.record, draft.kinds, sorted(set(devices))
    if record.profile is None or any(device.node not in kinds for device in named):
        return None
    return ChoosePlan(
        job=record.id,
        generation=draft.next_generation(),
        spec=record.sized_spec,
        profile=record.profile,
        devices=tuple((device, kinds[device.node]) for device in named),
        speeds=slow_nodes(draft),
        measured=stage_times(draft),
        rows=draft.rows,
    )


def stage_times(draft: Draft) -> tuple[StageTime, ...]:
    """What stages of the plan that trains, or that a fault has ended, were seen to take, by kind."""
    state, kinds = draft.state, draft.kinds
    if isinstance(state, Running):
        generation, plan = state.generation, state.plan
    elif isinstance(state, Reforming) and (before := draft.record.plans.get(state.closing.generation)):
        generation, plan = state.closing.generation, before
    else:
        return ()
    slow = slow_devices(draft, plan)
    found: dict[tuple[str, int, int], list[float]] = defaultdict(list)
    for seat in plan.seats:
        track, stage = draft.tracks.get(seat.device), plan.stage_at(seat)
        is_known = track is not None and track.generation == generation and track.num_reports >= KEPT
        if track is not None and is_known and seat.device not in slow and seat.device.node in kinds:
            found[kinds[seat.device.node], stage.first, stage.last].append(track.seconds)
    return tuple(
        StageTime(kind=kind, tp=plan.tp, first=first, last=last, seconds=median(each) * (last - first))
        for (kind, first, last), each in sorted(found.items())
    )
