"""Whether a checkpoint is what was saved: the first step after a restore has to be the one that was made after it.

    newest ── the step after it passes ──> its losses are noted
    restored from ──> canary: the first step ──> proven | distrusted, and the next older one is the newest

It owns what is believed. It refuses to know how training is restored and what becomes of a generation that must end.
"""

from __future__ import annotations

from dataclasses import replace

from orchestrator.domain.checkpoint import After, Canary, CheckpointRef
from orchestrator.domain.effects import NoteCheckpoint
from orchestrator.domain.generation import Answer, Unreadable
from orchestrator.domain.ids import Generation, Step
from orchestrator.domain.origin import FromMemory, FromSeed, Restore
from orchestrator.domain.plan import Plan
from orchestrator.domain.state import Failed, Stopping
from orchestrator.recovery.canary import difference
from orchestrator.recovery.retention import reads

from .draft import Draft
from .pacing import pacing_of
from .stopping import stop

MAX_PENDING, MAX_PENDING_ENTRIES = 4, 40
"""Steps whose checkpoints may be written at a time, or were never finished; and where every step is saved."""
MAX_DISTRUSTED = 2
"""Checkpoints in a row that are not what was saved: then it is the program, the data or the machines that have changed."""


def restored_from(draft: Draft, restore: Restore) -> None:
    """Training goes on from there; what is known of the step after a checkpoint will be looked for again.

    Memory that a canary has not left yet is no better than the checkpoint it was filled from.
    """
    checkpoint = None if isinstance(restore, FromSeed) else restore.checkpoint
    is_known = checkpoint is not None and bool(checkpoint.after)
    if isinstance(restore, FromMemory) and not is_known:
        return
    draft.set(canary=Canary(checkpoint=checkpoint) if checkpoint is not None and is_known else None)


def first_step_passed(draft: Draft, answer: Answer, plan: Plan | None) -> bool:
    """Whether this step may count; False where what training was restored from was not what was saved.

    The step after the newest checkpoint is noted for those who will be restored from that.
    """
    record = draft.record
    canary = record.canary
    bits = _bits(draft, plan)
    if canary is not None:
        if canary.failed:
            return False
        if answer.step == canary.checkpoint.step + 1:
            failed = difference(canary.checkpoint, answer.losses, bits, record.spec.train.dtype)
            if failed:
                draft.set(canary=replace(canary, failed=failed))
                return False
            _proven(draft, canary.checkpoint)
    _note_after(draft, Step(answer.step - 1), After(losses=answer.losses, bits=bits))
    return True


def believed(draft: Draft, checkpoint: CheckpointRef) -> CheckpointRef:
    """One that has just been committed, with what is known of the step after it; told to the disk too."""
    known = draft.record.after.get(checkpoint.step)
    if known is None:
        return checkpoint
    noted = replace(checkpoint, after=known.losses, bits=known.bits)
    draft.set(after={step: after for step, after in draft.record.after.items() if step > checkpoint.step})
    _note_on_disk(draft, noted)
    return noted


def _note_after(draft: Draft, saved: Step, after: After) -> None:
    """saved: the step before; its checkpoint may be committed already, or still be written."""
    record, newest, pacing = draft.record, draft.record.checkpoint, pacing_of(draft.record)
    if newest is not None and newest.step == saved:
        if newest.after:
            return
        noted = replace(newest, after=after.losses, bits=after.bits)
        draft.set(checkpoint=noted)
        if newest.at:  # this job's own: what it began with is another's
            _note_on_disk(draft, noted)
    elif record.save_asked is not None or _may_be_saved(draft, saved):
        # Of one that was asked for nobody but its ranks know at first which step it is of.
        most = MAX_PENDING_ENTRIES if pacing.is_journal or record.save_asked is not None else MAX_PENDING
        draft.set(after=dict(sorted({**record.after, saved: after}.items())[-most:]))


def _may_be_saved(draft: Draft, step: Step) -> bool:
    record = draft.record
    return step in record.saving or pacing_of(record).is_due(step, Step(record.spec.train.steps))


def nobody_asks(draft: Draft) -> None:
    """For a checkpoint of whichever step, any more: only those that are due, or on their way, will be looked for."""
    draft.set(after={step: after for step, after in draft.record.after.items() if _may_be_saved(draft, step)})


def _note_on_disk(draft: Draft, noted: CheckpointRef) -> None:
    """For whoever has no record. Not of every step: where there is a journal the record alone knows it."""
    if noted.kind == "base":
        draft.emit(NoteCheckpoint(job=draft.record.id, checkpoint=noted, folder=draft.checkpoint_folder))


def void_where_canary_failed(draft: Draft, generation: Generation) -> bool:
    """Where the first step after a restore differed nothing of its generation counts; False where the job ends of it."""
    canary = draft.record.canary
    if canary is None or not canary.failed:
        return True
    since = _suspect(draft, canary.checkpoint)
    # Where a journal's base is all that is left it has its own trial, and is not the next in a row.
    counts = since <= canary.checkpoint.step - canary.checkpoint.depth
    draft.set(canary=None, void=generation, distrusted=draft.record.distrusted + counts)
    distrust(draft, canary.checkpoint, f"the first step after it differs: {canary.failed}", since=since)
    if isinstance(draft.state, Stopping):
        return False
    if draft.record.distrusted < MAX_DISTRUSTED:
        return True
    stop(
        draft,
        Failed(
            at=draft.now,
            message=f"what training was restored from {draft.record.distrusted} times in a row is not what was saved "
            f"({canary.failed}); has the program, the data or the machines' software changed?",
        ),
    )
    return False


def _suspect(draft: Draft, checkpoint: CheckpointRef) -> Step:
    """Of a journal nobody knows which entry is wrong: all count as that, and its base where there is an older one."""
    has_another = any(not reads(checkpoint, one) for one in draft.record.older)
    return Step(checkpoint.step - checkpoint.depth + (0 if has_another else min(1, checkpoint.depth)))


def distrust_unreadable(draft: Draft, found: Unreadable, why: str) -> None:
    for one in (draft.record.checkpoint, *draft.record.older):
        if one is not None and (one.step, one.generation) == (found.step, found.generation):
            distrust(draft, one, why, since=found.since or one.step)
            return


def distrust(draft: Draft, checkpoint: CheckpointRef, why: str, *, since: Step | None = None) -> None:
    """Never restore from it again. What was written goes with the next that is committed.

    since: nor from any of what it is read through, from this step on.
    """
    record = draft.record
    known = (*((record.checkpoint,) if record.checkpoint else ()), *record.older)
    first = checkpoint.step if since is None else since
    left = tuple(one for one in known if not (reads(checkpoint, one) and one.step >= first))
    if left == known:
        return
    newest = left[0] if left else None
    if newest is None and record.spec.checkpoint.restore_from:
        # From the seed it would be another job than was asked for.
        begun = "to begin with " if not checkpoint.at else ""
        said = f"the checkpoint of step {checkpoint.step} {begun}is no good, and there is no other: {why}"
        stop(draft, Failed(at=draft.now, message=said))
        return
    draft.set(checkpoint=newest, older=left[1:])
    then = f"the one of step {newest.step} is the newest now" if newest else "there is no other, so training begins again"
    draft.say(
        "checkpoint_distrusted",
        f"the checkpoint of step {checkpoint.step} is not restored from: {why}; {then}",
        path=checkpoint.path,
    )


def _proven(draft: Draft, checkpoint: CheckpointRef) -> None:
    def prove(one: CheckpointRef) -> CheckpointRef:
        return replace(one, is_proven=True) if one.path == checkpoint.path else one

    record = draft.record
    draft.set(
        canary=None,
        distrusted=0,
        checkpoint=prove(record.checkpoint) if record.checkpoint else None,
        older=tuple(map(prove, record.older)),
    )
    draft.say("checkpoint_proven", f"step {checkpoint.step + 1} came out as after the checkpoint of step {checkpoint.step}")


def _bits(draft: Draft, plan: Plan | None) -> str:
    """The same where losses are the same to the bit; empty where nobody can say."""
    train = draft.record.spec.train
    if plan is None or (train.device != "cpu" and not train.exact):
        return ""
    return f"tp{plan.tp} on {' and '.join(sorted({str(draft.kinds.get(node)) for node in plan.nodes}))}"
