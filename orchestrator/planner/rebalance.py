"""The running plan with its work shared out anew, by how fast its devices have been measured to be.

Pipelines take other numbers of micro-batches, or a pipeline's stages other layers as well. Both are exact: ids by
water-filling over whole ids, layers by the split whose slowest stage is fastest. Or who stands by takes somebody's place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from orchestrator.domain.ids import Device, NodeId
from orchestrator.domain.kinds import KINDS, Kinds, row_of
from orchestrator.domain.plan import Pipeline, Plan, Stage
from orchestrator.domain.profile import Profile
from orchestrator.domain.spec import JobSpec

from .memory import context, usable
from .shares import Pace, share_ids
from .split import exact_split

Speeds = Mapping[Device, float]
"""Seconds that a device takes for a layer of a micro-batch, both ways."""


def compute_s(plan: Plan, speeds: Speeds) -> float:
    """Of a step: the pipeline that ends last; updates and all that waits for everybody are not in it."""
    return max(_ends_at(pipeline, speeds) for pipeline in plan.pipelines)


def with_other_ids(plan: Plan, speeds: Speeds) -> Plan | None:
    """Micro-batches shared out so that the last pipeline ends as early as can be; None where that is what it has."""
    paces = [_pace(pipeline.stages, speeds) for pipeline in plan.pipelines]
    shared = share_ids(paces, sum(len(pipeline.micro_batches) for pipeline in plan.pipelines))
    if shared is None:
        return None
    numbers = [ids for (ids,) in shared]
    if numbers == [len(pipeline.micro_batches) for pipeline in plan.pipelines]:
        return None
    every = sorted(number for pipeline in plan.pipelines for number in pipeline.micro_batches)
    firsts = [0, *accumulate(numbers)]
    pipelines = tuple(
        replace(pipeline, micro_batches=tuple(every[first : first + ids]))
        for pipeline, first, ids in zip(plan.pipelines, firsts, numbers, strict=False)
    )
    return replace(plan, pipelines=pipelines)


def with_other_layers(
    plan: Plan, speeds: Speeds, room: Mapping[Device, float], layer_bytes: Sequence[float]
) -> Plan | None:
    """Stages cut so that each pipeline's slowest is as fast as can be, then ids; None where no stage changes. Shares of the
    state are alike then.

    room: bytes that a device has for layers; layer_bytes: what each layer takes of it.
    """
    held = [0.0, *accumulate(layer_bytes)]
    pipelines = []
    for pipeline in plan.pipelines:
        cut = _cut(pipeline, speeds, room, held)
        if cut is None:
            return None
        pipelines.append(cut)
    if [one.stages for one in pipelines] == [one.stages for one in plan.pipelines]:
        return None
    changed = alike(replace(plan, pipelines=tuple(pipelines)))
    return with_other_ids(changed, speeds) or changed


def with_spare(plan: Plan, taken: Mapping[Device, Device], speeds: Speeds, domains: Mapping[NodeId, str]) -> Plan:
    """Devices that stand by in place of those they are given for, and micro-batches shared out as their speeds want it.

    domains: failure domains of their nodes, of those that share one.
    """
    pipelines = tuple(
        replace(
            pipeline,
            stages=tuple(
                replace(stage, devices=tuple(taken.get(device, device) for device in stage.devices))
                for stage in pipeline.stages
            ),
        )
        for pipeline in plan.pipelines
    )
    here = {**plan.domains, **domains}
    changed = replace(plan, pipelines=pipelines)
    changed = replace(changed, domains={node: here[node] for node in sorted(changed.nodes) if node in here})
    return with_other_ids(changed, speeds) or changed


def alike(plan: Plan) -> Plan:
    """All that hold a layer own alike of it."""
    pipelines = (replace(one, stages=tuple(replace(stage, shares=()) for stage in one.stages)) for one in plan.pipelines)
    return replace(plan, pipelines=tuple(pipelines))


def layer_bytes(profile: Profile, spec: JobSpec, plan: Plan) -> list[float]:
    """Of every layer, what it takes of a device: copies, its part of what is owned and mirrored, activations on the way."""
    each = 8.0 + (8.0 if spec.train.exact else 0.0) + 12.0 * (1 + spec.recovery.mirrors) / plan.dp
    found = [profile.activation_bytes * float(plan.pp) / plan.tp] * profile.num_layers
    for line in profile.lines:
        for layer in line.layers:
            found[layer] += line.numel * each / (plan.tp if line.split else 1)
    return found


def room_of(kind: str, kinds: Kinds = KINDS) -> float:
    """Bytes that a device of this kind has for layers."""
    known = row_of(kind, kinds)
    return usable(known) - context(known)


def _cut(pipeline: Pipeline, speeds: Speeds, room: Mapping[Device, float], held: Sequence[float]) -> Pipeline | None:
    """As it is where cutting it anew would not make its slowest stage faster."""
    num_layers = len(held) - 1
    unit = [max(speeds[device] for device in stage.devices) for stage in pipeline.stages]
    seconds = [[each * layer for layer in range(num_layers + 1)] for each in unit]
    have = [min(room[device] for device in stage.devices) for stage in pipeline.stages]
    bounds = exact_split(seconds, [held] * len(unit), have, [0.0] * len(unit))
    if bounds is None:
        return None
    stages = tuple(
        replace(stage, first=bounds[i], last=bounds[i + 1], shares=()) for i, stage in enumerate(pipeline.stages)
    )
    is_faster = _pace(stages, speeds).period < _pace(pipeline.stages, speeds).period * (1 - 1e-9)
    return replace(pipeline, stages=stages) if is_faster else pipeline


def _pace(stages: Sequence[Stage], speeds: Speeds) -> Pace:
    each = [max(speeds[device] for device in stage.devices) * (stage.last - stage.first) for stage in stages]
    return Pace(sum(each) - max(each), max(each), len(stages))


def _ends_at(pipeline: Pipeline, speeds: Speeds) -> float:
    pace = _pace(pipeline.stages, speeds)
    return pace.start + pace.period * len(pipeline.micro_batches)
