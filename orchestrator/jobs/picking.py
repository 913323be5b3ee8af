"""Which devices a job would start on: the cheapest that have the shape it needs. Refuses to know who holds them and why."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from orchestrator.domain.ids import Device, NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What a job does not start without. tp: of each group of so many, all are on one node. one_kind: all are alike."""

    least: int = 1
    tp: int = 1
    one_kind: bool = False

    @property
    def num_devices(self) -> int:
        """Whole groups of them."""
        return -(-self.least // self.tp) * self.tp


def pick(pool: Mapping[Device, int], need: Need, kinds: Mapping[Device, str]) -> frozenset[Device] | None:
    """The devices that cost least together (pool: device -> cost) and are enough; None where the pool is not.

    The same pool gives the same devices. Of equal ones those are taken whose node has most of them, so that jobs lie
    close.
    """
    if not need.one_kind:
        found = _cheapest(pool, need)
        return found[1] if found else None
    by_kind: dict[str, dict[Device, int]] = defaultdict(dict)
    for device, cost in pool.items():
        by_kind[kinds.get(device, "")][device] = cost
    options = [(found, kind) for kind, part in by_kind.items() if (found := _cheapest(part, need))]
    return min(options, key=lambda option: (option[0][0], option[1]))[0][1] if options else None


def capacity(pool: Mapping[Device, int], need: Need, kinds: Mapping[Device, str]) -> int:
    """The most devices of the pool that are in groups of the shape."""
    here: Counter[tuple[str, NodeId]] = Counter()
    for device in pool:
        here[kinds.get(device, "") if need.one_kind else "", device.node] += 1
    by_kind: Counter[str] = Counter()
    for (kind, _), number in here.items():
        by_kind[kind] += number // need.tp * need.tp
    return max(by_kind.values(), default=0)


def _cheapest(pool: Mapping[Device, int], need: Need) -> tuple[int, frozenset[Device]] | None:
    if len(pool) < need.num_devices:
        return None
    by_node: dict[NodeId, list[Device]] = defaultdict(list)
    for device in sorted(pool, key=lambda device: (pool[device], device)):
        by_node[device.node].append(device)
    groups = []
    for node, devices in by_node.items():
        alike = Counter(pool[device] for device in devices)
        for at in range(0, len(devices) - need.tp + 1, need.tp):
            group = devices[at : at + need.tp]
            groups.append((sum(pool[device] for device in group), -alike[pool[group[0]]], node, tuple(group)))
    wanted = need.num_devices // need.tp
    if len(groups) < wanted:
        return None
    chosen = sorted(groups)[:wanted]
    return sum(cost for cost, *_ in chosen), frozenset(device for *_, group in chosen for device in group)
