"""A job's checkpoints: committed once all of one is durable, and kept as its owner asked.

It owns the list. It refuses to know how checkpoints are written and which of them are believed (believing.py).
"""

from __future__ import annotations

from dataclasses import replace

from orchestrator.domain.checkpoint import CheckpointRef
from orchestrator.domain.effects import CommitCheckpoint, PruneCheckpoints
from orchestrator.domain.events import CheckpointsPruned
from orchestrator.domain.ids import Step
from orchestrator.domain.job import Failed
from orchestrator.domain.protocol import ShardNotSaved, ShardSaved
from orchestrator.recovery.retention import kept

from .believing import believed
from .draft import Draft
from .forming import at_work, current_forming
from .stopping import stop

UNSAVED = 8
"""Steps remembered as having no checkpoint: more than can be on their way to a disk at once."""
LEARNED_S = 60.0
"""After which every writer has been told of a condemned pack, so that what names it is refused."""
REFUSED_S = 120.0
"""After which nothing that was begun before can be committed any more, so that the pack may go."""


def shard_saved(draft: Draft, said: ShardSaved) -> None:
    at_it = at_work(draft)
    if at_it is None or at_it[0] != said.generation:
        return  # anything that carries an old generation is refused at the write
    have = draft.record.saving.get(said.step, ())
    if said.step in draft.record.unsaved or any(shard.device == said.shard.device for shard in have):
        return
    draft.set(saving={**draft.record.saving, said.step: (*have, said.shard)})


def shard_not_saved(draft: Draft, said: ShardNotSaved) -> None:
    """One part is lacking, so that step will have no checkpoint; the next one tries again. Said once a step."""
    at_it, record = at_work(draft), draft.record
    if at_it is None or at_it[0] != said.generation or said.step in record.unsaved:
        return
    draft.set(
        unsaved=(*record.unsaved, said.step)[-UNSAVED:],
        saving={step: shards for step, shards in record.saving.items() if step != said.step},
    )
    draft.say("checkpoint_failed", f"no checkpoint of step {said.step}: {said.device}: {said.message}")


def commit_ready_checkpoints(draft: Draft) -> None:
    """Every shard is durable and the step itself is recorded as committed: only now may the manifest be written."""
    at_it = at_work(draft)
    if at_it is None:
        return
    generation, plan = at_it
    for step, shards in sorted(draft.record.saving.items()):
        if len(shards) == plan.world_size and step <= draft.record.committed:
            draft.set(saving={s: x for s, x in draft.record.saving.items() if s != step})
            assert draft.record.profile is not None
            draft.emit(
                CommitCheckpoint(
                    job=draft.record.id,
                    step=step,
                    generation=generation,
                    shards=shards,
                    spec=draft.record.spec,
                    profile=draft.record.profile,
                    condemned=_condemned_for(draft, LEARNED_S),
                )
            )


def checkpoint_committed(draft: Draft, checkpoint: CheckpointRef) -> None:
    record = draft.record
    known = (*((record.checkpoint,) if record.checkpoint else ()), *record.older)
    if (known and checkpoint.step < known[0].step) or any(one.path == checkpoint.path for one in known):
        return  # told twice, or overtaken by a newer one
    newest = believed(draft, replace(checkpoint, at=draft.now))
    keep = kept((newest, *(one for one in known if one.step != newest.step)), record.spec.checkpoint)
    draft.set(checkpoint=newest, older=keep[1:])
    draft.say("checkpoint", f"checkpoint of step {checkpoint.step} is committed", path=checkpoint.path)
    forming = current_forming(draft)
    if forming is not None and forming.formed:
        return  # ranks may be reading one that would go; it does with the next commit
    is_saving = any(isinstance(effect, CommitCheckpoint) for effect in draft.record.outbox.values())
    doomed = () if is_saving else _condemned_for(draft, REFUSED_S)
    draft.emit(PruneCheckpoints(job=record.id, keep=keep, condemned=tuple(sorted(draft.record.condemned)), doomed=doomed))


def checkpoints_pruned(draft: Draft, said: CheckpointsPruned) -> None:
    """What should go is condemned now: from then on it is recorded, under this supervisor's term, and found by the next."""
    left = {pack: since for pack, since in draft.record.condemned.items() if pack not in said.deleted}
    draft.set(condemned={**dict.fromkeys(said.condemnable, draft.now), **left})


def _condemned_for(draft: Draft, seconds: float) -> tuple[str, ...]:
    return tuple(sorted(pack for pack, since in draft.record.condemned.items() if draft.now - since >= seconds))


def checkpoint_failed(draft: Draft, step: Step, message: str) -> None:
    draft.say("checkpoint_failed", f"checkpoint of step {step} failed: {message}")
    if step >= draft.record.spec.train.steps:
        stop(draft, Failed(at=draft.now, message=f"the final checkpoint could not be written: {message}"))
