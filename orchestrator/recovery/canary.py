"""Whether the first step after a restore is the one that was made after the checkpoint: the same losses, id by id."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.domain.checkpoint import CheckpointRef
from orchestrator.domain.spec import Dtype

TOLERANCE: dict[Dtype, float] = {"fp32": 1e-4, "bf16": 1e-2}
"""Of a loss, in proportion, where another tp degree or kind of device adds up in another order."""


def difference(checkpoint: CheckpointRef, losses: Sequence[float], bits: str, dtype: Dtype) -> str:
    """How `losses`, of the step after the checkpoint, differ from those recorded; empty where they may.

    bits: what the new losses' bits belong to; where that is what the recorded ones' do, they are equal to the bit.
    """
    if not checkpoint.after:
        return ""
    if len(losses) != len(checkpoint.after):
        return f"{len(losses)} micro-batches where {len(checkpoint.after)} were recorded"
    gaps = [abs(now - before) for now, before in zip(losses, checkpoint.after, strict=True)]
    tolerance = 0.0 if bits and bits == checkpoint.bits else TOLERANCE[dtype]
    allowed = [tolerance * max(1.0, abs(one)) for one in checkpoint.after]
    over = [number for number, (gap, most) in enumerate(zip(gaps, allowed, strict=True)) if not gap <= most]
    if not over:
        return ""
    worst = max(over, key=lambda number: gaps[number])
    return (
        f"{len(over)} of {len(losses)} micro-batches have other losses than were recorded; "
        f"micro-batch {worst} has {losses[worst]:.9g}, it had {checkpoint.after[worst]:.9g}"
    )
