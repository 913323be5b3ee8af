"""However a save, a commit or a removal ends, a checkpoint is there, it is right, and none that was committed is lost."""

from __future__ import annotations

import errno
import random
import shutil
from pathlib import Path

import fsspec
import numpy as np
import pytest

from benchmarks.mishaps import kills
from orchestrator.adapters import manifest
from orchestrator.adapters.durable import Disk
from orchestrator.adapters.places import place
from orchestrator.domain.checkpoint import CheckpointRef
from orchestrator.domain.profile import Line
from tests.checkpoints import TINY, Saves, a_plan, dense
from tests.disks import Cut, Killed, Powerless, Refusing, Traced

PLAN = a_plan(1, [[0, 2], [0, 2]])


def partly(line: Line, kind: str, step: int) -> np.ndarray:
    """The table stays, so that each checkpoint is read from packs of several saves."""
    return dense(line, kind, 0 if line.name == "table" and kind != "p" else step)


def a_job(root: Path, disk: Disk | None = None) -> Saves:
    return Saves(root, PLAN, partly, disk or Traced(), TINY)


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with checkpoints of steps 4 and 5."""
    root = tmp_path_factory.mktemp("before") / "checkpoints"
    job = a_job(root)
    job.checkpoint(4)
    job.checkpoint(5)
    return root


def turn(job: Saves, committed: list[CheckpointRef]) -> None:
    """The next save, its commit, and the removal of what it replaces: what a fault may hit."""
    committed.append(job.checkpoint(6))
    manifest.prune(job.root, 1, job.disk)


def num_calls(before: Path, tmp_path: Path) -> int:
    disk = Traced()
    shutil.copytree(before, tmp_path / "traced")
    turn(a_job(tmp_path / "traced", disk), [])
    assert set(disk.calls) == {name for name in vars(Disk) if not name.startswith("_")} - {"replace_object"}
    return len(disk.calls)


def goes_on(root: Path, committed: list[CheckpointRef]) -> None:
    """What is left after a fault is right, and the next generation saves, commits and tidies up as if nothing had been."""
    newest = manifest.latest(root)
    assert newest is not None and a_job(root).is_right(newest)
    assert newest.step == 6 if committed else newest.step in (5, 6)
    job = a_job(root)
    ref = job.checkpoint(7, generation=2)
    manifest.prune(root, 1, job.disk)
    assert job.is_right(ref)
    left = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
    named = manifest.load_manifest(Path(ref.path))
    assert left == {
        *(f"packs/{pack}" for pack in named.packs),
        *(f"{Path(ref.path).name}/{shard.index}" for shard in named.shards),
        f"{Path(ref.path).name}/manifest.json",
    }


def test_killed_at_any_call(before: Path, tmp_path: Path) -> None:
    total = num_calls(before, tmp_path)
    for number in range(1, total + 1):
        root = tmp_path / f"killed-{number}"
        shutil.copytree(before, root)
        committed: list[CheckpointRef] = []
        with pytest.raises(Cut):
            turn(a_job(root, Killed(number)), committed)
        goes_on(root, committed)
    assert total > 40


def test_killed_at_any_call_that_changes_a_store_of_objects() -> None:
    """In which an object is there whole or not at all."""
    fs = fsspec.filesystem("memory")

    def begun(number: int) -> tuple[Path, Saves]:
        root = place(f"memory://killed/{number}")
        job = a_job(root)
        job.checkpoint(4)
        job.checkpoint(5)
        return root, job

    disk = Traced()
    root, _ = begun(0)
    turn(a_job(root, disk), [])
    assert {"create", "write", "sync", "replace_object", "unlink"} <= set(disk.calls) and "rename" not in disk.calls
    for number in range(1, len(disk.calls) + 1):
        root, _ = begun(number)
        committed: list[CheckpointRef] = []
        with pytest.raises(Cut):
            turn(a_job(root, Killed(number)), committed)
        newest = manifest.latest(root)
        assert newest is not None and a_job(root).is_right(newest)
        assert newest.step == 6 if committed else newest.step in (5, 6)
        job = a_job(root)
        ref = job.checkpoint(7, generation=2)
        assert job.is_right(ref) and manifest.latest(root) == ref
    fs.rm("/killed", recursive=True)


@pytest.mark.parametrize("seed", [0, 1])
def test_the_power_goes_at_any_call(before: Path, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    for number in range(1, num_calls(before, tmp_path) + 1):
        root, left = tmp_path / f"cut-{number}", tmp_path / f"left-{number}"
        shutil.copytree(before, root)
        disk, committed = Powerless(root, number), list[CheckpointRef]()
        with pytest.raises(Cut):
            turn(a_job(root, disk), committed)
        disk.leave(root, left, rng)
        goes_on(left, committed)


@pytest.mark.parametrize("names", [("write",), ("create", "make_directory"), ("sync", "sync_directory", "rename")])
def test_a_disk_that_refuses_is_said_and_tried_again(before: Path, tmp_path: Path, names: tuple[str, ...]) -> None:
    for number in range(1, num_calls(before, tmp_path) + 1, 3):
        root = tmp_path / f"full-{number}"
        shutil.copytree(before, root)
        disk = Refusing(number, *names)
        job, committed = a_job(root, disk), list[CheckpointRef]()
        try:
            turn(job, committed)
        except OSError as error:
            assert error.errno == errno.ENOSPC
        newest = manifest.latest(root)
        assert newest is not None and newest.step in (5, 6) and job.is_right(newest)
        disk.number = 10**9  # there is room again, for the same writers
        later = job.checkpoint(8)
        manifest.prune(root, 1, disk)
        assert job.is_right(later)
        assert set(job.packs()) == manifest.named_packs([manifest.load_manifest(Path(later.path))])


def test_a_save_that_does_not_fit_leaves_nothing_behind(before: Path, tmp_path: Path) -> None:
    root = tmp_path / "full"
    shutil.copytree(before, root)
    files = set(root.rglob("*.*"))
    job = a_job(root, Refusing(8, "write"))
    with pytest.raises(OSError):
        job.save(6)
    assert {path for path in root.rglob("*.*") if path.is_file()} - files == set()


def test_two_saves_in_flight(before: Path, tmp_path: Path) -> None:
    """Neither waits for the other's commit; either may fail without harm to the other."""
    for order in ((6, 7), (7,), (6,)):
        root = tmp_path / "-".join(map(str, order))
        shutil.copytree(before, root)
        job = a_job(root)
        shards = {step: job.save(step) for step in (6, 7)}
        for step in order:
            assert job.is_right(job.commit(step, 1, shards[step]))
            manifest.prune(root, 1)
        newest = manifest.latest(root)
        assert newest is not None and newest.step == max(order) and job.is_right(newest)


def test_one_that_comes_after_a_newer_one_is_refused(before: Path, tmp_path: Path) -> None:
    root = tmp_path / "late"
    shutil.copytree(before, root)
    job = a_job(root)
    shards = job.save(6)
    newest = job.checkpoint(7)
    manifest.prune(root, 1)
    with pytest.raises(manifest.CheckpointCorrupt):
        job.commit(6, 1, shards)
    assert manifest.latest(root) == newest and job.is_right(newest)


def test_two_generations_write_the_same_step(before: Path, tmp_path: Path) -> None:
    root = tmp_path / "both"
    shutil.copytree(before, root)
    old, new = a_job(root), a_job(root)
    halves = {seat.device: old.writers[seat.device].write(old.snapshot(seat, 6, 1)) for seat in PLAN.seats[:1]}
    shards = new.save(6, generation=2)
    halves |= {seat.device: old.writers[seat.device].write(old.snapshot(seat, 6, 1)) for seat in PLAN.seats[1:]}
    ref = new.commit(6, 2, shards)
    assert new.is_right(ref)
    with pytest.raises(manifest.CheckpointCorrupt, match="announced"):
        manifest.commit(new.path(6, 2), ref.step, ref.generation, "hash", 7, [*halves.values()])
    late = old.commit(6, 1, [*halves.values()])
    assert manifest.latest(root) == ref and old.is_right(late)
    assert manifest.prune(root, 1) and manifest.latest(root) == ref and new.is_right(ref)


def test_the_same_save_again_makes_other_files(before: Path, tmp_path: Path) -> None:
    root = tmp_path / "again"
    shutil.copytree(before, root)
    job = a_job(root)
    ref = job.checkpoint(6)
    other = Saves(root, PLAN, dense, Traced(), TINY)
    shards = other.save(6)
    assert job.is_right(ref), "what is committed is never written over"
    assert other.is_right(other.commit(6, 1, shards))


def test_a_process_killed_for_real_at_any_call(tmp_path: Path) -> None:
    found = kills(tmp_path)
    assert found["kill_points"] > 30 and found["kill_points_ok"] == found["kill_points"]
