"""Checkpoints on a file system: whole or not at all, readable under any plan, and never trusted when torn."""

from __future__ import annotations

import asyncio
import json
import resource
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from orchestrator.adapters import manifest, spec_file
from orchestrator.adapters.checkpoints import FolderCheckpoints
from orchestrator.adapters.manifest import CheckpointCorrupt, CheckpointIncomplete
from orchestrator.domain.checkpoint import CheckpointRef, ShardRef
from orchestrator.domain.effects import CommitCheckpoint
from orchestrator.domain.generation import Answer
from orchestrator.domain.ids import Generation, Step
from orchestrator.domain.layout import buckets, layout
from orchestrator.domain.plan import Plan
from orchestrator.domain.profile import CHUNK, Interval, Line
from tests.builders import JOB, a_spec
from tests.checkpoints import CPU, PROFILE, Saves, a_plan
from worker.checkpoint import packs
from worker.checkpoint.format import chunks
from worker.checkpoint.reader import read
from worker.checkpoint.shard import ShardWriter
from worker.checkpoint.snapshot import Snapshot
from worker.checkpoint.verify import verify
from worker.state.holdings import KINDS, Holdings


def value_of(line: Line, row: int, step: int = 5) -> torch.Tensor:
    generator = torch.Generator().manual_seed(hash((len(line.name), row, step)) % 1000)
    return torch.randn(line.numel, generator=generator)


def saved(
    root: Path, plan: Plan, step: int = 5, generation: int = 1, answers: tuple[Answer, ...] = ()
) -> tuple[Path, list[ShardRef]]:
    """Every device's shard of a state that is a function of line and step. answers: what each was told, where any was."""
    values = {line.name: torch.stack([value_of(line, row, step) for row in range(3)]) for line in PROFILE.lines}
    shards = []
    for seat in plan.seats:
        held = Holdings(buckets(plan, PROFILE), seat.rank, None, Generation(generation), CPU)
        held.step = Step(step)
        for interval in held.intervals:
            held.fill(interval, values[interval.line][:, interval.start : interval.stop])
        snapshot = Snapshot.of(held, Generation(generation), answers[seat.rank] if answers else None)
        shards.append(ShardWriter(root, PROFILE, seat.device).write(snapshot))
    return root / manifest.directory_name(Step(step), Generation(generation)), shards


def committed(root: Path, step: int = 5, generation: int = 1) -> CheckpointRef:
    path, shards = saved(root, a_plan(2, [[0, 2, 3], [0, 1, 3]]), step, generation)
    return manifest.commit(path, Step(step), Generation(generation), "hash", 7, shards)


def test_the_answer_of_the_step_is_kept_and_every_device_was_told_the_same(tmp_path: Path) -> None:
    answer = Answer(step=Step(5), norm=0.1, losses=(1.5, 1e-300), maxima=(0.3, 2.0**-40))
    plan = a_plan(1, [[0, 2, 3]])
    path, shards = saved(tmp_path, plan, answers=(answer, answer))
    ref = manifest.commit(path, Step(5), Generation(1), "hash", 7, shards)
    assert ref.answer == answer and manifest.latest(tmp_path) == ref
    path, shards = saved(tmp_path, plan, generation=2, answers=(answer, replace(answer, norm=0.2)))
    with pytest.raises(CheckpointIncomplete, match="2 different answers"):
        manifest.commit(path, Step(5), Generation(2), "hash", 7, shards)


def test_what_one_plan_wrote_any_other_reads(tmp_path: Path) -> None:
    ref = committed(tmp_path)
    assert manifest.latest(tmp_path) == ref
    other = a_plan(1, [[0, 1, 2, 3]])
    for device in other.devices:
        intervals = layout(other, PROFILE, mirrors=1).held(device)
        content = read(Path(ref.path), intervals)
        for line in PROFILE.lines:
            for interval in (i for i in intervals if i.line == line.name):
                for row, kind in enumerate(KINDS):
                    assert torch.equal(content[interval, kind], value_of(line, row)[interval.start : interval.stop])


def test_chunks_lie_on_the_grid_of_the_line() -> None:
    cut = list(chunks(Interval("x", CHUNK - 10, 3 * CHUNK + 5)))
    assert [(c.start, c.stop) for c in cut] == [
        (CHUNK - 10, CHUNK),
        (CHUNK, 2 * CHUNK),
        (2 * CHUNK, 3 * CHUNK),
        (3 * CHUNK, 3 * CHUNK + 5),
    ]


def test_a_manifest_says_what_it_is_of_and_whoever_finds_it_finds_the_jobs_file(tmp_path: Path) -> None:
    """By itself: nothing else is left where Redis is gone."""
    spec, profile = a_spec(), replace(PROFILE, program_sha256="ab" * 32)
    folder = tmp_path / "jobs" / JOB / "checkpoints"
    path, shards = saved(folder, a_plan(2, [[0, 2, 3]]), 5, 3)
    effect = CommitCheckpoint(
        job=JOB, step=Step(5), generation=Generation(3), shards=tuple(shards), spec=spec, profile=profile
    )
    ref = asyncio.run(FolderCheckpoints(str(tmp_path)).commit(effect))
    assert ref.path == str(path)
    body = json.loads((path / "manifest.json").read_bytes())
    assert (body["step"], body["generation"], body["seed"], body["dtype"]) == (5, 3, spec.train.seed, "fp32")
    assert body["shapes"] == {line.name: list(line.shape) for line in PROFILE.lines}
    assert body["lines"] == {line.name: line.numel for line in PROFILE.lines}
    assert (body["program_hash"], body["spec_hash"]) == ("ab" * 32, spec_file.hash_of(spec))
    assert [shard[2:] for shard in body["shards"]] == [
        [one.index, one.sha256] for one in sorted(shards, key=lambda s: s.device)
    ]
    assert spec_file.load(folder, body["spec_hash"]) == spec_file.Kept(job=JOB, spec=spec, profile=profile)


def test_a_missing_or_doubled_shard_is_not_committed(tmp_path: Path) -> None:
    path, shards = saved(tmp_path, a_plan(2, [[0, 2, 3]]))
    for wrong in (shards[1:], shards[:-1], [*shards, shards[0]], []):
        with pytest.raises(CheckpointIncomplete):
            manifest.commit(path, Step(5), Generation(1), "hash", 7, wrong)
    with pytest.raises(CheckpointIncomplete):
        manifest.commit(path, Step(6), Generation(1), "hash", 7, shards)
    assert manifest.latest(tmp_path) is None
    assert manifest.commit(path, Step(5), Generation(1), "hash", 7, shards) == manifest.latest(tmp_path)


def test_a_flipped_bit_is_found_when_read_and_named(tmp_path: Path) -> None:
    ref = committed(tmp_path)
    data = next(path for path in tmp_path.glob("packs/*/*.pack") if path.stat().st_size > 100_000)
    content = bytearray(data.read_bytes())
    content[2000] ^= 4
    data.write_bytes(content)
    assert manifest.latest(tmp_path) == ref, "tensor data is checked when it is read"
    with pytest.raises(CheckpointCorrupt, match=rf"{data.parent.name}/{data.name}: p of embedding"):
        read(Path(ref.path), [Interval("embedding", 0, 256 * 320)])


@pytest.mark.parametrize("pattern", ["../packs/*/*10.g1*.pack", "*.json", "manifest.json"])
def test_a_truncated_or_lost_file_uncommits_the_checkpoint(tmp_path: Path, pattern: str) -> None:
    older = committed(tmp_path, step=5)
    for damage in ("truncate", "remove", "rewrite"):
        newer = committed(tmp_path, step=10)
        assert manifest.latest(tmp_path) == newer
        file = sorted(Path(newer.path).glob(pattern))[0]
        content = file.read_bytes()
        match damage:
            case "truncate":
                file.write_bytes(content[: len(content) // 2])
            case "remove":
                file.unlink()
            case "rewrite":
                file.write_bytes(content.replace(b"1", b"2", 1) + b" " * (file.suffix == ".pack"))
        assert manifest.latest(tmp_path) == older
        with pytest.raises(CheckpointCorrupt):
            read(Path(newer.path), [Interval("norm", 0, 37)])
        shutil.rmtree(newer.path)
        for pack in tmp_path.glob("packs/*/*10.g1*"):
            pack.unlink()


def test_strays_and_half_written_directories_are_stepped_over(tmp_path: Path) -> None:
    assert manifest.latest(tmp_path / "nowhere") is None
    (tmp_path / "step-00000099.g9").mkdir()
    (tmp_path / "step-00000098.g9").mkdir()
    (tmp_path / "step-00000098.g9" / "manifest.json").write_text(json.dumps({"step": 98}))
    (tmp_path / "step-x.g1").mkdir()
    (tmp_path / "step-00000097.g1").write_text("a file")
    (tmp_path / "notes.txt").write_text("mine")
    assert manifest.latest(tmp_path) is None
    ref = committed(tmp_path)
    assert manifest.latest(tmp_path) == ref
    assert manifest.prune(tmp_path, 1) == ()
    assert (tmp_path / "notes.txt").exists() and (tmp_path / "step-00000099.g9").exists()


def test_prune_keeps_the_newest_and_what_may_still_be_written(tmp_path: Path) -> None:
    refs = [committed(tmp_path, step=step, generation=2) for step in (5, 10, 15, 20)]
    saved(tmp_path, a_plan(1, [[0, 3]]), step=12)
    saved(tmp_path, a_plan(1, [[0, 3]]), step=25, generation=2)
    removed = manifest.prune(tmp_path, 2)
    assert {path.name for path in removed} == {"step-00000005.g2", "step-00000010.g2", "step-00000012.g1"}
    assert manifest.latest(tmp_path) == refs[-1]
    assert manifest.prune(tmp_path, 0) == (Path(refs[2].path),)
    assert (tmp_path / "step-00000025.g2").exists()


def test_a_later_generation_of_the_same_step_is_newer(tmp_path: Path) -> None:
    committed(tmp_path, generation=2)
    newer = committed(tmp_path, generation=10)
    assert manifest.latest(tmp_path) == newer


def test_more_packs_than_a_process_may_open_are_read_and_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a job of thousands of devices."""
    saves = Saves(tmp_path, a_plan(2, [[0, 1, 2, 3]] * 8))
    ref = saves.checkpoint(5)
    monkeypatch.setattr(packs, "MOST_PACKS", 2)
    room = 2 * packs.THREADS + 4
    assert len(saves.packs()) > 2 * room
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (max(int(fd.name) for fd in Path("/proc/self/fd").iterdir()) + room, before[1])
    )
    try:
        assert saves.is_right(ref) and verify(Path(ref.path)).bad == ()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("module", ["orchestrator.adapters.manifest", "worker.checkpoint.saver"])
def test_what_runs_beside_training_needs_no_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
