"""Checkpoints that people ask for: the generation that trains is told once, and the next one where that came to nothing.

It refuses to know how a checkpoint is made and kept (keeping.py): any of a later step than the request will do.
"""

from __future__ import annotations

from orchestrator.domain.ids import Generation
from orchestrator.domain.job import Running
from orchestrator.domain.protocol import SaveSoon

from .draft import Draft


def checkpoint_now(draft: Draft) -> None:
    record = draft.record
    # Asked again, the generation is told again: what it was told before may have come to nothing on a full disk.
    draft.set(save_asked=record.committed, save_told=Generation(0))
    when = "after the next step" if isinstance(record.state, Running) else "as soon as it trains"
    draft.say("checkpoint_asked", f"a checkpoint has been asked for; it is made {when}")


def save_where_asked(draft: Draft) -> None:
    record, state = draft.record, draft.state
    if record.save_asked is None:
        return
    if record.save_told and record.checkpoint is not None and record.checkpoint.step > record.save_asked:
        draft.set(save_asked=None)
    elif isinstance(state, Running) and record.save_told != state.generation and not state.finished:
        # What it began with was there before.
        draft.set(save_told=state.generation, save_asked=record.committed)
        device = state.plan.devices[0]
        draft.call(device.node, SaveSoon(generation=state.generation, device=device))
