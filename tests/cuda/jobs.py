"""Jobs small enough for a test, with every kind of layer."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

from orchestrator.domain.ids import Device, NodeId
from orchestrator.domain.plan import Pipeline, Plan, Stage
from orchestrator.domain.spec import (
    Backend,
    CheckpointSpec,
    DataSpec,
    DeviceKind,
    JobSpec,
    ParallelSpec,
    RecoverySpec,
    TrainSpec,
)

LAYERS = 6


def a_spec(device: DeviceKind = "cuda", backend: Backend = "links", **train: Any) -> JobSpec:
    """Six layers, four micro-batches a step."""
    settings: dict[str, Any] = {"steps": 12, "micro_batches": 4, "micro_batch_size": 2, "sequence": 64, "warmup_steps": 3}
    return JobSpec(
        name="small",
        program="causal_lm",
        data=DataSpec(files=("{stdlib}/json/*.py",)),
        train=TrainSpec(device=device, **{**settings, **train}),
        model={"layers": 4, "width": 64, "heads": 4, "kv_heads": 2, "ffn": 128, "dropout": 0.1, "tied": True},
        parallel=ParallelSpec(tp=2, pp=2),
        checkpoint=CheckpointSpec(every=0),
        recovery=RecoverySpec(backend=backend, leave_s=5.0),
    )


def on_cpu(spec: JobSpec) -> JobSpec:
    return replace(spec, train=replace(spec.train, device="cpu"), recovery=replace(spec.recovery, backend="links"))


def a_plan(*pipelines: tuple[list[int], list[int]], tp: int = 1) -> Plan:
    """Each pipeline as (layer cuts, micro-batch ids), on a node of its own."""
    made = []
    for number, (cuts, ids) in enumerate(pipelines):
        devices = iter(Device(NodeId(f"n{number}"), index) for index in range(tp * (len(cuts) - 1)))
        stages = tuple(Stage(first=a, last=b, devices=tuple(next(devices) for _ in range(tp))) for a, b in pairwise(cuts))
        made.append(Pipeline(stages=stages, micro_batches=tuple(ids)))
    return Plan(pipelines=tuple(made))
