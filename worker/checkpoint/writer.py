"""Writing one device's part of a checkpoint beside training: a snapshot is taken in the step, a thread writes it.

It says `ShardSaved` only when data, index and directory are on disk; committing the whole is the control plane's business.
A part that cannot be written (a full disk) is logged and not announced, so that checkpoint never becomes one; training goes
on and the next checkpoint tries again.
"""

from __future__ import annotations

import hashlib
import logging
import os
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from orchestrator.adapters.manifest import directory_name, write_durably
from orchestrator.domain.checkpoint import ShardRef
from orchestrator.domain.errors import EverstepError
from orchestrator.domain.generation import Answer
from orchestrator.domain.ids import Device, Generation, Step
from orchestrator.domain.profile import Profile
from orchestrator.domain.protocol import ShardSaved

from ..state.pieces import KINDS, Piece
from .format import ITEM_BYTES, StoredPiece, chunks, encode_index, file_stem

if TYPE_CHECKING:  # who writes needs no torch, which takes seconds to import
    from ..state.holdings import Holdings

log = logging.getLogger(__name__)


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


class NotSaved(EverstepError):
    """The final checkpoint cannot be written."""


class CheckpointWriter:
    """At most one snapshot waits while another is written; a third makes the step wait. The first starts the thread."""

    def __init__(self, root: Path, profile: Profile, device: Device, on_shard: Callable[[ShardSaved], None]) -> None:
        self._root = root
        self._profile = profile
        self._device = device
        self._on_shard = on_shard
        self._waiting: queue.Queue[Snapshot | None] = queue.Queue(maxsize=1)
        self._thread: threading.Thread | None = None
        self.failure: OSError | None = None
        """Why the last snapshot was not written, if it was not."""

    def save(self, snapshot: Snapshot) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="checkpoint-writer", daemon=True)
            self._thread.start()
        self._waiting.put(snapshot)

    def flush(self) -> None:
        """Return when everything saved so far has been written or has failed."""
        self._waiting.join()

    def finish(self) -> None:
        """Flush after the last snapshot there will be. Raises NotSaved where it was not written."""
        self.flush()
        if self.failure is not None:
            raise NotSaved(f"the final state could not be written: {self.failure}; free the disk and submit the job again")

    def close(self) -> None:
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (snapshot := self._waiting.get()) is not None:
            self.failure = None
            try:
                shard = write_shard(self._root, self._profile, self._device, snapshot)
            except OSError as error:
                self.failure = error
                log.error(
                    "checkpoint of step %d not written: %s; free the disk, the next one tries again", snapshot.step, error
                )
            else:
                self._on_shard(ShardSaved(generation=snapshot.generation, step=snapshot.step, shard=shard))
            finally:
                self._waiting.task_done()
        self._waiting.task_done()


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
