"""Room is made in an order that nothing can turn into a loss: what is condemned, refused and deleted, and when."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.adapters import manifest
from orchestrator.adapters.index import CheckpointAway
from orchestrator.adapters.manifest import CheckpointIncomplete, CheckpointTooNew
from orchestrator.adapters.sealed import sealed
from orchestrator.adapters.sweeping import condemned_packs, sweep
from tests.checkpoints import SMALL_PLAN, Saves, a_plan, frozen_but
from tests.disks import Cut, Killed


def test_packs_are_condemned_first_and_go_only_when_that_is_recorded(tmp_path: Path) -> None:
    saves = Saves(tmp_path)
    for step in (5, 6, 7):
        saves.checkpoint(step)
    before = set(saves.packs())
    first = sweep(tmp_path, [saves.path(7)])
    assert set(first.removed) == {saves.path(5), saves.path(6)} and first.deleted == ()
    assert set(first.condemnable) == before - set(manifest.load_manifest(saves.path(7)).packs)
    assert set(saves.packs()) == before, "nobody has recorded it yet"
    second = sweep(tmp_path, [saves.path(7)], first.condemnable)
    assert (second.removed, second.condemnable, second.deleted) == ((), (), ())
    assert condemned_packs(tmp_path) == set(first.condemnable)
    third = sweep(tmp_path, [saves.path(7)], first.condemnable, first.condemnable)
    assert third.deleted == first.condemnable and condemned_packs(tmp_path) == set()
    assert set(saves.packs()) == set(manifest.load_manifest(saves.path(7)).packs)
    newest = manifest.latest(tmp_path)
    assert newest is not None and saves.is_right(newest)


def test_what_names_a_condemned_pack_is_refused_and_the_next_save_stores_it_again(tmp_path: Path) -> None:
    saves = Saves(tmp_path, SMALL_PLAN, frozen_but("norm"))
    saves.checkpoint(5)
    condemned = frozenset(saves.packs())
    shards = saves.save(6)
    path = saves.path(6)
    with pytest.raises(CheckpointIncomplete, match="about to go; the next save stores it again"):
        manifest.commit(path, path_step(path), 1, "hash", 0, shards, condemned=condemned)  # type: ignore[arg-type]
    third = saves.commit(7, 1, saves.save(7, condemned=condemned))
    assert not condemned & set(manifest.load_manifest(Path(third.path)).packs)


def path_step(path: Path) -> int:
    return int(path.name[5:13])


def test_a_pack_that_is_still_named_is_not_deleted_whatever_was_recorded(tmp_path: Path) -> None:
    saves = Saves(tmp_path)
    saves.checkpoint(5)
    everything = saves.packs()
    assert sweep(tmp_path, [saves.path(5)], everything, everything).deleted == ()
    newest = manifest.latest(tmp_path)
    assert newest is not None and saves.is_right(newest)


def test_a_pack_of_which_little_is_named_is_condemned_and_goes_once_it_is_stored_elsewhere(tmp_path: Path) -> None:
    saves = Saves(tmp_path, a_plan(1, [[0, 3]]), frozen_but("embedding", "head"))
    saves.checkpoint(5)
    saves.checkpoint(6)
    first = sweep(tmp_path, [saves.path(6)])
    worn = set(first.condemnable) & set(manifest.load_manifest(saves.path(6)).packs)
    assert worn, "little of the first pack is named by the second checkpoint"
    again = saves.commit(7, 1, saves.save(7, condemned=frozenset(worn)))
    third = sweep(tmp_path, [Path(again.path)], first.condemnable, first.condemnable)
    assert worn <= set(third.deleted) and saves.is_right(again)


def test_a_supervisor_that_was_paused_does_not_touch_what_was_committed_since(tmp_path: Path) -> None:
    saves = Saves(tmp_path)
    for step in (5, 6, 7, 8):
        saves.checkpoint(step)
    assert sweep(tmp_path, [saves.path(6)]).removed == (saves.path(5),)
    assert saves.path(7).exists() and saves.path(8).exists()


def test_what_the_job_began_with_in_another_folder_says_nothing_of_what_is_old_here(tmp_path: Path) -> None:
    other, saves = Saves(tmp_path / "other"), Saves(tmp_path / "own")
    began = other.checkpoint(4, generation=9)
    for step in (5, 6):
        saves.checkpoint(step)
    shards = saves.save(7)
    swept = sweep(saves.root, [saves.path(6), Path(began.path)])
    assert swept.removed == (saves.path(5),) and not [pack for pack in swept.condemnable if "00000007" in pack]
    assert saves.is_right(saves.commit(7, 1, shards)) and Path(began.path).exists()


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """Name of a file or folder -> what reading or listing it ends with."""
    codes: dict[str, int] = {}
    read, listed = Path.read_bytes, Path.iterdir

    def refuse(path: Path) -> None:
        for part in (path.name, f"{path.parent.name}/{path.name}"):
            if part in codes:
                raise OSError(codes[part], os.strerror(codes[part]), str(path))

    monkeypatch.setattr(Path, "read_bytes", lambda path: (refuse(path), read(path))[1])
    monkeypatch.setattr(Path, "iterdir", lambda path: (refuse(path), listed(path))[1])
    yield codes


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EMFILE, errno.EACCES])
@pytest.mark.parametrize("what", ["step-00000005.g1/manifest.json", "checkpoints"])
def test_what_cannot_be_read_for_a_moment_is_not_removed_nor_what_it_may_be_read_from(
    tmp_path: Path, refused: dict[str, int], code: int, what: str
) -> None:
    saves = Saves(tmp_path / "checkpoints", a_plan(1, [[0, 3]]), frozen_but("embedding", "head"))
    kept = [saves.checkpoint(step) for step in (5, 6)]
    condemned = sweep(saves.root, [saves.path(5), saves.path(6)]).condemnable
    assert condemned, "of the first one's packs little is needed by the second"
    refused[what] = code
    with pytest.raises(CheckpointAway, match="cannot be"):
        sweep(saves.root, [saves.path(5), saves.path(6)], condemned, condemned)
    with pytest.raises(CheckpointAway):
        manifest.going(saves.root, 2)
    assert manifest.prune(saves.root, 1) == ()
    refused.clear()
    assert all(saves.is_right(one) for one in kept)


def test_a_damaged_one_that_is_kept_stays_until_it_is_given_up(tmp_path: Path) -> None:
    saves = Saves(tmp_path)
    for step in (5, 6):
        saves.checkpoint(step)
    file = saves.path(5) / "manifest.json"
    file.write_bytes(file.read_bytes().replace(b'"seed": 7', b'"seed": 8'))
    assert sweep(tmp_path, [saves.path(5), saves.path(6)]).removed == () and saves.path(5).exists()
    assert sweep(tmp_path, [saves.path(6)]).removed == (saves.path(5),)


def test_a_newer_versions_checkpoint_is_not_removed_nor_any_pack_that_it_may_be_read_from(tmp_path: Path) -> None:
    saves = Saves(tmp_path)
    for step in (5, 6):
        saves.checkpoint(step)
    body = json.loads((saves.path(5) / "manifest.json").read_bytes())
    (saves.path(5) / "manifest.json").write_bytes(sealed({**body, "format": 3}))
    before, packs = sorted(tmp_path.rglob("*")), saves.packs()
    with pytest.raises(CheckpointTooNew, match="upgrade everstep"):
        sweep(tmp_path, [saves.path(6)], packs, packs)
    assert sorted(tmp_path.rglob("*")) == before


def test_what_is_called_strangely_among_packs_is_left_alone_and_stops_nothing(tmp_path: Path) -> None:
    saves = Saves(tmp_path)
    saves.checkpoint(6)
    strange = tmp_path / "packs" / "a copy of n0" / "00000001.g1.pack"
    strange.parent.mkdir()
    strange.write_bytes(b"mine")
    assert sweep(tmp_path, [saves.path(6)]).condemnable == () and strange.exists()


def test_a_sweep_cut_short_at_any_call_leaves_what_is_kept(tmp_path: Path) -> None:
    number, is_cut = 0, True
    while is_cut:
        number += 1
        root = tmp_path / str(number)
        saves = Saves(root)
        for step in (5, 6):
            saves.checkpoint(step)
        free = sorted(set(manifest.load_manifest(saves.path(5)).packs) - set(manifest.load_manifest(saves.path(6)).packs))
        disk = Killed(number)
        try:
            sweep(root, [saves.path(6)], free, free, disk)
            is_cut = False
        except Cut:
            newest = manifest.latest(root)
            assert newest is not None and newest.step == 6 and saves.is_right(newest), disk.calls
            sweep(root, [saves.path(6)], free, free)
            assert set(saves.packs()) == set(manifest.load_manifest(saves.path(6)).packs)
    assert number > 8
