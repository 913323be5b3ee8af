"""Committing checkpoints to the folder every node sees: what the job is, the manifest last, then the old ones go."""

from __future__ import annotations

import asyncio
from pathlib import Path

from orchestrator.domain.checkpoint import CheckpointRef
from orchestrator.domain.effects import CommitCheckpoint

from . import manifest, spec_file


class FolderCheckpoints:
    """ports.Checkpoints over <root>/jobs/<job>/checkpoints."""

    def __init__(self, root: str) -> None:
        self._root = root

    async def commit(self, effect: CommitCheckpoint) -> CheckpointRef:
        return await asyncio.to_thread(self._commit, effect)

    def _commit(self, effect: CommitCheckpoint) -> CheckpointRef:
        folder = Path(self._root) / "jobs" / effect.job / "checkpoints"
        # First: whoever finds the manifest finds what it is of.
        spec_file.keep(folder, spec_file.Kept(job=effect.job, spec=effect.spec, profile=effect.profile))
        reference = manifest.commit(
            folder / manifest.directory_name(effect.step, effect.generation),
            effect.step,
            effect.generation,
            spec_file.hash_of(effect.spec),
            effect.spec.train.seed,
            effect.shards,
        )
        manifest.prune(folder, effect.spec.checkpoint.keep_last)
        return reference
