"""A job's checkpoints: committed once all of one is durable, and kept as its owner asked.

    whole state   all shards durable, its step recorded ──> commit
    entry         the same, and the one before it committed ──> commit
                  that one never will be ──> adrift: a base is asked for, and until it comes entries are nothing

It owns the list. It refuses to know how checkpoints are written, how often (pacing.py) and which of them are believed
(believing.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from orchestrator.domain.checkpoint import CheckpointRef, SaveCost, ShardRef
from orchestrator.domain.effects import CommitCheckpoint, PruneCheckpoints
from orchestrator.domain.events import CheckpointsPruned
from orchestrator.domain.host_events import ShardNotSaved, ShardSaved
from orchestrator.domain.ids import Generation, Step
from orchestrator.domain.requests import SaveSoon
from orchestrator.domain.state import Failed, Running
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
AT_ONCE = 8
"""Commits under way at most: after a silence of hosts very many may be ready."""
BEHIND = 32
"""Entries that may wait for the one before them to be committed."""
AGAIN = 16
"""Steps after which a base is asked for again (a full disk has least room for whole states), and people are told again."""
COSTS = 16
"""Saves of either kind whose cost is remembered."""


def shard_saved(draft: Draft, said: ShardSaved) -> None:
    at_it = at_work(draft)
    if at_it is None or at_it[0] != said.generation:
        return  # anything that carries an old generation is refused at the write
    record, shard = draft.record, said.shard
    have = record.saving.get(said.step, ())
    if said.step in record.unsaved or any(other.device == shard.device for other in have):
        return
    if record.adrift is not None and said.step >= record.adrift:
        if shard.kind == "journal":
            return
        draft.set(adrift=None)
    draft.set(saving={**record.saving, said.step: (*have, shard)})


def shard_not_saved(draft: Draft, said: ShardNotSaved) -> None:
    """One part is lacking, so that step will have no checkpoint; the next one tries again. Said once a step."""
    at_it, record = at_work(draft), draft.record
    if at_it is None or at_it[0] != said.generation or said.step in record.unsaved:
        return
    draft.set(unsaved=(*record.unsaved, said.step)[-UNSAVED:], saving=_without(record.saving, (said.step,)))
    _complain(draft, said.step, f"no checkpoint of step {said.step}: {said.device}: {said.message}")
    if _has_journal(draft):
        _cut(draft, said.step, asks=not said.is_skipped)


def commit_ready_checkpoints(draft: Draft) -> None:
    """Every shard is durable and the step itself is recorded as committed: only now may the manifest be written."""
    at_it = at_work(draft)
    if at_it is None:
        return
    generation, plan = at_it
    ready = {
        step: shards
        for step, shards in sorted(draft.record.saving.items())
        if len(shards) == plan.world_size and step <= draft.record.committed
    }
    newest_base = max((step for step, shards in ready.items() if shards[0].kind == "base"), default=Step(0))
    waiting = 0
    for step, shards in ready.items():
        if step not in draft.record.saving:
            continue  # an earlier one has just been given up, and this with it
        if shards[0].kind == "base":
            # What an entry goes on from must not go while that is being committed.
            commits = _commits(draft)
            if len(commits) < AT_ONCE and not any(one.shards[0].kind == "journal" for one in commits):
                _commit(draft, generation, step, shards)
            continue
        if step < newest_base:
            draft.set(saving=_without(draft.record.saving, (step,)))
            continue
        if not _goes_on(draft, generation, step):
            if not _is_coming(draft, generation, Step(step - 1)):
                _complain(draft, step, f"no checkpoint of step {step}: there is none of step {step - 1} to go on from")
                _cut(draft, step)
                continue
            waiting += 1
            if waiting > BEHIND:
                said = f"{BEHIND} of the steps before it are not committed yet; steps come faster than that"
                _complain(draft, step, f"no checkpoint of step {step}: {said}")
                _cut(draft, step)
            continue
        _commit(draft, generation, step, shards)


def _commit(draft: Draft, generation: Generation, step: Step, shards: tuple[ShardRef, ...]) -> None:
    record = draft.record
    assert record.profile is not None
    costs = _with(record.costs, SaveCost.of(shards))
    draft.set(saving=_without(record.saving, (step,)), costs=costs, num_costs=record.num_costs + 1)
    draft.emit(
        CommitCheckpoint(
            job=record.id,
            step=step,
            generation=generation,
            shards=shards,
            spec=record.spec,
            profile=record.profile,
            condemned=_condemned_for(draft, LEARNED_S),
        )
    )


def checkpoint_committed(draft: Draft, checkpoint: CheckpointRef) -> None:
    record = draft.record
    known = (*((record.checkpoint,) if record.checkpoint else ()), *record.older)
    if (known and checkpoint.step < known[0].step) or any(one.path == checkpoint.path for one in known):
        return  # told twice, or overtaken by a newer one
    newest = believed(draft, replace(checkpoint, at=draft.now, seconds=_seconds(draft, checkpoint)))
    others = tuple(one for one in known if one.step != newest.step)
    keep = kept((newest, *others), record.spec.checkpoint)
    draft.set(checkpoint=newest, older=keep[1:])
    if newest.kind == "base":  # what is older and has not come so far is of no use any more
        draft.set(saving=_without(record.saving, (step for step in record.saving if step < newest.step)))
        draft.say("checkpoint", f"checkpoint of step {checkpoint.step} is committed", path=checkpoint.path)
    elif len(keep) == len(known) + 1:
        return  # nothing goes
    forming = current_forming(draft)
    if forming is not None and forming.formed:
        return  # ranks may be reading one that would go; it does with the next commit
    is_saving = any(isinstance(effect, CommitCheckpoint) for effect in draft.record.outbox.values())
    doomed = () if is_saving else _condemned_for(draft, REFUSED_S)
    draft.emit(
        PruneCheckpoints(
            job=record.id,
            keep=keep,
            condemned=tuple(sorted(draft.record.condemned)),
            doomed=doomed,
            folder=draft.checkpoint_folder,
        )
    )


def checkpoints_pruned(draft: Draft, said: CheckpointsPruned) -> None:
    """What should go is condemned now: from then on it is recorded, under this supervisor's term, and found by the next."""
    left = {pack: since for pack, since in draft.record.condemned.items() if pack not in said.deleted}
    draft.set(condemned={**dict.fromkeys(said.condemnable, draft.now), **left})


def checkpoint_failed(draft: Draft, step: Step, message: str) -> None:
    _complain(draft, step, f"checkpoint of step {step} failed: {message}")
    at_it = at_work(draft)
    if at_it is not None and _has_journal(draft) and any(one.step == step for one in _commits(draft, at_it[0])):
        _cut(draft, step)
    if step >= draft.record.spec.train.steps:
        stop(draft, Failed(at=draft.now, message=f"the final checkpoint could not be written: {message}"))


# --- a journal ------------------------------------------------------------------------------------------------------------


def _goes_on(draft: Draft, generation: Generation, step: Step) -> bool:
    """Whether the entry of `step` has something to go on from."""
    newest = draft.record.checkpoint
    return newest is not None and (newest.step, newest.generation) == (step - 1, generation)


def _is_coming(draft: Draft, generation: Generation, step: Step) -> bool:
    """Whether that checkpoint may yet be committed."""
    return step in draft.record.saving or any(one.step == step for one in _commits(draft, generation))


def _cut(draft: Draft, step: Step, *, asks: bool = True) -> None:
    """`step` has no checkpoint, so that the entries after it, up to the next base, are nothing.

    asks: for a base; not where ranks know by themselves.
    """
    record = draft.record
    after = sorted(s for s in record.saving if s >= step)
    bases = [s for s in after if s > step and record.saving[s][0].kind == "base"]
    end = bases[0] if bases else None
    draft.set(
        saving=_without(record.saving, (s for s in after if end is None or s < end)),
        adrift=None if end is not None else step if record.adrift is None else min(record.adrift, step),
    )
    state = draft.state
    if not asks or end is not None or not isinstance(state, Running):
        return
    if not record.base_asked or record.committed >= record.base_asked + AGAIN:
        device = state.plan.devices[0]
        draft.set(base_asked=record.committed)
        draft.call(device.node, SaveSoon(generation=state.generation, device=device))


def _complain(draft: Draft, step: Step, message: str) -> None:
    """Of a journal, whose every step may fail for one reason, it is said now and then."""
    record = draft.record
    if _has_journal(draft):
        if record.complained and record.complained <= step < record.complained + AGAIN:
            return
        draft.set(complained=step)
    draft.say("checkpoint_failed", message)


def _has_journal(draft: Draft) -> bool:
    record = draft.record
    return bool(record.pacing and record.pacing.is_journal) or record.spec.checkpoint.policy == "journal"


# --- what is on its way ---------------------------------------------------------------------------------------------------


def _commits(draft: Draft, generation: Generation | None = None) -> list[CommitCheckpoint]:
    """Under way, of one generation or of any."""
    under_way = (effect for effect in draft.record.outbox.values() if isinstance(effect, CommitCheckpoint))
    return [effect for effect in under_way if generation is None or effect.generation == generation]


def _seconds(draft: Draft, checkpoint: CheckpointRef) -> float:
    """For which its slowest host wrote."""
    at_it = [one for one in _commits(draft, checkpoint.generation) if one.step == checkpoint.step]
    return SaveCost.of(at_it[0].shards).write_s if at_it else 0.0


def _without(saving: Mapping[Step, tuple[ShardRef, ...]], steps: Iterable[Step]) -> Mapping[Step, tuple[ShardRef, ...]]:
    gone = frozenset(steps)
    return {step: shards for step, shards in saving.items() if step not in gone}


def _with(costs: tuple[SaveCost, ...], cost: SaveCost) -> tuple[SaveCost, ...]:
    """The latest of each kind."""
    same = [one for one in costs if one.kind == cost.kind][-(COSTS - 1) :]
    return (*(one for one in costs if one.kind != cost.kind), *same, cost)


def _condemned_for(draft: Draft, seconds: float) -> tuple[str, ...]:
    return tuple(sorted(pack for pack, since in draft.record.condemned.items() if draft.now - since >= seconds))
