"""The cluster as a planner counts it: nodes that are alike are one class, so that its work grows with classes, not nodes.

A class is (kind, devices, memory, links, health); where its nodes stand is for placement alone. Speeds are rounded to a
twentieth, so that measured noise makes no classes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from orchestrator.domain.ids import Device, NodeId
from orchestrator.domain.kinds import DeviceKind

SPEED_STEP = 0.05
MAX_NAMED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroup:
    """Nodes alike in everything, in one failure domain or each in its own (None)."""

    kind: DeviceKind
    nodes: int
    devices: int
    """Of each node."""
    speed: float = 1.0
    """Health: what its devices reach of what their kind should."""
    domain: str | None = None
    name: str = ""
    """Of its nodes, a number after it; the kind's where empty."""
    names: tuple[NodeId, ...] = ()
    """Each node's own, where they have any."""
    indices: tuple[tuple[int, ...], ...] = ()
    """Usable devices of each named node, where not all of them are."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class ClassKey:
    name: str
    devices: int
    memory_bytes: int
    bf16_tflops: float
    memory_gb_s: float
    link_gb_s: float
    network_gb_s: float
    speed: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeClass:
    """kind: with its health already in its rates."""

    key: ClassKey
    kind: DeviceKind
    devices: int
    nodes: int

    def groups(self, tp: int) -> int:
        """Sets of tp devices on one node."""
        return self.nodes * (self.devices // tp)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One node. islands of `devices`: a tp group stays among them."""

    node: NodeId
    key: ClassKey
    devices: tuple[Device, ...]
    domain: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Machines:
    """Classes in order of their keys, and every node in order of class, domain and name."""

    classes: tuple[NodeClass, ...]
    nodes: tuple[Machine, ...]

    @property
    def num_devices(self) -> int:
        return sum(group.nodes * group.devices for group in self.classes)

    def key_of(self, node: NodeId) -> ClassKey | None:
        return next((machine.key for machine in self.nodes if machine.node == node), None)

    def of_kind(self, name: str) -> Machines:
        """Those of one kind alone."""
        kinds = {one.key: one.kind for one in self.classes}
        return _classed([machine for machine in self.nodes if machine.key.name == name], kinds)

    def without(self, lost: Iterable[NodeId] = (), devices: Iterable[Device] = ()) -> Machines:
        """What is left; a node that loses a device is of another class."""
        gone, dead = set(lost), defaultdict[NodeId, set[Device]](set)
        for device in devices:
            dead[device.node].add(device)
        kinds = {one.key: one.kind for one in self.classes}
        left = [machine for machine in self.nodes if machine.node not in gone and machine.node not in dead]
        hurt = []
        for machine in self.nodes:
            if machine.node not in dead or machine.node in gone:
                continue
            if kept := tuple(device for device in machine.devices if device not in dead[machine.node]):
                key = replace(machine.key, devices=len(kept))
                kinds.setdefault(key, kinds[machine.key])
                hurt.append(replace(machine, key=key, devices=kept))
        return _classed(sorted([*left, *hurt], key=_order) if hurt else left, kinds)


def machines(groups: Sequence[NodeGroup]) -> Machines:
    """Whatever the order of the groups. Nodes without names are numbered, by group in order of their figures."""
    kinds: dict[ClassKey, DeviceKind] = {}
    found: list[Machine] = []
    numbers: dict[str, int] = defaultdict(int)
    for group in sorted(groups, key=_group_order):
        speed = max(SPEED_STEP, round(round(group.speed / SPEED_STEP) * SPEED_STEP, 2))
        kind = slowed(group.kind, speed)
        key = ClassKey(
            name=group.kind.name,
            devices=group.devices,
            memory_bytes=kind.memory_bytes,
            bf16_tflops=kind.bf16_tflops,
            memory_gb_s=kind.memory_gb_s,
            link_gb_s=kind.link_gb_s,
            network_gb_s=kind.network_gb_s,
            speed=speed,
        )
        prefix = group.name or group.kind.name.lower()
        for position in range(group.nodes):
            if group.names:
                node = group.names[position]
            else:
                node = NodeId(f"{prefix}-{numbers[prefix]:05d}")
                numbers[prefix] += 1
            usable = group.indices[position] if group.indices else range(group.devices)
            own = key if len(usable) == group.devices else replace(key, devices=len(usable))
            kinds.setdefault(own, kind)
            devices = tuple(Device(node, index) for index in usable)
            domain = group.domain or f"node={node}"
            found.append(Machine(node=node, key=own, devices=devices, domain=domain))
    return _classed(sorted(found, key=_order), kinds)


def of_devices(
    devices: Iterable[tuple[Device, str]],
    kinds: Mapping[str, DeviceKind],
    *,
    domains: Mapping[NodeId, str] | None = None,
    speeds: Mapping[NodeId, float] | None = None,
) -> Machines:
    """A snapshot: usable devices and the names of their kinds. An unknown kind counts as `cpu`."""
    by_node: dict[NodeId, list[int]] = defaultdict(list)
    kind_of: dict[NodeId, str] = {}
    for device, kind in devices:
        by_node[device.node].append(device.index)
        kind_of[device.node] = kind
    return machines(
        [
            NodeGroup(
                kind=kinds.get(kind_of[node]) or replace(kinds["cpu"], name=kind_of[node]),
                nodes=1,
                devices=len(found),
                speed=(speeds or {}).get(node, 1.0),
                domain=(domains or {}).get(node),
                names=(node,),
                indices=(tuple(sorted(found)),),
            )
            for node, found in sorted(by_node.items())
        ]
    )


def slowed(kind: DeviceKind, speed: float) -> DeviceKind:
    if speed == 1.0:
        return kind
    return replace(kind, bf16_tflops=kind.bf16_tflops * speed, memory_gb_s=kind.memory_gb_s * speed)


def _classed(ordered: Sequence[Machine], kinds: Mapping[ClassKey, DeviceKind]) -> Machines:
    counts: dict[ClassKey, int] = {}
    for key, mine in groupby(ordered, key=lambda machine: machine.key):
        counts[key] = sum(1 for _ in mine)
    classes = tuple(NodeClass(key=key, kind=kinds[key], devices=key.devices, nodes=counts[key]) for key in counts)
    return Machines(classes=classes, nodes=tuple(ordered))


def _order(machine: Machine) -> tuple[ClassKey, str, NodeId]:
    return machine.key, machine.domain, machine.node


def _group_order(group: NodeGroup) -> tuple[object, ...]:
    kind = group.kind
    figures = (kind.name, group.devices, kind.memory_bytes, kind.bf16_tflops, kind.memory_gb_s, kind.link_gb_s)
    return (*figures, kind.network_gb_s, group.speed, group.domain or "", group.names, group.name, group.nodes)
