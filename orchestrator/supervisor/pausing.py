"""A job is paused and resumed: it makes one more step, saves it, and holds nothing until it is wanted again.

    Queued ───────────────────────────────────────────────────────> Paused ──resume──> Queued
    Running ──told──> ranks rest after a step ──saved──> Stopping ────^
                                              `──not saved: the same ranks form again and train on

No step is made after the one that is saved, so none is made twice. It refuses to know how ranks agree on that step.
"""

from __future__ import annotations

from dataclasses import replace

from orchestrator.domain.failure import Cause, Fault
from orchestrator.domain.host_events import RankFinished
from orchestrator.domain.ids import Step
from orchestrator.domain.job import Pause
from orchestrator.domain.requests import SaveSoon
from orchestrator.domain.state import PLANNING, Failed, Paused, Probing, Queued, Running, Stopping

from .deadlines import UNSAVED_S
from .draft import Draft
from .joining import drop_join
from .reforming import begin_reform
from .stopping import stop


def pause(draft: Draft) -> None:
    record, state = draft.record, draft.state
    if record.pause is not None and record.pause.preempted:
        draft.set(pause=replace(record.pause, preempted=""))
        draft.say("pausing", "it is to pause, and not to go on by itself")
        return
    if isinstance(state, Paused | Stopping) or record.pause is not None:
        if record.pause is not None and record.pause.resumes:
            draft.set(pause=replace(record.pause, resumes=False))
            draft.say("pausing", "it is to pause after all")
        return
    draft.set(pause=Pause())
    if isinstance(state, Queued):
        return  # at once: rest_where_asked
    if isinstance(state, Probing):
        draft.say("pausing", "it pauses once its program has been described")
        return
    draft.set(target=None)
    drop_join(draft)
    draft.say("pausing", "it makes one more step, saves it and gives up its devices")


def resume(draft: Draft) -> None:
    record, state = draft.record, draft.state
    if record.pause is not None and (record.pause.preempted or record.pause.ends):
        return  # it goes on by itself, or never
    if isinstance(state, Paused):
        draft.become(Queued(reason=PLANNING))
        draft.say("resumed", f"it goes on from step {record.committed}")
    elif record.pause is not None and not _is_told(draft, record.pause):
        _need_not(draft)
    elif record.pause is not None and not record.pause.resumes:
        draft.set(pause=replace(record.pause, resumes=True))
        draft.say("resumed", "its ranks have been told to rest already; it goes on once that is done")


def rest_where_asked(draft: Draft) -> None:
    record, state, wish = draft.record, draft.state, draft.record.pause
    if wish is None:
        return
    if isinstance(state, Queued):
        draft.set(pause=None, planning=False, considered=frozenset())
        draft.become(Paused(at=draft.now))
        draft.say("paused", f"paused at step {record.committed}; nothing was held")
    elif not isinstance(state, Running):
        return
    elif wish.told != state.generation and wish.resumes:
        _need_not(draft)  # those who had been told have gone
    elif wish.told != state.generation:
        draft.set(pause=Pause(told=state.generation, preempted=wish.preempted, ends=wish.ends))
        device = state.plan.devices[0]
        draft.call(device.node, SaveSoon(generation=state.generation, device=device, rests=True))
    elif wish.step is not None and record.checkpoint is not None and record.checkpoint.step >= wish.step:
        stop(draft, _outcome(draft, wish))
    elif wish.step is not None and wish.failed is not None and wish.failed >= wish.step:
        if wish.ends:
            draft.say("not_saved", f"step {wish.step} could not be saved: {wish.why}")
            stop(draft, _outcome(draft, wish))
        else:
            _train_on(draft, wish)


def rank_rests(draft: Draft, said: RankFinished) -> None:
    """A rank has passed the step that is to be saved; one that has passed the job's last step is no news."""
    wish, state = draft.record.pause, draft.state
    if wish is None or not isinstance(state, Running) or not (wish.told == state.generation == said.generation):
        return
    if said.step < draft.record.spec.train.steps:
        draft.set(pause=replace(wish, step=said.step))


def rest_came_to_nothing(draft: Draft, step: Step, message: str) -> None:
    """A checkpoint of this step could not be made. Of several the last counts: none follows the one they rest after."""
    wish = draft.record.pause
    if wish is not None and wish.told and step > (wish.failed or 0):
        draft.set(pause=replace(wish, failed=step, why=message))


def _is_told(draft: Draft, wish: Pause) -> bool:
    """Its ranks may rest any moment, and a vote cannot be taken back; those of another generation know nothing yet."""
    state = draft.state
    return isinstance(state, Stopping) or (isinstance(state, Running) and wish.told == state.generation)


def _need_not(draft: Draft) -> None:
    draft.set(pause=None, considered=frozenset())
    draft.say("resumed", "it need not pause")


def _outcome(draft: Draft, wish: Pause) -> Paused | Failed:
    return Failed(at=draft.now, message=wish.ends, verdict="out_of_time") if wish.ends else Paused(at=draft.now)


def _train_on(draft: Draft, wish: Pause) -> None:
    draft.set(pause=None, considered=frozenset())
    if wish.preempted:
        draft.turn(unsaved_until=draft.now + UNSAVED_S)
    why = f"step {wish.step} could not be saved: {wish.why}"
    draft.say("pause_failed", f"{why}; it trains on, pause it again once there is room")
    begin_reform(draft, Fault(cause=Cause.PAUSE, message=f"not paused, {why}", at=draft.now, is_external=True))
