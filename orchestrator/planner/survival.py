"""Which losses a placed plan survives without moving any layer, and which without losing any: in counts and in words.

Three things may happen to a device: its pipeline breaks, and others, which hold the same layers, take its ids and what it
owned of the state (nothing else moves); its mirror takes over what it owned; or both copies of something are lost, and a
checkpoint is needed.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from orchestrator.domain.ids import Device, NodeId
from orchestrator.domain.layout import partners
from orchestrator.domain.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Survival:
    """absorbed, kept, lost: nodes by what losing one of them alone comes to. domains: failure domains that lose both
    copies.
    """

    nodes: int
    absorbed: int
    """Some pipeline goes on unharmed and every interval is still held: ids and what is owned are dealt out anew, and no
    layer moves.
    """
    kept: int
    """No pipeline is whole any more, but every interval is still held: a re-plan moves state, nothing is lost."""
    lost: int
    """Owner and mirror of an interval are both on it, or nobody mirrors what it holds."""
    domains_lost: tuple[str, ...]
    pipelines: int
    words: str


def survival(plan: Plan, *, mirrors: int) -> Survival:
    whole = len(plan.pipelines)
    broken: dict[NodeId, set[int]] = defaultdict(set)
    for seat in plan.seats:
        broken[seat.device.node].add(seat.pipeline)
    partner = partners(plan) if mirrors else {}
    together, shared = _held_twice(plan, partner)
    unmirrored = {seat.device.node for seat in plan.seats if seat.device not in partner}
    lost = {node for node in broken if node in together or node in unmirrored}
    absorbed = {node for node in broken if node not in lost and len(broken[node]) < whole}
    kept = set(broken) - lost - absorbed
    return Survival(
        nodes=len(broken),
        absorbed=len(absorbed),
        kept=len(kept),
        lost=len(lost),
        domains_lost=tuple(sorted(shared)),
        pipelines=whole,
        words="it is one device, which nobody mirrors: its loss goes back to the last checkpoint"
        if plan.world_size == 1 and mirrors
        else _words(len(broken), len(absorbed), len(kept), len(lost), tuple(sorted(shared)), mirrors),
    )


def _held_twice(plan: Plan, partner: dict[Device, Device]) -> tuple[set[NodeId], set[str]]:
    """Nodes, and named domains, that hold an interval and its only other copy."""
    nodes, domains = set[NodeId](), set[str]()
    for owner, mirror in partner.items():
        if owner.node == mirror.node:
            nodes.add(owner.node)
        domain = plan.domains.get(owner.node)
        if domain is not None and domain == plan.domains.get(mirror.node):
            domains.add(domain)
    return nodes, domains


def _words(nodes: int, absorbed: int, kept: int, lost: int, domains: tuple[str, ...], mirrors: int) -> str:
    if not mirrors:
        return "no mirrors: the loss of any device goes back to the last checkpoint; set recovery.mirrors to 1"
    said = []
    if absorbed:
        said.append(
            f"any one of {absorbed} of {nodes} nodes may be lost and the other pipelines take its ids: no layer moves, and"
            " what it owned of the state is shared out anew"
        )
    if kept:
        said.append(
            f"{kept} of {nodes} nodes are part of every pipeline: losing one moves state from mirrors, and loses none"
        )
    if lost:
        said.append(f"{lost} of {nodes} nodes hold both copies of something: losing one goes back to the last checkpoint")
    if domains:
        said.append(f"so does losing all of {', '.join(domains[:3])}{' and others' if len(domains) > 3 else ''} at once")
    return "; ".join(said)
