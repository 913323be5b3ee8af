"""From what a user wrote to what the planner asks: a job's model, memory rules and constraints, and a sketched
cluster's machines.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import log
from statistics import median

from orchestrator.domain.balance import StageTime
from orchestrator.domain.cluster import EMULATED_FORWARD
from orchestrator.domain.foresight import ClusterSketch, NodeSketch
from orchestrator.domain.kinds import KINDS, DeviceKind, Kinds, row_of, speed_of, table
from orchestrator.domain.profile import Profile, splits_a_block
from orchestrator.domain.spec import MAX_MICRO_BATCHES, JobSpec

from .ask import Ask, Batch
from .compose import Limits
from .constants import Constants, Measured
from .machines import Machines, NodeGroup, machines
from .memory import Rules
from .model import Model, of_profile
from .pipelines import layer_times

STEP = 1.1
"""Ratio of two measured times that are told apart."""
EXACT_BYTES = 8
"""More per parameter in exact mode: the sum of its gradients is kept as an integer."""
MAX_TP = 64
"""No node has more devices that are linked to each other."""


def ask_of(
    spec: JobSpec,
    profile: Profile,
    cluster: Machines,
    model: Model | None = None,
    seen: Sequence[StageTime] = (),
    kinds: Kinds = KINDS,
) -> Ask:
    """What the job is as it stands: its own micro-batches, recomputing or not as it says. seen: of its stages so far.

    kinds: those of the cluster's devices, among others.
    """
    train, wanted = spec.train, spec.parallel
    model = model or model_of(spec, profile)
    pretended = _pretended(spec, profile, cluster, kinds)
    return Ask(
        model=model,
        machines=cluster,
        batches=(Batch(samples=train.micro_batch_size, micro_batches=train.micro_batches),),
        tp=wanted.tp,
        limits=Limits(
            least_depth=wanted.pp or 1,
            most_depth=wanted.pp or profile.num_layers,
            replicas=wanted.dp,
            min_devices=wanted.min_devices,
            max_devices=wanted.max_devices,
        ),
        recompute=(train.activation_checkpointing,),
        rules=rules_of(spec),
        measured=replace(
            pretended,
            factors=factors_of(seen, spec, model, pretended, kinds),
            skew=skew_of(seen, spec, model, pretended, kinds),
        ),
        uneven=True,
    )


def _pretended(spec: JobSpec, profile: Profile, cluster: Machines, kinds: Kinds) -> Measured:
    """What layers take where the job pretends that processors are other kinds; nothing where it does not."""
    layer_s, samples = spec.train.emulated_layer_s, spec.train.micro_batch_size
    if not layer_s:
        return Measured()
    degrees = [spec.parallel.tp] if spec.parallel.tp else range(1, MAX_TP + 1)
    made = {}
    for kind in {one.kind.name for one in cluster.classes}:
        for tp in degrees:
            whole_s = layer_s / tp / speed_of(kind, kinds)
            one = (whole_s * EMULATED_FORWARD, whole_s * (1 - EMULATED_FORWARD))
            made[kind, tp, samples] = (one,) * profile.num_layers
    return Measured(layers=made)


def factors_of(
    seen: Sequence[StageTime], spec: JobSpec, model: Model, pretended: Measured, kinds: Kinds = KINDS
) -> dict[str, float]:
    """Kind -> how many times as long as predicted its stages took, in steps of STEP; nothing where all are as predicted.

    A kind that was not seen yet is taken to be as far off as the others are.
    """
    ratios: dict[str, list[float]] = defaultdict(list)
    for one, ratio in _ratios(seen, spec, model, pretended, kinds):
        ratios[one.kind].append(ratio)
    found = {kind: _stepped(median(mine)) for kind, mine in sorted(ratios.items())}
    if all(factor == 1.0 for factor in found.values()):
        return {}
    usual = _stepped(median(found.values()))
    return dict.fromkeys(kinds, usual) | found


def skew_of(
    seen: Sequence[StageTime], spec: JobSpec, model: Model, pretended: Measured, kinds: Kinds = KINDS
) -> tuple[float, ...]:
    """Of each layer, how many times as long its stages took, against what was predicted, as stages of its kind usually did,
    in steps of STEP; nothing where none took longer than others.
    """
    ratios = _ratios(seen, spec, model, pretended, kinds)
    usual = {kind: median(mine for one, mine in ratios if one.kind == kind) for kind in {one.kind for one, _ in ratios}}
    found: list[list[float]] = [[] for _ in model.layers]
    for one, ratio in ratios:
        for layer in range(one.first, one.last):
            found[layer].append(ratio / usual[one.kind])
    skew = tuple(_stepped(sum(mine) / len(mine)) if mine else 1.0 for mine in found)
    return skew if set(skew) != {1.0} else ()


def _ratios(
    seen: Sequence[StageTime], spec: JobSpec, model: Model, pretended: Measured, kinds: Kinds
) -> list[tuple[StageTime, float]]:
    """Stages that were seen, and how many times as long as predicted each took."""
    train, constants, found = spec.train, Constants(), []
    for one in seen:
        kind = row_of(one.kind, kinds)
        times = layer_times(
            model, kind, one.tp, train.micro_batch_size, train.activation_checkpointing, constants, pretended
        )
        predicted = sum(time.total for time in times[one.first : one.last])
        if predicted > 0.0 and one.seconds > 0.0 and one.last <= len(model.layers):
            found.append((one, one.seconds / predicted))
    return found


def _stepped(factor: float) -> float:
    """Noise makes no other plan."""
    return round(STEP ** round(log(factor) / log(STEP)), 4)


def freed(ask: Ask, spec: JobSpec) -> Ask:
    """The same step cut into other micro-batches, recomputing or not: what the job could say instead."""
    train = spec.train
    total = train.micro_batches * train.micro_batch_size
    sizes = [train.micro_batch_size * 2**power for power in range(5)] + [
        train.micro_batch_size // 2**power for power in (1, 2)
    ]
    batches = tuple(
        Batch(samples=size, micro_batches=total // size)
        for size in sizes
        if size and total % size == 0 and total // size <= MAX_MICRO_BATCHES
    )
    return replace(ask, batches=batches, recompute=(False, True))


def model_of(spec: JobSpec, profile: Profile) -> Model:
    exact = spec.train.exact
    cuttable = tuple(tp for tp in range(1, MAX_TP + 1) if not splits_a_block(profile, tp)) if exact else None
    return of_profile(profile, spec, cuttable)


def rules_of(spec: JobSpec) -> Rules:
    copy = 4 if spec.train.dtype == "fp32" else 2
    exact = EXACT_BYTES if spec.train.exact else 0
    return Rules(copy_bytes=copy + 4 + exact, owned_bytes=12, mirrors=spec.recovery.mirrors)


def machines_of(sketch: ClusterSketch) -> Machines:
    """Raises KeyError for a kind that nobody knows."""
    kinds = table(sketch.kinds)
    return machines([group for number, nodes in enumerate(sketch.nodes) for group in _groups(nodes, kinds, number)])


def _groups(nodes: NodeSketch, kinds: Mapping[str, DeviceKind], number: int) -> list[NodeGroup]:
    kind = kinds[nodes.kind]
    kind = replace(
        kind,
        network_gb_s=kind.network_gb_s if nodes.network_gb_s is None else nodes.network_gb_s,
        link_gb_s=kind.link_gb_s if nodes.link_gb_s is None else nodes.link_gb_s,
    )
    size = nodes.domain_nodes or nodes.count
    made = []
    for position, first in enumerate(range(0, nodes.count, size)):
        domain = nodes.domain or (f"switch={nodes.kind.lower()}-{number}.{position}" if nodes.domain_nodes else None)
        made.append(
            NodeGroup(
                kind=kind,
                nodes=min(size, nodes.count - first),
                devices=nodes.devices,
                speed=nodes.speed,
                domain=domain,
                name=nodes.name,
            )
        )
    return made
