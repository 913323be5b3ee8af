"""What is done to small checkpoints on purpose: bytes changed at random, and processes killed in the middle of saving.

Each count is of what was tried, and of what was found or survived.
"""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import numpy as np

from orchestrator.adapters import manifest
from orchestrator.adapters.durable import Bytes, Disk, Handle
from orchestrator.adapters.manifest import CheckpointCorrupt
from orchestrator.domain.checkpoint import CheckpointRef
from orchestrator.domain.ids import Device, Generation, NodeId, Step
from orchestrator.domain.profile import Interval, Line, Profile
from worker.checkpoint.reader import read
from worker.checkpoint.shard import ShardWriter
from worker.checkpoint.snapshot import Snapshot
from worker.checkpoint.verify import verify
from worker.state.pieces import KINDS, Piece

FLIPS = 1000
NUMEL = 20_000
HALVES = ((0, NUMEL // 2), (NUMEL // 2, NUMEL))
PROFILE = Profile(
    num_layers=1,
    lines=(Line(name="line", shape=(NUMEL,), split=False, layers=(0,), decay=True),),
    divisors=(),
    activation_bytes=0,
)
G = Generation(1)


def flips(folder: Path) -> dict[str, int]:
    """A byte of a checkpoint's files is changed, and the checkpoint verified; again and again."""
    path = Path(_save(folder, 5).path)
    files = [file for file in folder.rglob("*") if file.is_file()]
    sizes = [file.stat().st_size for file in files]
    rng, found = random.Random(0), 0
    for _ in range(FLIPS):
        (file,) = rng.choices(files, sizes)
        content = bytearray(file.read_bytes())
        at, by = rng.randrange(len(content)), rng.randint(1, 255)
        content[at] ^= by
        file.write_bytes(content)
        try:
            found += bool(verify(path).bad)
        except CheckpointCorrupt:
            found += 1
        content[at] ^= by
        file.write_bytes(content)
    assert not verify(path).bad
    return {"flips_tried": FLIPS, "flips_found": found}


def kills(folder: Path) -> dict[str, int]:
    """A process that saves, commits and removes is killed at each of its calls that change the disk."""
    before = folder / "before"
    _save(before, 5)
    calls = _Counting()
    shutil.copytree(before, folder / "counted")
    _turn(folder / "counted", calls)
    survived = 0
    for number in range(1, calls.number + 1):
        job = folder / f"killed-{number}"
        shutil.copytree(before, job)
        status = _in_a_child(job, number)
        newest = manifest.latest(job)
        is_right = newest is not None and not verify(Path(newest.path)).bad and _restored(Path(newest.path)) == newest.step
        survived += status == KILLED and is_right
        shutil.rmtree(job)
    return {"kill_points": calls.number, "kill_points_ok": survived}


KILLED = 9


class _Counting(Disk):
    def __init__(self) -> None:
        self.number = 0

    def call(self) -> None:
        self.number += 1

    def make_directory(self, path: Path) -> None:
        self.call()
        super().make_directory(path)

    def create(self, path: Path) -> Handle:
        self.call()
        return super().create(path)

    def write(self, descriptor: Handle, content: Bytes) -> None:
        self.call()
        super().write(descriptor, content)

    def sync(self, descriptor: Handle) -> None:
        self.call()
        super().sync(descriptor)

    def rename(self, old: Path, new: Path) -> None:
        self.call()
        super().rename(old, new)

    def unlink(self, path: Path) -> None:
        self.call()
        super().unlink(path)

    def remove_directory(self, path: Path) -> None:
        self.call()
        super().remove_directory(path)

    def sync_directory(self, path: Path) -> None:
        self.call()
        super().sync_directory(path)


class _Killing(_Counting):
    def __init__(self, at: int) -> None:
        super().__init__()
        self._at = at

    def call(self) -> None:
        super().call()
        if self.number == self._at:
            os._exit(KILLED)


def _turn(folder: Path, disk: Disk) -> None:
    _save(folder, 6, disk)
    manifest.prune(folder, 1, disk)


def _save(folder: Path, step: int, disk: Disk | None = None) -> CheckpointRef:
    disk = disk or Disk()
    shards = []
    for number, (start, stop) in enumerate(HALVES):
        state = np.full((len(KINDS), stop - start), step, dtype=np.float32)
        state[:, ::7] += np.random.default_rng(number).standard_normal(state[:, ::7].shape, dtype=np.float32)
        state[0, 0] = step
        snapshot = Snapshot(
            step=Step(step), answer=None, generation=G, pieces=(Piece(Interval("line", start, stop), 0),), state=state
        )
        shards.append(ShardWriter(folder, PROFILE, Device(NodeId("n"), number), disk).write(snapshot))
    path = folder / manifest.directory_name(Step(step), G)
    return manifest.commit(path, Step(step), G, "hash", 0, shards, disk=disk)


def _restored(path: Path) -> int:
    """The step that the state read says it is of."""
    content = read(path, [Interval("line", *half) for half in HALVES])
    steps = {int(content[Interval("line", *half), "p"][0]) for half in HALVES}
    return steps.pop() if len(steps) == 1 else -1


def _in_a_child(folder: Path, number: int) -> int:
    """Save there, killed at that call: its exit status."""
    child = os.fork()
    if not child:
        try:
            _turn(folder, _Killing(number))
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
