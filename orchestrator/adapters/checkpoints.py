"""Committing checkpoints to the folder every node sees: the manifest last, then the old ones go."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

from orchestrator.domain import codec
from orchestrator.domain.checkpoint import CheckpointRef
from orchestrator.domain.effects import CommitCheckpoint

from . import manifest


class FolderCheckpoints:
    """ports.Checkpoints over <root>/jobs/<job>/checkpoints."""

    def __init__(self, root: str) -> None:
        self._root = root

    async def commit(self, effect: CommitCheckpoint) -> CheckpointRef:
        return await asyncio.to_thread(self._commit, effect)

    def _commit(self, effect: CommitCheckpoint) -> CheckpointRef:
        folder = Path(self._root) / "jobs" / effect.job / "checkpoints"
        reference = manifest.commit(
            folder / manifest.directory_name(effect.step, effect.generation),
            effect.step,
            effect.generation,
            hashlib.sha256(codec.dumps(effect.spec)).hexdigest(),
            effect.spec.train.seed,
            effect.shards,
            spec=effect.spec,
            profile=effect.profile,
        )
        manifest.prune(folder, effect.spec.checkpoint.keep_last)
        return reference
