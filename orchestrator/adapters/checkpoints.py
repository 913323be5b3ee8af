"""Checkpoints in the folder every node sees: the manifest last, later what is known since; then the old ones go."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from orchestrator.domain.checkpoint import CheckpointRef
from orchestrator.domain.effects import CommitCheckpoint, NoteCheckpoint, OnDisk, PruneCheckpoints
from orchestrator.domain.events import CheckpointsPruned
from orchestrator.domain.spec import CheckpointSpec

from . import manifest, spec_file
from .durable import write_durably
from .places import place
from .starting_point import SINCE
from .sweeping import sweep


class FolderCheckpoints:
    """ports.Checkpoints over <root>/jobs/<job>/checkpoints, or where the job's file says."""

    def __init__(self, root: str) -> None:
        self._root = root

    async def commit(self, effect: CommitCheckpoint) -> CheckpointRef:
        return await asyncio.to_thread(self._commit, effect)

    async def keep_house(self, effect: OnDisk) -> CheckpointsPruned | None:
        match effect:
            case NoteCheckpoint(checkpoint=checkpoint):
                # What a job begins with may be another job's, whose step after it was another one.
                if place(checkpoint.path).parent == self._folder(effect):
                    await asyncio.to_thread(note, checkpoint)
                return None
            case PruneCheckpoints():
                return await asyncio.to_thread(self._prune, effect)

    def _prune(self, effect: PruneCheckpoints) -> CheckpointsPruned | None:
        kept = [place(one.path) for one in effect.keep]
        swept = sweep(self._folder(effect), kept, effect.condemned, effect.doomed)
        if not swept.condemnable and not swept.deleted:
            return None
        return CheckpointsPruned(job=effect.job, condemnable=swept.condemnable, deleted=swept.deleted)

    def _folder(self, effect: OnDisk) -> Path:
        return place(effect.folder or CheckpointSpec().folder_of(effect.job, self._root))

    def _commit(self, effect: CommitCheckpoint) -> CheckpointRef:
        folder = place(effect.spec.checkpoint.folder_of(effect.job, self._root))
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
            profile=effect.profile,
        )


def note(checkpoint: CheckpointRef) -> None:
    """Raises OSError."""
    body = {"step": checkpoint.step, "bits": checkpoint.bits, "after": list(checkpoint.after)}
    write_durably(place(checkpoint.path) / SINCE, json.dumps(body).encode())
