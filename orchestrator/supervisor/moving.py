"""A job has to leave devices while it trains: a node drains, or its owner wants it smaller.

It owns why a plan has to be given up, and leaving a host behind once nothing of the job is there. How the job gets to
another plan is the same whether that is larger or smaller: wanting.py, joining.py.
"""

from __future__ import annotations

from dataclasses import replace

from orchestrator.domain.plan import Plan
from orchestrator.domain.requests import CloseHost
from orchestrator.domain.size import Size
from orchestrator.domain.state import Queued, Running

from .asked import checkpoint_now
from .draft import Draft
from .joining import drop_join


def why_move(draft: Draft, plan: Plan) -> str:
    """Why the job cannot keep this plan, in words; "" where it can."""
    leaving = draft.draining
    draining = [node for node in plan.nodes if node in leaving]
    if draining:
        return f"{', '.join(draining)} {'are' if len(draining) > 1 else 'is'} to be left"
    if given := draft.record.turn.yields & set(plan.devices):
        return f"{len(given)} devices go to {draft.record.turn.yields_to}, which has a higher priority"
    limit = draft.record.wanted_size.limit
    return f"the job is to have {limit} devices" if limit and plan.world_size > limit else ""


def resize(draft: Draft, size: Size) -> None:
    """Its owner wants another size; a plan of it is asked for at once."""
    if size == draft.record.wanted_size:
        return
    draft.set(size=size)
    draft.turn(judged=frozenset(), infeasible="", floor=0)
    most = f"at most {size.max_devices}" if size.max_devices else "no limit"
    aim = f", {size.target} wanted" if size.target else ""
    draft.say("resize_asked", f"at least {size.min_devices} devices, {most}{aim}")
    if draft.record.planning:
        # For the size that it had: what comes of that is no answer to what is asked next, and has another number.
        draft.set(reserved=draft.next_generation(), planning=False)
    look_again(draft)


def look_again(draft: Draft) -> None:
    """What devices the job may have has changed: whatever is under way towards a plan that is none any more is given up."""
    draft.set(considered=frozenset())
    target = draft.record.target
    if target is not None and why_move(draft, target):
        draft.set(target=None)
        drop_join(draft)
    if isinstance(draft.state, Queued):
        draft.become(replace(draft.state, reason="its size, or the cluster's, was changed"))


def cannot_move(draft: Draft, why: str, reason: str) -> None:
    """No other plan fits: it trains on, and what it has is saved, since the node may be taken away."""
    draft.say("not_moved", f"{why}, but the job {reason}; it trains on where it is")
    if draft.record.hosts & draft.draining:
        checkpoint_now(draft)


def leave_drained_hosts(draft: Draft) -> None:
    """Close hosts on nodes that drain, once the job has no seat there and a step was made without what it held there."""
    record, state = draft.record, draft.state
    if not isinstance(state, Running) or (draft.incident and draft.incident.pause_s is None):
        return
    needed = {*state.plan.nodes, *(record.target.nodes if record.target else ())}
    for node in sorted((record.hosts & draft.draining) - needed - record.avoided):
        draft.set(avoided=draft.record.avoided | {node})
        draft.forget_processes(node)
        draft.call(node, CloseHost())
        draft.say("node_left", f"nothing of the job is on {node} any more", node=node)
