"""Machines of which some nodes have lost a device: in simulated seeds 752 and 922 a plan used devices twice."""

from __future__ import annotations

from orchestrator.domain.ids import Device, NodeId
from orchestrator.domain.kinds import KINDS
from orchestrator.planner.machines import of_devices


def test_nodes_that_lost_nothing_are_there_once() -> None:
    devices = [
        (Device(NodeId(f"n{node}"), index), kind) for node, kind in enumerate(("A100", "H100")) for index in range(2)
    ]
    lost = Device(NodeId("n0"), 1)
    left = of_devices(devices, KINDS).without(devices=[lost])
    assert sorted(d for machine in left.nodes for d in machine.devices) == sorted(d for d, _ in devices if d != lost)
