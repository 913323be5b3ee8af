"""Checkpoints as tests make them: a small program's state as any function of line, kind and step, saved under any plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from orchestrator.adapters import manifest
from orchestrator.adapters.durable import DISK, Disk
from orchestrator.adapters.places import place
from orchestrator.domain.checkpoint import CheckpointRef, ShardRef
from orchestrator.domain.generation import Answer
from orchestrator.domain.ids import Device, Generation, NodeId, Step
from orchestrator.domain.layout import buckets
from orchestrator.domain.plan import Pipeline, Plan, Seat, Stage
from orchestrator.domain.profile import Interval, Line, Profile
from worker.checkpoint.reader import read
from worker.checkpoint.shard import ShardWriter
from worker.checkpoint.snapshot import Snapshot
from worker.state.holdings import KINDS, Holdings

CPU = torch.device("cpu")
PROFILE = Profile(
    num_layers=3,
    lines=(
        Line(name="embedding", shape=(256, 320), split=True, layers=(0,), decay=True),
        Line(name="block", shape=(8, 40), split=True, layers=(1,), decay=True),
        Line(name="norm", shape=(37,), split=False, layers=(1,), decay=False),
        Line(name="head", shape=(16, 10), split=True, layers=(2,), decay=True),
    ),
    divisors=(),
    activation_bytes=0,
)
TINY = Profile(
    num_layers=2,
    lines=(
        Line(name="table", shape=(16, 130), split=True, layers=(0,), decay=True),
        Line(name="norm", shape=(37,), split=False, layers=(1,), decay=False),
        Line(name="head", shape=(16, 10), split=True, layers=(1,), decay=True),
    ),
    divisors=(),
    activation_bytes=0,
)

Values = Callable[[Line, str, int], np.ndarray]
"""Of (line, kind, step): (numel,) fp32."""


def a_plan(tp: int, splits: list[list[int]], first: int = 0) -> Plan:
    """splits: of each pipeline, where its stages begin, and the end. first: which device takes the first seat."""
    devices = iter(Device(NodeId(f"n{i // 2}"), i % 2) for i in range(first, first + 100))
    return Plan(
        pipelines=tuple(
            Pipeline(
                stages=tuple(
                    Stage(first=a, last=b, devices=tuple(next(devices) for _ in range(tp))) for a, b in pairwise(split)
                ),
                micro_batches=(number,),
            )
            for number, split in enumerate(splits)
        )
    )


SMALL_PLAN = a_plan(1, [[0, 2, 3], [0, 2, 3]])
PLAN = a_plan(2, [[0, 2, 3], [0, 1, 3]])


def dense(line: Line, kind: str, step: int) -> np.ndarray:
    """Everything changes with every step, as Adam does it."""
    seed = [len(line.name), line.numel, "pmvg".index(kind), step]
    return np.random.default_rng(seed).standard_normal(line.numel, dtype=np.float32)


def frozen_but(*names: str) -> Values:
    """Only these lines change with the step."""

    def values(line: Line, kind: str, step: int) -> np.ndarray:
        return dense(line, kind, step if line.name in names else 0)

    return values


class Saves:
    """One job's folder, and the writers of its devices, which live from one save to the next."""

    def __init__(
        self, root: Path, plan: Plan = PLAN, values: Values = dense, disk: Disk = DISK, profile: Profile = PROFILE
    ) -> None:
        self.root = root
        self.plan = plan
        self.values = values
        self.disk = disk
        self.profile = profile
        self.spec_hash = "hash"
        self.lines = {line.name: line for line in profile.lines}
        self.writers = {device: ShardWriter(root, profile, device, disk) for device in plan.devices}

    def snapshot(self, seat: Seat, step: int, generation: int, answer: Answer | None = None) -> Snapshot:
        held = Holdings(buckets(self.plan, self.profile), seat.rank, None, Generation(generation), CPU)
        held.step = Step(step)
        for interval in held.intervals:
            rows = np.stack(
                [self.values(self.lines[interval.line], kind, step)[interval.start : interval.stop] for kind in KINDS]
            )
            held.fill(interval, torch.from_numpy(rows))
        return Snapshot.of(held, Generation(generation), answer)

    def save(self, step: int, generation: int = 1, condemned: frozenset[str] = frozenset()) -> list[ShardRef]:
        return [
            self.writers[seat.device].write(self.snapshot(seat, step, generation), condemned) for seat in self.plan.seats
        ]

    def path(self, step: int, generation: int = 1) -> Path:
        return self.root / manifest.directory_name(Step(step), Generation(generation))

    def commit(self, step: int, generation: int, shards: Sequence[ShardRef]) -> CheckpointRef:
        path = self.path(step, generation)
        return manifest.commit(path, Step(step), Generation(generation), self.spec_hash, 7, shards, disk=self.disk)

    def checkpoint(self, step: int, generation: int = 1) -> CheckpointRef:
        return self.commit(step, generation, self.save(step, generation))

    def packs(self) -> dict[str, int]:
        """Name -> bytes."""
        packs = self.root / "packs"
        return {str(path.relative_to(packs)): path.stat().st_size for path in sorted(packs.glob("*/*.pack"))}

    def stored(self, step: int) -> int:
        """Bytes in the packs that the saves of a step wrote."""
        return sum(size for name, size in self.packs().items() if f"/{step:08d}.g" in name)

    def is_right(self, ref: CheckpointRef) -> bool:
        """Whether reading gives every bit of the state at its step."""
        whole = [Interval(line.name, 0, line.numel) for line in self.profile.lines]
        content = read(place(ref.path), whole)
        return all(
            np.array_equal(content[interval, kind].numpy(), self.values(self.lines[interval.line], kind, ref.step))
            for interval in whole
            for kind in KINDS
        )
