"""Whether one more failure could cost committed steps, in words; nothing where every interval has two holders apart."""

from __future__ import annotations

from orchestrator.domain.layout import partners
from orchestrator.domain.plan import Plan


def risk(plan: Plan, *, mirrors: int) -> str:
    """Why a job on `plan` is at risk, or "". Who asked for no mirrors is not told of it again and again."""
    if not mirrors:
        return ""
    partner = partners(plan)
    if not partner:
        return "its one device has no other to mirror it; add a node"
    together = [owner for owner, mirror in partner.items() if owner.node == mirror.node]
    if not together:
        return ""
    node = together[0].node
    if len(plan.nodes) == 1:
        return f"all mirrors are on {node} with their owners; add a node"
    return f"{node} has more than half of the devices, so {len(together)} mirrors are on it with their owners; add a node"
