"""What other devices are worth to a running job, by the planner's own step times, fast enough to be asked in the middle of
a recovery.

    devices alike    the rectangular plan they would get, against the one that runs, or would on its devices
    several kinds    the rate at which they compute together, measured or predicted, against the running plan's
    another plan     the pipeline that ends last: with others in some of its places, or of another shape
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from orchestrator.domain.effects import ChoosePlan
from orchestrator.domain.ids import Device
from orchestrator.domain.kinds import row_of
from orchestrator.domain.plan import Plan

from .constants import Constants
from .job import ask_of
from .machines import of_devices
from .pipelines import layer_times
from .rebalance import compute_s
from .rectangular import cost_of, least_cost
from .searched import is_searched

MAX_PLANNED = 64
"""Devices up to which a rectangular plan is looked at; of more, each counts alike."""


def throughput(request: ChoosePlan, devices: Iterable[Device], plan: Plan) -> float | None:
    """Steps a second that a plan on `devices` would make, over those of `plan`; None where no plan fits them.

    request: names the kinds of all these devices, among its own or its lost ones, and what is known of their speeds.
    """
    kinds = {**dict(request.lost), **dict(request.devices)}
    these = sorted(set(devices) & set(kinds))
    if not these:
        return None
    if is_searched(request) and (bool(request.speeds) or len(set(kinds.values())) > 1):
        layer_s = _layer_s(request, [*these, *plan.devices], plan.tp)
        return sum(1 / layer_s[device] for device in these) / sum(1 / layer_s[device] for device in plan.devices)
    if len(these) > MAX_PLANNED:
        return len(these) / plan.world_size

    def least(devices: Iterable[Device]) -> float | None:
        return least_cost(replace(request, devices=tuple((device, kinds[device]) for device in devices)))

    found = least(these)
    if found is None:
        return None
    now = least(plan.devices) if is_searched(request) and set(plan.devices) <= set(kinds) else None
    # What the search found is no worse than a rectangle on its devices, and what it will find none either.
    return (cost_of(request, plan) if now is None else now) / found


def replaced(request: ChoosePlan, plan: Plan, other: Plan) -> float:
    """Steps a second of `other`, over those of `plan`, by what computing takes; 1 on devices alike."""
    if not is_searched(request):
        return 1.0
    layer_s = _layer_s(request, [*plan.devices, *other.devices], plan.tp)
    return compute_s(plan, layer_s) / compute_s(other, layer_s)


def _layer_s(request: ChoosePlan, devices: Iterable[Device], tp: int) -> dict[Device, float]:
    """Seconds of a layer and a micro-batch, of a middling one."""
    kinds = {**dict(request.lost), **dict(request.devices)}
    train = request.spec.train
    here = {device: kinds.get(device, "cpu") for device in devices}
    ask = ask_of(
        request.spec, request.profile, of_devices(here.items(), request.table), seen=request.measured, kinds=request.table
    )
    known = {}
    for name in sorted(set(here.values())):
        kind = row_of(name, request.table)
        times = layer_times(
            ask.model, kind, tp, train.micro_batch_size, train.activation_checkpointing, Constants(), ask.measured
        )
        known[name] = sum(time.total for time in times) / len(times)
    return {device: known[kind] / request.speeds.get(device.node, 1.0) for device, kind in here.items()}
