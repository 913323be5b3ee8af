"""Checkpoints in the folder every node sees: the manifest last, later what is known since; then the old ones go."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from orchestrator.domain.checkpoint import CheckpointRef
from orchestrator.domain.effects import CommitCheckpoint, NoteCheckpoint, OnDisk, PruneCheckpoints
from orchestrator.domain.events import CheckpointsPruned
from orchestrator.domain.ids import JobId

from . import manifest, spec_file
from .durable import write_durably
from .starting_point import SINCE
from .sweeping import sweep


class FolderCheckpoints:
    """ports.Checkpoints over <root>/jobs/<job>/checkpoints."""

    def __init__(self, root: str) -> None:
        self._root = root

    async def commit(self, effect: CommitCheckpoint) -> CheckpointRef:
        return await asyncio.to_thread(self._commit, effect)

    async def keep_house(self, effect: OnDisk) -> CheckpointsPruned | None:
        match effect:
            case NoteCheckpoint(job=job, checkpoint=checkpoint):
                # What a job begins with may be another job's, whose step after it was another one.
                if Path(checkpoint.path).parent == self._folder(job):
                    await asyncio.to_thread(note, checkpoint)
                return None
            case PruneCheckpoints():
                return await asyncio.to_thread(self._prune, effect)

    def _prune(self, effect: PruneCheckpoints) -> CheckpointsPruned | None:
        kept = [Path(one.path) for one in effect.keep]
        swept = sweep(self._folder(effect.job), kept, effect.condemned, effect.doomed)
        if not swept.condemnable and not swept.deleted:
            return None
        return CheckpointsPruned(job=effect.job, condemnable=swept.condemnable, deleted=swept.deleted)

    def _folder(self, job: JobId) -> Path:
        return Path(self._root) / "jobs" / job / "checkpoints"

    def _commit(self, effect: CommitCheckpoint) -> CheckpointRef:
        folder = self._folder(effect.job)
        # First: whoever finds the manifest finds what it is of.
        spec_file.keep(folder, spec_file.Kept(job=effect.job, spec=effect.spec, profile=effect.profile))
        return manifest.commit(
            folder / manifest.directory_name(effect.step, effect.generation),
            effect.step,
            effect.generation,
            spec_file.hash_of(effect.spec),
            effect.spec.train.seed,
            effect.shards,
            condemned=frozenset(effect.condemned),
        )


def note(checkpoint: CheckpointRef) -> None:
    """Raises OSError."""
    body = {"step": checkpoint.step, "bits": checkpoint.bits, "after": list(checkpoint.after)}
    write_durably(Path(checkpoint.path) / SINCE, json.dumps(body).encode())
