"""Which checkpoints a job keeps: the newest, those of round steps, the best, and one that is proven to work.

Each with what it is read through: of a journal entry its base and the entries between, which are checkpoints too.
"""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.domain.checkpoint import CheckpointRef
from orchestrator.domain.spec import CheckpointSpec


def kept(checkpoints: Sequence[CheckpointRef], policy: CheckpointSpec) -> tuple[CheckpointRef, ...]:
    """checkpoints: newest first, and so is what is returned. The newest and the newest proven one are always among it.

    So is the one that the job began with, where it did: should its own be no good, the seed is no way back.
    """
    newest = list(checkpoints[: max(1, policy.keep_last)])
    proven = [next((one for one in checkpoints if one.is_proven), None)]
    round_ones = [one for one in checkpoints if policy.keep_every and one.step % policy.keep_every == 0]
    judged = [one for one in checkpoints if one.answer is not None]
    best = sorted(judged, key=_loss)[: policy.keep_best]
    begun = [one for one in checkpoints if policy.restore_from and not one.at]
    wanted = [one for one in (*newest, *proven, *round_ones, *best, *begun) if one is not None]
    return tuple(one for one in checkpoints if any(reads(other, one) for other in wanted))


def reads(checkpoint: CheckpointRef, other: CheckpointRef) -> bool:
    """Whether `checkpoint` is read through `other`, as it is through itself."""
    if checkpoint.path == other.path:
        return True
    first = checkpoint.step - checkpoint.depth
    return checkpoint.generation == other.generation and first <= other.step < checkpoint.step


def _loss(checkpoint: CheckpointRef) -> float:
    assert checkpoint.answer is not None
    return checkpoint.answer.loss
