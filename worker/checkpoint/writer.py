"""Writing one device's part of a checkpoint beside training: a snapshot is taken in the step, a thread writes it.

It says `ShardSaved` only when pack, index and directory are on disk; committing the whole is the control plane's business.
A part that cannot be written (a full disk) is logged and not announced, so that checkpoint never becomes one; training goes
on and the next checkpoint tries again.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from pathlib import Path

from orchestrator.domain.errors import EverstepError
from orchestrator.domain.ids import Device
from orchestrator.domain.profile import Profile
from orchestrator.domain.protocol import ShardSaved

from .shard import ShardWriter
from .snapshot import Snapshot

__all__ = ["CheckpointWriter", "NotSaved", "ShardWriter", "Snapshot"]

log = logging.getLogger(__name__)


class NotSaved(EverstepError):
    """The final checkpoint cannot be written."""


class CheckpointWriter:
    """At most one snapshot waits while another is written; a third makes the step wait. The first starts the thread."""

    def __init__(self, root: Path, profile: Profile, device: Device, on_shard: Callable[[ShardSaved], None]) -> None:
        self._shards = ShardWriter(root, profile, device)
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
                shard = self._shards.write(snapshot)
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
