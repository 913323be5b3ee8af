"""Checkpoints in a place that a URL names: saved, committed, swept, verified and begun with as in a folder."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import fsspec
import pytest

from orchestrator.adapters import manifest
from orchestrator.adapters.index import CheckpointCorrupt
from orchestrator.adapters.places import Remote, place
from orchestrator.adapters.starting_point import find, start_of
from orchestrator.adapters.sweeping import sweep
from orchestrator.domain.errors import Refused
from orchestrator.domain.spec import CheckpointSpec
from tests.checkpoints import Saves
from tests.saved import gradient_of, save, save_entry, state_of, updated
from tests.tiny_model import a_spec
from worker.checkpoint.examine import diff
from worker.checkpoint.shard import ShardWriter
from worker.checkpoint.tier import own_disk
from worker.checkpoint.verify import verify
from worker.programs.causal_lm import PROGRAM

SPEC = a_spec()


@pytest.fixture
def bucket() -> Iterator[Path]:
    fs = fsspec.filesystem("memory")
    yield place("memory://bucket/runs/job-1/")
    fs.rm("/bucket", recursive=True)


def spoil(pack: Path) -> None:
    content = bytearray(pack.read_bytes())
    content[len(content) // 2] ^= 1
    pack.write_bytes(content)


def test_a_folder_by_its_path_or_its_url_is_a_folder() -> None:
    assert place("/shared/my runs") == place("file:///shared/my%20runs") == Path("/shared/my runs")
    assert CheckpointSpec(path="file:///shared/").folder_of("job-1", "/root") == "file:///shared/job-1"
    assert CheckpointSpec().folder_of("job-1", "/root") == "/root/jobs/job-1/checkpoints"


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("s3://bucket/runs", r"needs a package that is not installed here .*; install everstep\[s3\] on every node"),
        ("nowhere://x", "is no place that can be opened .*; give a folder, or a URL that fsspec knows"),
    ],
)
def test_a_url_that_nobody_here_can_open_is_refused_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, url: str, said: str
) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(Refused, match=said):
        place(url)


def test_what_is_saved_there_is_what_comes_back_and_what_did_not_change_is_stored_once(bucket: Path) -> None:
    job = Saves(bucket)
    first, again = job.checkpoint(1), job.checkpoint(1, generation=2)
    assert first.path == "memory://bucket/runs/job-1/step-00000001.g1"
    assert job.is_right(first) and job.is_right(again)
    assert (first.new_bytes, again.new_bytes) == (first.total_bytes, 0)
    newest = manifest.latest(bucket)
    assert newest is not None and newest.path == again.path
    assert verify(place(first.path)).bad == ()


def test_a_damaged_missing_or_cut_object_is_found(bucket: Path) -> None:
    job = Saves(bucket)
    ref = job.checkpoint(1)
    pack = max(bucket.glob("packs/*/*"), key=lambda path: path.stat().st_size)
    whole = pack.read_bytes()
    spoil(pack)
    assert "do not have the hash they were written with" in verify(place(ref.path)).bad[0]
    with pytest.raises(CheckpointCorrupt, match="memory://bucket/runs/job-1/packs/"):
        job.is_right(ref)
    pack.write_bytes(whole[:-1])
    with pytest.raises(CheckpointCorrupt, match="it was written with"):
        job.is_right(ref)
    pack.unlink()
    assert manifest.latest(bucket) is None


def test_the_nodes_own_disk_is_read_first_there_too(bucket: Path, tmp_path: Path) -> None:
    job = Saves(bucket)
    near = {device: own_disk(str(tmp_path), device.node, bucket) for device in job.plan.devices}
    job.writers = {device: ShardWriter(bucket, job.profile, device, near=near[device]) for device in job.plan.devices}
    ref = job.checkpoint(1)
    assert set(ref.local) == set(job.plan.nodes)
    copies = sorted(path.name for path in tmp_path.rglob("*.pack"))
    assert copies == sorted(path.name for path in bucket.glob("packs/*/*"))


def test_what_is_not_kept_goes_in_the_same_order(bucket: Path) -> None:
    job = Saves(bucket)
    old, new = (place(job.checkpoint(step).path) for step in (1, 2))
    swept = sweep(bucket, [new])
    assert [str(path) for path in swept.removed] == [str(old)] and not (old / "manifest.json").exists()
    gone = tuple(name for name in job_packs(bucket) if "/00000001." in name)
    assert swept.condemnable == gone and not swept.deleted
    assert sweep(bucket, [new], condemned=gone, doomed=gone).deleted == gone
    assert verify(new).bad == ()


def job_packs(bucket: Path) -> list[str]:
    return sorted(f"{path.parent.name}/{path.name}" for path in bucket.glob("packs/*/*.pack"))


def test_a_job_begins_with_what_is_there_a_journals_entry_too(bucket: Path, tmp_path: Path) -> None:
    state = state_of(SPEC)
    save(bucket, SPEC, state, step=1)
    entry = save_entry(bucket, SPEC, gradient_of(SPEC), step=2)
    asked = replace(SPEC, checkpoint=CheckpointSpec(restore_from=str(bucket)))
    begun = start_of(asked, PROGRAM.describe(SPEC))
    assert begun == entry.reference and begun.depth == 1
    whole = save(tmp_path, SPEC, updated(SPEC, state, gradient_of(SPEC), 2), step=2)
    assert find(place(str(bucket))).kept.spec == SPEC
    assert not diff(entry.path, whole.path).unlike


def test_trouble_of_a_stores_own_library_is_one_of_a_disk(bucket: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Expired(Exception):
        pass

    def expired(*_: Any, **__: Any) -> None:
        raise Expired("the token is old")

    job = Saves(bucket)
    shards = job.save(1)
    monkeypatch.setattr(cast(Remote, bucket)._fs, "pipe_file", expired)
    with pytest.raises(OSError, match=r"memory://.*manifest\.json: Expired: the token is old"):
        job.commit(1, 1, shards)
    monkeypatch.undo()
    assert manifest.latest(bucket) is None
    assert job.is_right(job.commit(1, 1, shards)), "it is tried again"


def test_a_place_with_odd_letters_is_searched_as_it_is_called(bucket: Path) -> None:
    folder = place(f"{bucket}[1]/j")
    (folder / "step-1").write_bytes(b"x")
    assert [found.name for found in folder.glob("step-*")] == ["step-1"]
