"""Deadlines that a job's owner gave it: to have begun by, and to be on devices for.

    not begun in time        Failed, and why it waited
    has had its time         saved, then Failed: what it has learned is in its newest checkpoint
    and no plan fits it      Failed: it cannot be saved, and would wait for a node for ever

They are instants of the wall clock, which outlive supervisors. It refuses to know how a job is saved (pausing.py).
"""

from __future__ import annotations

from orchestrator.domain.job import Pause
from orchestrator.domain.state import Failed, Paused, Probing, Queued, Reforming, Running, Starting, Stopping
from orchestrator.jobs.arbitration import Wait

from .draft import Draft
from .joining import drop_join
from .pausing import rest_where_asked
from .stopping import stop


def keep_time(draft: Draft, wait: Wait | None) -> None:
    """End the job where a deadline has passed. wait: why it has no devices."""
    record, state, spec = draft.record, draft.state, draft.record.spec
    if not (spec.start_by_s or spec.max_runtime_s) or isinstance(state, Stopping):
        return
    if spec.start_by_s and record.started_at is None and draft.now >= record.created_at + spec.start_by_s:
        if isinstance(state, Probing | Queued | Starting | Paused):
            why = wait.message if wait else "it was starting" if isinstance(state, Starting) else "it was paused"
            message = f"it has not begun to train within start_by_s, {spec.start_by_s:g} s: {why}"
            stop(draft, Failed(at=draft.now, message=message, verdict="not_started"))
        return
    if not spec.max_runtime_s or record.held_until(draft.now) < spec.max_runtime_s or isinstance(state, Paused):
        return
    message = f"it has been on devices for max_runtime_s, {spec.max_runtime_s:g} s; raise it, or go on from its checkpoint"
    if isinstance(state, Queued | Starting):
        stop(draft, Failed(at=draft.now, message=message, verdict="out_of_time"))
    elif isinstance(state, Reforming) and state.forming is None and state.waiting and not record.planning:
        why = f"step {record.committed} could not be saved, because no plan fits it: {state.waiting}"
        draft.say("not_saved", why)
        stop(draft, Failed(at=draft.now, message=message, verdict="out_of_time"))
    elif record.pause is None or not record.pause.ends:
        draft.set(pause=Pause(ends=message), target=None)
        drop_join(draft)
        draft.say("out_of_time", f"{message}; it makes one more step and saves it")
    if isinstance(draft.state, Running):
        rest_where_asked(draft)
