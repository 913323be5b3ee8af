"""What other devices are worth to a running job, by the planner's own step times, fast enough to be asked in the middle of
a recovery.

    devices alike    the rectangular plan they would get, against the one that runs
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

from .choose import cost_of, least_cost
from .constants import Constants
from .job import ask_of
from .machines import of_devices
from .mixed import is_mixed
from .pipelines import layer_times
from .rebalance import compute_s

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
    if is_mixed(request):
        layer_s = _layer_s(request, [*these, *plan.devices], plan.tp)
        return sum(1 / layer_s[device] for device in these) / sum(1 / layer_s[device] for device in plan.devices)
    if len(these) > MAX_PLANNED:
        return len(these) / plan.world_size
    found = least_cost(replace(request, devices=tuple((device, kinds[device]) for device in these)))
    return None if found is None else cost_of(request, plan) / found


def replaced(request: ChoosePlan, plan: Plan, other: Plan) -> float:
    """Steps a second of `other`, over those of `plan`, by what computing takes; 1 on devices alike."""
    if not is_mixed(request):
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
