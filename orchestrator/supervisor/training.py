"""Committed steps of a running generation."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

from orchestrator.domain.events import StepRecord
from orchestrator.domain.generation import Answer, Evaluation
from orchestrator.domain.host_events import RankFinished, StepsPassed
from orchestrator.domain.ids import Generation
from orchestrator.domain.incident import Incident
from orchestrator.domain.state import Reforming, Running, Starting, Succeeded

from .believing import first_step_passed
from .charging import without
from .draft import Draft
from .forming import RANK_PHASES, now_running
from .stopping import stop

RECENT = 15
"""Steps whose median is the typical one."""


def steps_passed(draft: Draft, said: StepsPassed) -> None:
    """Votes that passed are commits, whoever tells of them first; a settled generation's late ones change nothing."""
    state = draft.state
    if said.generation == draft.record.void:
        return
    if isinstance(state, Starting | Reforming):
        if state.forming and state.forming.formed and said.generation == state.forming.generation:
            now_running(draft)
        elif not (
            isinstance(state, Reforming)
            and said.generation == state.closing.generation
            and state.closing.settlement is None
        ):
            return
    elif not (isinstance(state, Running) and state.generation == said.generation):
        return
    for answer, at in zip(said.answers, said.at, strict=True):
        unseen = answer.step - draft.record.committed - 1
        if unseen < 0:
            continue  # told by another host already
        if unseen:
            # Hosts forget the oldest while nobody listens; a later vote proves that these had passed.
            draft.say("steps_untold", f"the {unseen} steps before step {answer.step} passed, and their losses are lost")
        if not record_step(draft, said.generation, answer, at):
            return


def record_step(draft: Draft, generation: Generation, answer: Answer, seen_at: float | None) -> bool:
    """Whether it counts: a first one after a restore does not where it is not the one made after the checkpoint.

    seen_at: when it passed, by a host's clock; None where reports say that it did, and nobody when.
    """
    if not first_step_passed(draft, answer, draft.record.plans.get(generation)):
        return False
    record = draft.record
    # Across steps whose losses are lost it would be the time of all of them.
    is_next = record.last_step_at is not None and answer.step == record.committed + 1
    at = draft.now if seen_at is None else seen_at
    seconds = at - record.last_step_at if record.last_step_at is not None and is_next and seen_at is not None else None
    train = record.spec.train
    draft.steps.append(
        StepRecord(
            job=record.id,
            generation=generation,
            at=at,
            answer=replace(answer, maxima=()),  # for the next step's scale; no part of the curve
            tokens=train.micro_batches * train.micro_batch_size * train.sequence,
            seconds=seconds,
        )
    )
    recent = (*record.recent_step_s, seconds)[-RECENT:] if seconds is not None else record.recent_step_s
    draft.set(
        committed=answer.step,
        last_answer=answer,
        last_step_at=at,
        recent_step_s=recent,
        typical_step_s=median(recent) if recent else None,
        **(without(record.failures, answer.step) if record.failures else {}),
    )
    if answer.evaluation is not None:
        _evaluated(draft, answer.evaluation)
    incident = draft.incident
    if incident and incident.pause_s is None and incident.next_generation == generation:
        # A host's clock that contradicts ours, where the fault was seen, is another one: then ours measures both ends.
        until = at if incident.fault.at <= at <= draft.now else draft.now
        pause = until - incident.fault.at - (draft.record.typical_step_s or 0.0)
        running_at = incident.formed_at or incident.fault.at
        first = until - running_at - sum(incident.phases.get(name, 0.0) for name in ("deliver", *RANK_PHASES))
        draft.update_incident(pause_s=max(0.0, pause), phases={"first_step": max(0.0, first)})
        _end_earlier(draft, until)
        draft.say(
            "recovered",
            f"step {answer.step} committed {max(0.0, pause):.3f} s after the fault, one step not counted",
            incident=incident.number,
            pause_s=max(0.0, pause),
            rolled_back=incident.rolled_back,
        )
    return True


def final_state_evaluated(draft: Draft, said: RankFinished) -> None:
    """Every rank says the same. One of a generation that is over says so of a state that may have been rolled back."""
    if said.evaluation is not None and said.generation == draft.record.generation:
        _evaluated(draft, said.evaluation)


def _evaluated(draft: Draft, found: Evaluation) -> None:
    if draft.record.evaluation == found:
        return
    draft.set(evaluation=found)
    loss = f"{found.loss:.4f}" if found.loss is not None else "not finite"
    draft.say("evaluated", f"loss on held-out text after step {found.step}: {loss}", evaluated=found.step, loss=found.loss)


def _end_earlier(draft: Draft, until: float) -> None:
    """A generation that ran and was lost before its first commit has not ended the pause before it: this step does."""
    typical = draft.record.typical_step_s or 0.0

    def ended(one: Incident) -> Incident:
        return one if one.pause_s is not None else replace(one, pause_s=max(0.0, until - one.fault.at - typical))

    if any(one.pause_s is None for one in draft.record.incidents):
        draft.set(incidents=tuple(map(ended, draft.record.incidents)))


def finish_if_done(draft: Draft) -> None:
    """The last step is committed, evaluated and saved, as far as the job asks for that: nobody is needed any more."""
    record = draft.record
    steps = record.spec.train.steps
    saved = not record.spec.checkpoint.every or (record.checkpoint is not None and record.checkpoint.step >= steps)
    seen = record.evaluation.step if record.evaluation is not None else 0
    evaluated = not record.spec.evaluation.every or seen >= steps
    if isinstance(record.state, Starting | Running | Reforming) and record.committed >= steps and saved and evaluated:
        stop(draft, Succeeded(at=draft.now))
