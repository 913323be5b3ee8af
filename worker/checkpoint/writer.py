"""Writing one device's part of a checkpoint: a snapshot in memory becomes a data file and an index, durable or not at all.

It refuses to know where the snapshot comes from and what the files are a part of: committing the whole is the control
plane's business.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from orchestrator.adapters.manifest import directory_name, write_durably
from orchestrator.domain.checkpoint import ShardRef
from orchestrator.domain.generation import Answer
from orchestrator.domain.ids import Device, Generation, Step
from orchestrator.domain.profile import Profile

from ..state.pieces import KINDS, Piece
from .format import ITEM_BYTES, StoredPiece, chunks, encode_index, file_stem

if TYPE_CHECKING:  # who writes needs no torch, which takes seconds to import
    from ..state.holdings import Holdings


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A copy of the owned state right after `step`, which `answer` committed. state: (3, n) fp32."""

    step: Step
    answer: Answer | None
    generation: Generation
    pieces: tuple[Piece, ...]
    state: npt.NDArray[np.float32]

    @staticmethod
    def of(holdings: Holdings, generation: Generation, answer: Answer | None = None) -> Snapshot:
        # Row by row: an accelerator has no room for a dense copy.
        state = np.stack([row[: holdings.owned].cpu().numpy() for row in holdings.state])
        return Snapshot(
            step=holdings.step,
            answer=answer,
            generation=generation,
            pieces=holdings.owned_pieces,
            state=state,
        )


def write_shard(root: Path, profile: Profile, device: Device, snapshot: Snapshot) -> ShardRef:
    """One data file and its index, durable when this returns. Raises OSError."""
    directory = root / directory_name(snapshot.step, snapshot.generation)
    directory.mkdir(parents=True, exist_ok=True)
    stem = file_stem(device)
    data = directory / f"{stem}.bin"
    draft = data.with_suffix(".bin.tmp")
    stored: list[StoredPiece] = []
    position = 0
    with draft.open("wb") as file:
        for row, kind in enumerate(KINDS):
            for piece in snapshot.pieces:
                for interval in chunks(piece.interval):
                    low = piece.offset + interval.start - piece.interval.start
                    content = snapshot.state[row, low : low + len(interval)].data.cast("B")
                    file.write(content)
                    stored.append(StoredPiece(interval, kind, position, hashlib.sha256(content).hexdigest()))
                    position += len(interval) * ITEM_BYTES
        file.flush()
        os.fsync(file.fileno())
    draft.replace(data)
    index = encode_index(
        step=snapshot.step,
        generation=snapshot.generation,
        answer=snapshot.answer,
        device=device,
        data=data.name,
        num_bytes=position,
        profile=profile,
        pieces=tuple(stored),
    )
    write_durably(directory / f"{stem}.json", index)
    return ShardRef(device=device, index=f"{stem}.json", sha256=hashlib.sha256(index).hexdigest())
