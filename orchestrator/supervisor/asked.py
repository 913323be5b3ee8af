"""Checkpoints that people ask for: the generation that trains is told, again after a while where that came to nothing, and
so is the next one where the first has ended.

It refuses to know how a checkpoint is made and kept (keeping.py): any of a later step than the request will do.
"""

from __future__ import annotations

from orchestrator.domain.ids import Generation, Step
from orchestrator.domain.requests import SaveSoon
from orchestrator.domain.state import Running

from .believing import nobody_asks
from .deadlines import save_again_s
from .draft import Draft

MAX_TRIES = 9
"""Of one request, over a quarter of an hour; later checkpoints are those that are due anyway."""


def checkpoint_now(draft: Draft) -> None:
    record = draft.record
    # Asked again, the generation is told again, at once: who asks may have freed the disk.
    draft.set(save_asked=record.committed, save_told=Generation(0), save_failures=0, save_rests=False)
    when = "after the next step" if isinstance(record.state, Running) else "as soon as it trains"
    draft.say("checkpoint_asked", f"a checkpoint has been asked for; it is made {when}")


def save_where_asked(draft: Draft) -> None:
    record, state = draft.record, draft.state
    if record.save_asked is None:
        return
    if record.save_told and record.checkpoint is not None and record.checkpoint.step > record.save_asked:
        draft.set(save_asked=None, save_failures=0, save_rests=False)
        nobody_asks(draft)
    elif isinstance(state, Running) and record.save_told != state.generation:
        # What it began with was there before.
        draft.set(save_told=state.generation, save_asked=record.committed, save_rests=False)
        device = state.plan.devices[0]
        draft.call(device.node, SaveSoon(generation=state.generation, device=device))


def asked_came_to_nothing(draft: Draft, step: Step, message: str) -> None:
    """A checkpoint of this step could not be made: where it is what somebody waits for, that is said, and tried again."""
    record = draft.record
    if record.save_asked is None or not record.save_told or record.save_rests or step <= record.save_asked:
        return
    if any(later > record.save_asked for later in record.saving):
        return  # another one that will do is on its way
    failures = record.save_failures + 1
    draft.set(save_failures=failures, save_rests=True)
    said = f"the checkpoint that was asked for could not be made at try {failures} of {MAX_TRIES}: {message}"
    if failures < MAX_TRIES:
        said += f"; it is tried again in {save_again_s(failures):g} s"
    else:
        said += "; it is given up, ask for it again once there is room"
        draft.set(save_asked=None, save_failures=0, save_rests=False)
        nobody_asks(draft)
    draft.say("checkpoint_late", said, failures=failures)


def save_again(draft: Draft) -> None:
    draft.set(save_told=Generation(0), save_rests=False)
