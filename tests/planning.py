"""Small models and clusters for the planner's tests."""

from __future__ import annotations

from orchestrator.domain.kinds import KINDS, DeviceKind
from orchestrator.planner.ask import Ask, Batch
from orchestrator.planner.compose import Limits
from orchestrator.planner.machines import Machines, NodeGroup, machines
from orchestrator.planner.memory import Rules
from orchestrator.planner.model import Model, Shape, of_shape

ROOMY = Rules(mirrors=0)


def a_model(layers: int = 6, hidden: int = 1024, *, sequence: int = 512) -> Model:
    """layers: of blocks, embedding and head come on top."""
    return of_shape(Shape(layers=layers, hidden=hidden, heads=8, sequence=sequence, vocabulary=8192, tied=False))


def a_cluster(*nodes: tuple[str | DeviceKind, int, int], speed: float = 1.0) -> Machines:
    """(kind, nodes, devices of each)."""
    return machines(
        [
            NodeGroup(kind=KINDS[kind] if isinstance(kind, str) else kind, nodes=number, devices=devices, speed=speed)
            for kind, number, devices in nodes
        ]
    )


def an_ask(
    model: Model,
    cluster: Machines,
    micro_batches: int,
    *,
    samples: int = 1,
    tp: int | None = None,
    limits: Limits = Limits(),
    rules: Rules = ROOMY,
) -> Ask:
    return Ask(
        model=model,
        machines=cluster,
        batches=(Batch(samples=samples, micro_batches=micro_batches),),
        tp=tp,
        limits=limits,
        rules=rules,
    )
