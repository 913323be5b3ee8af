"""How fast the devices of a fleet compute, and so how long a step takes: by the planner's own measure of a plan."""

from __future__ import annotations

from collections.abc import Iterable

from orchestrator.domain.cluster import Node
from orchestrator.domain.ids import Device, NodeId
from orchestrator.domain.kinds import speed_of
from orchestrator.domain.plan import Plan
from orchestrator.planner.rebalance import compute_s, with_other_ids


class Tempo:
    """step_s: of a step of the largest plan that has been seen, with every device well. slow: device -> how many times as
    long it takes as others of its kind."""

    def __init__(self, step_s: float, nodes: Iterable[Node]) -> None:
        self._step_s = step_s
        self._speeds: dict[NodeId, float] = {node.id: speed_of(node.kind) for node in nodes}
        self._largest = 0
        self._unit_s = 0.0
        """A layer of a micro-batch on a device of speed 1."""
        self.slow: dict[Device, float] = {}

    @property
    def is_mixed(self) -> bool:
        """Its plans are made by what devices were measured to take."""
        return len(set(self._speeds.values())) > 1

    def has_slow(self, plan: Plan) -> bool:
        return not self.slow.keys().isdisjoint(plan.seat_of)

    def learn(self, plan: Plan) -> None:
        if plan.world_size > self._largest:
            self._largest, self._unit_s = plan.world_size, 1.0
            self._unit_s = self._step_s / compute_s(plan, self._layers_s(plan, {}))

    def step_s(self, plan: Plan) -> float:
        return compute_s(plan, self._layers_s(plan, self.slow))

    def slow_s(self, plan: Plan) -> float:
        """Of that, what it is longer than were all devices well and had the shares of such."""
        well = self._layers_s(plan, {})
        return max(0.0, self.step_s(plan) - compute_s(with_other_ids(plan, well) or plan, well))

    def told(self, plan: Plan) -> dict[Device, float]:
        """What each device would say that it takes for a micro-batch."""
        layers_s = self._layers_s(plan, self.slow)
        spans = {
            device: stage.last - stage.first for one in plan.pipelines for stage in one.stages for device in stage.devices
        }
        return {device: layers_s[device] * span for device, span in spans.items()}

    def _layers_s(self, plan: Plan, slow: dict[Device, float]) -> dict[Device, float]:
        return {
            device: self._unit_s / self._speeds[device.node] * slow.get(device, 1.0)
            for one in plan.pipelines
            for stage in one.stages
            for device in stage.devices
        }
