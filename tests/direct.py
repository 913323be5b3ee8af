"""Snapshots for ranks without a host: each is written within the step that takes it, and what was written is kept here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from orchestrator.domain.generation import Answer
from orchestrator.domain.host_events import ShardSaved
from orchestrator.domain.ids import Device, Generation, Step
from orchestrator.domain.profile import Profile
from worker.checkpoint.handover import NotSaved
from worker.checkpoint.shard import ShardWriter
from worker.checkpoint.snapshot import Snapshot
from worker.state.holdings import Holdings


class Direct:
    """Implements Snapshots."""

    def __init__(self, root: Path, profile: Profile, device: Device, shards: list[ShardSaved]) -> None:
        self._writer = ShardWriter(root, profile, device)
        self._shards = shards
        self.failure: OSError | None = None

    def lay_out(self, held: Holdings) -> None:
        return

    def is_ready(self, held: Holdings, every: int) -> bool:
        return True

    def take(self, held: Holdings, generation: Generation, answer: Answer | None, *, is_entry: bool = False) -> None:
        self.failure = None
        if is_entry:
            assert answer is not None
            snapshot = Snapshot.of_gradient(held, generation, answer)
        else:
            snapshot = Snapshot.of(held, generation, answer)
        try:
            shard = self._writer.write(snapshot)
        except OSError as error:
            self.failure = error
        else:
            self._shards.append(ShardSaved(generation=generation, step=held.step, shard=shard))

    def copied(self, *, entry: bool = False) -> None:
        return

    def skip(self, step: Step, generation: Generation, why: str) -> None:
        raise AssertionError(f"step {step} is skipped though there is always room: {why}")

    def take_last(self, held: Holdings, generation: Generation, answer: Answer | None, moved: Callable[[], None]) -> None:
        self.take(held, generation, answer)
        if self.failure is not None:
            raise NotSaved(f"the final state could not be written: {self.failure}; free the disk and submit the job again")
