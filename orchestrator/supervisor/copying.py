"""Copies that last, as hosts tell of them: shown with the job, and said once when one of a kind begins to take long.

It refuses to know what is done about slow ones: a generation that forms is given time while state arrives (deadlines.py).
"""

from __future__ import annotations

from orchestrator.domain.copying import Copying
from orchestrator.domain.ids import NodeId
from orchestrator.domain.state import Stopping

from .draft import Draft

MEGA = 1e6


def copies_seen(draft: Draft, node: NodeId, copies: tuple[Copying, ...]) -> None:
    """In the place of what this host told before."""
    if draft.is_over or isinstance(draft.state, Stopping):
        return
    known = {(one.what, one.step) for told in draft.record.copies.values() for one in told}
    others = {at: told for at, told in draft.record.copies.items() if at != node}
    draft.set(copies={**others, node: copies} if copies else others)
    for what, step in sorted({(one.what, one.step) for one in copies} - known):
        parts = [one for one in copies if (one.what, one.step) == (what, step)]
        done, total = sum(one.done_bytes for one in parts), sum(one.total_bytes for one in parts)
        seconds = max(one.seconds for one in parts)
        said = f"{done / MEGA:,.0f} of {total / MEGA:,.0f} MB on {node} in {seconds:.0f} s"
        draft.say("copying", f"{what} step {step} takes a while: {said}", what=what, node=node, done=done, total=total)
