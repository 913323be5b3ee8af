"""Where a job's mathematics happens: pipelines of stages on devices, and the micro-batch ids each pipeline takes.

    plan ── pipelines (data-parallel axis; may differ in depth, layer split and number of ids)
              └─ stages (pipeline axis; each a contiguous range of layers)
                   └─ devices (tensor-parallel axis; the same number in every stage)

Ranks are numbered pipeline by pipeline, stage by stage, tp index fastest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from .ids import Device, NodeId, Rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Layers first..last-1, computed together by `devices` (one per tp index)."""

    first: int
    last: int
    devices: tuple[Device, ...]
    shares: tuple[int, ...] = ()
    """Of each of its layers' state, what it owns against the other stages that hold the layer: weights, one a layer, or one
    for all of them. Empty, for it or for one of those others: all own alike."""

    def __post_init__(self) -> None:
        if len(self.shares) not in (0, 1, self.last - self.first):
            raise ValueError(
                f"{len(self.shares)} shares for layers {self.first}..{self.last - 1}; give one a layer, one or none"
            )

    def share_of(self, layer: int) -> int:
        """0 where it does not say."""
        if len(self.shares) == 1:
            return self.shares[0]
        return self.shares[layer - self.first] if self.shares else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    stages: tuple[Stage, ...]
    micro_batches: tuple[int, ...]
    """The ids this pipeline computes in every step; at least as many as it has stages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """One rank's place in a plan."""

    rank: Rank
    device: Device
    pipeline: int
    stage: int
    tp: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    pipelines: tuple[Pipeline, ...]
    reason: str = ""
    """Why this plan, in words."""
    domains: Mapping[NodeId, str] = field(default_factory=dict)
    """The failure domain (rack, switch) of each of its nodes that shares one; any other node is a domain by itself."""

    @cached_property
    def seats(self) -> tuple[Seat, ...]:
        places = (
            (device, p, s, t)
            for p, pipeline in enumerate(self.pipelines)
            for s, stage in enumerate(pipeline.stages)
            for t, device in enumerate(stage.devices)
        )
        return tuple(
            Seat(rank=Rank(rank), device=device, pipeline=p, stage=s, tp=t) for rank, (device, p, s, t) in enumerate(places)
        )

    @cached_property
    def seat_of(self) -> dict[Device, Seat]:
        return {seat.device: seat for seat in self.seats}

    @cached_property
    def rank_at(self) -> dict[tuple[int, int, int], Rank]:
        """(pipeline, stage, tp) -> rank."""
        return {(seat.pipeline, seat.stage, seat.tp): seat.rank for seat in self.seats}

    @property
    def world_size(self) -> int:
        return len(self.seats)

    @property
    def tp(self) -> int:
        return len(self.pipelines[0].stages[0].devices)

    @property
    def dp(self) -> int:
        return len(self.pipelines)

    @property
    def pp(self) -> int:
        """Depth of the deepest pipeline."""
        return max(len(pipeline.stages) for pipeline in self.pipelines)

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        return tuple(seat.device for seat in self.seats)

    @cached_property
    def by_node(self) -> dict[NodeId, tuple[Device, ...]]:
        """Each node's devices, in the order of ranks."""
        found: dict[NodeId, list[Device]] = {}
        for device in self.devices:
            found.setdefault(device.node, []).append(device)
        return {node: tuple(devices) for node, devices in found.items()}

    @cached_property
    def nodes(self) -> tuple[NodeId, ...]:
        return tuple(self.by_node)

    def stage_at(self, seat: Seat) -> Stage:
        return self.pipelines[seat.pipeline].stages[seat.stage]

    def describe(self) -> str:
        return f"tp{self.tp} x pp{self.pp} x dp{self.dp} on {self.world_size} devices of {len(self.nodes)} nodes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Infeasible:
    """No plan exists now, in one sentence: fact, limit, remedy."""

    reason: str
    forever: bool = False
    """True when no cluster could run it (a config that cannot work), False when more devices would."""
