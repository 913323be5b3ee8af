"""A second copy on a node's own disk is read first, piece by piece, and believed no more than any other."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

import fsspec
import numpy as np
import pytest

from orchestrator.adapters.index import own_folder
from orchestrator.adapters.manifest import CheckpointCorrupt
from orchestrator.domain.checkpoint import CheckpointRef
from orchestrator.domain.ids import NodeId
from orchestrator.domain.profile import Interval
from tests.checkpoints import KINDS, PLAN, PROFILE, Saves, dense
from worker.checkpoint.reader import read
from worker.checkpoint.shard import ShardWriter
from worker.checkpoint.tier import LEFT_S, Tier, own_disk, sweep_left

WHOLE = [Interval(line.name, 0, line.numel) for line in PROFILE.lines]


@pytest.fixture(params=["folder", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "near") if request.param == "folder" else f"memory://{uuid.uuid4().hex}"


class Near(Saves):
    """Every device copies to one tier."""

    def __init__(self, root: Path, url: str) -> None:
        super().__init__(root)
        self.url = url
        self.writers = {device: ShardWriter(root, PROFILE, device, near=Tier("n0's disk", url)) for device in PLAN.devices}
        self.fs, self.at = fsspec.core.url_to_fs(url)

    def read(self, ref: CheckpointRef) -> Tier:
        """Every bit is right; the tier that was looked in first, with what it says."""
        near = Tier("n0's disk", self.url)
        found = read(Path(ref.path), WHOLE, near=near)
        assert all(
            np.array_equal(found[interval, kind].numpy(), dense(self.lines[interval.line], kind, ref.step))
            for interval in WHOLE
            for kind in KINDS
        )
        return near

    def copies(self) -> list[str]:
        return sorted(self.fs.find(f"{self.at}/packs")) if self.fs.exists(f"{self.at}/packs") else []

    def spoil(self, copy: str, at: int = -1) -> None:
        content = bytearray(self.fs.cat_file(copy))
        content[at] ^= 1
        self.fs.pipe_file(copy, bytes(content))


def test_what_was_saved_is_read_from_the_nearest_copy_alone(tmp_path: Path, url: str) -> None:
    job = Near(tmp_path / "shared", url)
    ref = job.checkpoint(5)
    assert ref.local == tuple(sorted({device.node for device in PLAN.devices}))
    assert job.read(ref).num_read == job.stored(5)
    for pack in (tmp_path / "shared" / "packs").glob("*/*.pack"):  # nothing of these is looked at
        pack.write_bytes(bytes(pack.stat().st_size))
    assert job.read(ref).bad == []
    with pytest.raises(CheckpointCorrupt, match="do not have the hash"):
        read(Path(ref.path), WHOLE)


def test_a_damaged_copy_costs_that_piece_alone_and_is_said(tmp_path: Path, url: str) -> None:
    job = Near(tmp_path / "shared", url)
    ref = job.checkpoint(5)
    job.spoil(job.copies()[0])
    near = job.read(ref)
    (said,) = near.bad
    assert "do not have the hash they were written with on n0's disk" in said
    assert 0 < job.stored(5) - near.num_read < job.stored(5) / 4, "the other pieces still come from there"


def test_a_copy_that_is_cut_short_costs_what_it_lacks(tmp_path: Path, url: str) -> None:
    job = Near(tmp_path / "shared", url)
    ref = job.checkpoint(5)
    copy = job.copies()[0]
    job.fs.pipe_file(copy, job.fs.cat_file(copy)[:100])
    near = job.read(ref)
    assert near.bad and all("cannot be read: it ends" in said for said in near.bad) and near.num_read > 0


def test_a_piece_that_is_bad_in_every_tier_makes_the_checkpoint_unreadable(tmp_path: Path, url: str) -> None:
    job = Near(tmp_path / "shared", url)
    ref = job.checkpoint(5)
    copy = job.copies()[0]
    job.spoil(copy)
    pack = tmp_path / "shared" / "packs" / "/".join(copy.split("/")[-2:])
    content = bytearray(pack.read_bytes())
    content[-1] ^= 2
    pack.write_bytes(content)
    with pytest.raises(CheckpointCorrupt, match="restore an older checkpoint"):
        job.read(ref)


def test_a_disk_that_went_with_its_node_is_done_without(tmp_path: Path, url: str) -> None:
    job = Near(tmp_path / "shared", url)
    ref = job.checkpoint(5)
    job.fs.rm(job.at, recursive=True)
    near = job.read(ref)
    assert (near.num_read, near.bad) == (0, [])


def test_a_disk_that_takes_nothing_costs_the_copy_and_not_the_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "near").write_text("no folder can be made here")
    job = Near(tmp_path / "shared", str(tmp_path / "near"))
    ref = job.checkpoint(5)
    assert ref.local == () and job.read(ref).num_read == 0
    assert "it is on shared storage alone" in capsys.readouterr().out


def test_what_could_not_be_saved_leaves_no_copy(tmp_path: Path, url: str) -> None:
    job = Near(tmp_path / "shared", url)
    job.checkpoint(5)
    before = job.copies()
    folder = job.path(6)
    folder.write_text("shared storage takes nothing here")
    with pytest.raises(OSError):
        job.save(6)
    assert job.copies() == before
    folder.unlink()
    assert job.read(job.checkpoint(7)).num_read == job.stored(7), "the next one is copied again"


def test_copies_of_states_that_are_neither_the_newest_nor_the_one_before_go(tmp_path: Path, url: str) -> None:
    job = Near(tmp_path / "shared", url)
    refs = [job.checkpoint(step) for step in (5, 6, 7)]
    assert {copy.rpartition("/")[2] for copy in job.copies()} == {"00000006.g1.pack", "00000007.g1.pack"}
    assert job.read(refs[1]).num_read == job.stored(6)
    assert job.read(refs[0]).num_read == 0


def test_what_a_host_that_died_left_goes_once_nobody_has_added_to_it_for_a_week(tmp_path: Path) -> None:
    old, new, mine = (own_folder(str(tmp_path), NodeId("n0"), Path(f"/shared/{job}")) for job in ("old", "new", "mine"))
    for folder in (old, new, mine):
        pack = folder / "packs" / "n0.0" / "00000001.g1.pack"
        pack.parent.mkdir(parents=True)
        pack.write_bytes(b"state")
    written = (new / "packs" / "n0.0" / "00000001.g1.pack").stat().st_mtime
    assert sweep_left(mine, written + LEFT_S / 2) == ()
    os.utime(new / "packs" / "n0.0" / "00000001.g1.pack", (written + 100, written + 100))
    assert sweep_left(mine, written + LEFT_S + 50) == (old,)
    assert not old.exists() and new.exists() and mine.exists()
    assert sweep_left(tmp_path / "nothing" / "here", written) == ()


def test_nodes_and_jobs_share_no_folder(tmp_path: Path) -> None:
    def folder(node: str, job: str) -> str:
        tier = own_disk(str(tmp_path), NodeId(node), Path(job))
        assert tier is not None
        with tier.create("a/00000001.g1.pack") as file:
            file.write(b"x")
        return "/".join(sorted(str(path) for path in tmp_path.rglob("*.pack")))

    seen = [folder(node, job) for node in ("n/1", "n_1", "..") for job in ("/shared/a", "/shared/b")]
    assert len(set(seen)) == 6
    assert own_disk("", NodeId("n0"), Path("/shared/a")) is None
