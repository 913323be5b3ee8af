"""Warm spares: on which idle nodes a job keeps hosts, what is prepared there, and what becomes of them.

idle node -> claimed, host opened -> warm: ranks forked and built -> ready -> in a plan, or lost
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from orchestrator.detection.classify import host_fault
from orchestrator.domain.cluster import Node, NodeStatus
from orchestrator.domain.host_events import RankExited, SeatsPrepared
from orchestrator.domain.ids import Device, Generation, NodeId
from orchestrator.domain.job import Spare
from orchestrator.domain.kinds import Kinds, row_of, table
from orchestrator.domain.plan import Plan
from orchestrator.domain.requests import PrepareSeats
from orchestrator.domain.state import Running

from .draft import Draft
from .forming import open_host
from .losing import host_lost

MAX_DEATHS = 3
"""Of ranks that stand by on one node; then its host is closed and the node left alone for a while."""


def want_spares(draft: Draft, nodes: Mapping[NodeId, Node]) -> None:
    """Claim idle nodes up to the wanted number, and have those that are warm built for the plan that runs."""
    state, record = draft.state, draft.record
    if not isinstance(state, Running):
        return
    usable = draft.usable if record.spares else frozenset()
    for node in [node for node in record.spares if not usable.issuperset(record.spares[node].devices)]:
        _drop(draft, node)  # its host is told lost by itself, if it is
    missing = record.spec.recovery.spares - len(draft.record.spares)
    for found in _candidates(draft, state.plan, nodes)[:missing] if missing > 0 else ():
        draft.set(spares={**draft.record.spares, found.id: Spare(devices=found.devices(), domain=found.domain or "")})
        draft.say("spare_claimed", f"{found.id} is to stand by with {found.num_devices} devices", node=found.id)
        open_host(draft, found.id)
    for node, spare in draft.record.spares.items():
        if node in draft.record.warm and spare.asked_for != state.generation:
            draft.call(node, PrepareSeats(generation=state.generation, devices=spare.devices, stand_by=state.plan))
            _change(draft, node, asked_for=state.generation)


def reserved(draft: Draft, nodes: Mapping[NodeId, Node], devices: frozenset[Device]) -> frozenset[Device]:
    """Of devices to plan a new job on, those to leave idle for its spares where the rest is enough."""
    count = draft.record.spec.recovery.spares
    here = Counter(device.node for device in devices if device.node in nodes)
    most = max(here.values(), default=0)
    largest = sorted(node for node, number in here.items() if number == most)
    kept = set(largest[len(largest) - count :]) if 0 < count < len(here) else set()
    return frozenset(device for device in devices if device.node in kept)


def stand_ins(draft: Draft, plan: Plan) -> frozenset[Device]:
    """Devices that stand by for nodes of the plan that drain: one spare for each, those that are ready alone."""
    record = draft.record
    draining = draft.draining
    leaving = [node for node in plan.nodes if node in draining]
    away = draining | record.unreachable
    ready = [spare for node, spare in sorted(record.spares.items()) if spare.is_ready and node not in away]
    return frozenset(device for spare in ready[: len(leaving)] for device in spare.devices)


def spare_prepared(draft: Draft, node: NodeId, said: SeatsPrepared) -> bool:
    """Whether the answer was a spare's."""
    spare = draft.record.spares.get(node)
    if spare is None or not set(said.pids) <= set(spare.devices):
        return False
    draft.set(
        pids={**draft.record.pids, **said.pids},
        listeners={**draft.record.listeners, **said.addresses},
    )
    if not spare.is_ready and set(spare.devices) <= set(draft.record.pids):
        _change(draft, node, is_ready=True)
        draft.say("spare_ready", f"{node} stands by: {len(spare.devices)} ranks are forked and built", node=node)
    return True


def spare_exited(draft: Draft, exited: RankExited) -> bool:
    """Whether the rank that ended stood by; then it is forked again, a few times."""
    node = exited.device.node
    spare = draft.record.spares.get(node)
    if spare is None:
        return False
    draft.forget_rank(exited.device)
    if spare.deaths + 1 >= MAX_DEATHS:
        why = f"{spare.deaths + 1} of its ranks ended while they stood by"
        host_lost(draft, node, host_fault(node, why, draft.now), False)
    else:
        _change(draft, node, asked_for=Generation(0), is_ready=False, deaths=spare.deaths + 1)
    return True


def give_up_slow_spares(draft: Draft) -> None:
    silent = draft.record.unreachable
    for node in sorted(node for node, spare in draft.record.spares.items() if not spare.is_ready or node in silent):
        host_lost(draft, node, host_fault(node, "it was not ready to stand by in time", draft.now), False)


def _candidates(draft: Draft, plan: Plan, nodes: Mapping[NodeId, Node]) -> list[Node]:
    """Idle nodes that could take the place of any node of the plan, those with a host first."""
    record, usable = draft.record, draft.usable
    taken = {*plan.nodes, *record.spares, *record.avoided, *(record.target.nodes if record.target else ())}
    most = max(Counter(device.node for device in plan.devices).values())
    kinds = table(draft.rows)
    least = min(_memory(nodes[node], kinds) for node in plan.nodes) if set(plan.nodes) <= set(nodes) else 0
    found = [
        node
        for node in nodes.values()
        if node.id not in taken
        and node.status is NodeStatus.UP
        and node.num_devices >= most
        and _memory(node, kinds) >= least
        and usable.issuperset(node.devices())
    ]
    return sorted(found, key=lambda node: (node.id not in record.warm, node.id not in record.hosts, node.id))


def _memory(node: Node, kinds: Kinds) -> int:
    return row_of(node.kind, kinds).memory_bytes


def _change(draft: Draft, node: NodeId, **changes: Any) -> None:
    draft.set(spares={**draft.record.spares, node: replace(draft.record.spares[node], **changes)})


def _drop(draft: Draft, node: NodeId) -> None:
    draft.set(spares={spare: found for spare, found in draft.record.spares.items() if spare != node})
