"""Whatever has happened to a checkpoint's files is found, is said, and is never taken for the state that was saved."""

from __future__ import annotations

import hashlib
import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from orchestrator.adapters import index as indexes
from orchestrator.adapters import manifest
from orchestrator.adapters.manifest import CheckpointCorrupt, CheckpointTooNew
from orchestrator.adapters.sealed import sealed
from orchestrator.domain.checkpoint import CheckpointRef
from tests.checkpoints import TINY, Saves, a_plan, frozen_but
from worker.checkpoint.verify import verify

FLIPS = 1000


def a_job(root: Path) -> Saves:
    return Saves(root, a_plan(2, [[0, 1, 2]]), frozen_but("norm", "head"), profile=TINY)


@pytest.fixture
def newest(tmp_path: Path) -> CheckpointRef:
    """Of two: the older one is of step 5."""
    job = a_job(tmp_path)
    job.checkpoint(5)
    return job.checkpoint(6)


def test_what_is_whole_is_verified(newest: CheckpointRef) -> None:
    said: list[tuple[int, int]] = []
    found = verify(Path(newest.path), lambda done, total: said.append((done, total)))
    assert found.bad == () and found.num_pieces >= 15 and found.num_stored > 20_000
    assert said[0] == (0, found.num_stored) and said[-1] == (found.num_stored, found.num_stored)


def test_every_flipped_byte_is_found(newest: CheckpointRef) -> None:
    path = Path(newest.path)
    packs = [path.parent / "packs" / pack for pack in manifest.load_manifest(path).packs]
    files = [*packs, *path.iterdir()]
    sizes = [file.stat().st_size for file in files]
    rng, found = random.Random(7), 0
    for _ in range(FLIPS):
        # Of all bytes any one, and as often one of a small file.
        file = rng.choice(files) if rng.random() < 0.5 else rng.choices(files, sizes)[0]
        content = file.read_bytes()
        at = rng.randrange(len(content))
        file.write_bytes(content[:at] + bytes([content[at] ^ rng.randint(1, 255)]) + content[at + 1 :])
        try:
            found += bool(verify(path).bad)
        except CheckpointCorrupt:
            found += 1
        file.write_bytes(content)
    assert found == FLIPS and verify(path).bad == ()


def test_what_is_bad_is_never_read(newest: CheckpointRef, tmp_path: Path) -> None:
    """Of every piece one byte in turn: reading all of it raises, and names the pack."""
    path, job = Path(newest.path), a_job(tmp_path)
    for part in manifest.load_indexes(path, manifest.load_manifest(path)):
        for piece in part.pieces:
            file = indexes.pack_path(path, piece.pack)
            content = bytearray(file.read_bytes())
            content[piece.offset + piece.length // 2] ^= 16
            whole, _ = file.read_bytes(), file.write_bytes(content)
            with pytest.raises(CheckpointCorrupt, match=re.escape(piece.pack)):
                job.is_right(newest)
            file.write_bytes(whole)
    assert job.is_right(newest)


@pytest.mark.parametrize("between", [False, True])
def test_two_pieces_of_equal_length_exchanged(newest: CheckpointRef, between: bool) -> None:
    """In one pack, and between two."""
    path = Path(newest.path)
    pieces = [p for part in manifest.load_indexes(path, manifest.load_manifest(path)) for p in part.pieces]
    one, other = next(
        (a, b)
        for a in pieces
        for b in pieces
        if a.length == b.length and a.content != b.content and (a.pack != b.pack) == between
    )
    files = {p.pack: bytearray(indexes.pack_path(path, p.pack).read_bytes()) for p in (one, other)}
    held = [bytes(files[p.pack][p.offset : p.offset + p.length]) for p in (one, other)]
    for p, content in zip((one, other), reversed(held), strict=True):
        files[p.pack][p.offset : p.offset + p.length] = content
    for pack, content in files.items():
        indexes.pack_path(path, pack).write_bytes(content)
    bad = verify(path).bad
    assert {f"{p.kind} of {p.line}, elements {p.start}" for p in (one, other)} == {
        re.search(r"\w of \w+, elements \d+", line)[0]
        for line in bad  # type: ignore[index]
    }


def test_everything_that_is_wrong_is_named(newest: CheckpointRef) -> None:
    path = Path(newest.path)
    told = manifest.load_manifest(path)
    lost, short = sorted(told.packs)[:2]
    indexes.pack_path(path, lost).unlink()
    with indexes.pack_path(path, short).open("ab") as file:
        file.write(b"x")
    (path / told.shards[1].index).write_text("{}")
    bad = "\n".join(verify(path).bad)
    assert lost in bad and short in bad and told.shards[1].index in bad


def path_of_latest(folder: Path) -> Path:
    found = manifest.latest(folder)
    assert found is not None
    return Path(found.path)


def test_the_index_of_another_step_is_none_of_this(newest: CheckpointRef, tmp_path: Path) -> None:
    path, older = Path(newest.path), tmp_path / "step-00000005.g1"
    name = manifest.load_manifest(path).shards[0].index
    shutil.copy(older / name, path / name)
    assert path_of_latest(tmp_path) == older
    # Nor where the manifest vouches for it.
    other = manifest.load_manifest(older).shards[0].sha256
    rewrite(path, shards=lambda shards: [[*shards[0][:3], other], *shards[1:]])
    with pytest.raises(CheckpointCorrupt, match="is of step 5"):
        a_job(tmp_path).is_right(newest)


def test_a_newer_format_is_refused_and_left_alone(newest: CheckpointRef, tmp_path: Path) -> None:
    path = Path(newest.path)
    rewrite(path, format=lambda _: 3)
    for read in (manifest.load_manifest, verify, lambda path: manifest.latest(path.parent)):
        with pytest.raises(CheckpointTooNew, match=r"format 3, this version reads up to 2; upgrade everstep"):
            read(path)
    before = sorted(tmp_path.rglob("*"))
    assert manifest.prune(tmp_path, 1) == () and sorted(tmp_path.rglob("*")) == before
    rewrite(path, format=lambda _: 1)
    with pytest.raises(CheckpointCorrupt, match="format 1, this version reads 2"):
        manifest.load_manifest(path)
    assert path_of_latest(tmp_path) == tmp_path / "step-00000005.g1"


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "a/../../b.json", "..", "", "x\0.json", "a\\b.json"])
def test_no_name_leads_elsewhere(newest: CheckpointRef, name: str) -> None:
    path = Path(newest.path)
    kept = {file: file.read_bytes() for file in path.iterdir()}
    rewrite(path, shards=lambda shards: [[*shards[0][:2], name, shards[0][3]], *shards[1:]])
    with pytest.raises(CheckpointCorrupt):
        verify_or_raise(path)
    for change in ({"packs": lambda packs: {**packs, name: 1}}, {"lines": lambda lines: {**lines, name: 1}}):
        restore(kept)
        rewrite(path, **change)
        with pytest.raises(CheckpointCorrupt, match="may lead elsewhere"):
            manifest.load_manifest(path)
    restore(kept)
    for change in (
        {"packs": lambda packs: [[name, packs[0][1]], *packs[1:]]},
        {"lines": lambda lines: [[name, lines[0][1]], *lines[1:]]},
    ):
        rewrite_index(path, **change)
        with pytest.raises(CheckpointCorrupt, match="may lead elsewhere"):
            verify_or_raise(path)
        restore(kept)
    assert verify(path).bad == ()


def test_a_parent_leads_nowhere_else(newest: CheckpointRef) -> None:
    path = Path(newest.path)
    rewrite(path, kind=lambda _: "journal", parent=lambda _: ["../elsewhere/step-00000005.g1", "0" * 64])
    with pytest.raises(CheckpointCorrupt, match="leads nowhere"):
        manifest.load_chain(path)


def verify_or_raise(path: Path) -> None:
    bad = verify(path).bad
    if bad:
        raise CheckpointCorrupt("; ".join(bad))


def restore(kept: dict[Path, bytes]) -> None:
    for file, content in kept.items():
        file.write_bytes(content)


def rewrite(path: Path, **changes: Any) -> None:
    """A manifest that says something else and has the hash of that."""
    body = json.loads((path / "manifest.json").read_bytes())
    del body["sha256"]
    (path / "manifest.json").write_bytes(sealed({**body, **{name: change(body[name]) for name, change in changes.items()}}))


def rewrite_index(path: Path, **changes: Any) -> None:
    """The first index, and a manifest that vouches for it."""
    file = path / manifest.load_manifest(path).shards[0].index
    body = json.loads(file.read_bytes())
    file.write_text(json.dumps({**body, **{name: change(body[name]) for name, change in changes.items()}}))
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    rewrite(path, shards=lambda shards: [[*shards[0][:3], sha256], *shards[1:]])
