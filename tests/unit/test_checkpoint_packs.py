"""What did not change is not written again, whoever wrote it; what is gone or has gone bad is never referred to."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from orchestrator.adapters import manifest
from orchestrator.adapters.index import PLANES, RAW, ZSTD
from orchestrator.domain.plan import Plan
from tests.checkpoints import PROFILE, SMALL_PLAN, Saves, a_plan, dense, frozen_but
from worker.checkpoint.coding import PAYS_ONCE, Coder, Coding, digest


def test_only_what_changed_is_written(tmp_path: Path) -> None:
    saves = Saves(tmp_path, values=frozen_but("head", "norm"))
    first, second = saves.checkpoint(5), saves.checkpoint(6)
    assert saves.stored(5) > 800_000 and saves.stored(6) <= 3 * 4 * (160 + 37)
    assert saves.is_right(first) and saves.is_right(second)
    told = manifest.load_manifest(Path(second.path))
    assert told.new_bytes == saves.stored(6) and told.total_bytes == saves.stored(5)


def test_nothing_changed_and_nothing_is_written(tmp_path: Path) -> None:
    saves = Saves(tmp_path, values=frozen_but())
    saves.checkpoint(5)
    before = saves.packs()
    second = saves.checkpoint(6)
    assert saves.packs() == before and saves.is_right(second)


@pytest.mark.parametrize("plan", [SMALL_PLAN, a_plan(1, [[0, 1, 3], [0, 1, 3]], first=4)])
def test_other_processes_and_other_layouts_find_what_is_committed(tmp_path: Path, plan: Plan) -> None:
    values = frozen_but("norm")
    Saves(tmp_path, SMALL_PLAN, values).checkpoint(5)
    other = Saves(tmp_path, plan, values)
    second = other.checkpoint(6, generation=2)
    assert other.stored(6) < 0.02 * other.stored(5)
    third = other.checkpoint(7, generation=2)
    assert other.stored(7) <= 3 * 4 * 37
    assert other.is_right(second) and other.is_right(third)


def test_the_same_content_in_several_places_is_stored_once(tmp_path: Path) -> None:
    saves = Saves(tmp_path, values=lambda line, kind, step: dense(line, "p", step))
    ref = saves.checkpoint(1)
    assert saves.stored(1) <= 4 * PROFILE.num_params
    assert saves.is_right(ref)


def test_content_that_went_bad_on_disk_is_written_again_by_the_next_generation(tmp_path: Path) -> None:
    saves = Saves(tmp_path, SMALL_PLAN, frozen_but())
    saves.checkpoint(5)
    pack = max(tmp_path.glob("packs/*/*.pack"), key=lambda path: path.stat().st_size)
    content = bytearray(pack.read_bytes())
    content[5000] ^= 1
    pack.write_bytes(content)
    second = saves.checkpoint(6, generation=2)
    assert 0 < saves.stored(6) <= 3 * 65536 * 4
    assert saves.is_right(second)


def test_what_was_saved_and_never_committed_is_no_part_of_the_next_generation(tmp_path: Path) -> None:
    saves = Saves(tmp_path, SMALL_PLAN, frozen_but())
    saves.save(5)
    second = saves.checkpoint(6, generation=2)
    assert all("g2" in pack for pack in manifest.load_manifest(Path(second.path)).packs)


def test_a_pack_that_is_gone_or_condemned_is_written_again(tmp_path: Path) -> None:
    saves = Saves(tmp_path, SMALL_PLAN, frozen_but())
    saves.checkpoint(5)
    condemned = frozenset(saves.packs())
    second = saves.commit(6, 1, saves.save(6, condemned=condemned))
    assert not condemned & manifest.named_packs([manifest.load_manifest(Path(second.path))])
    for pack in tmp_path.glob("packs/*/*6.g1.pack"):
        pack.unlink()
    third = saves.checkpoint(7)
    assert saves.is_right(third)


def test_packs_go_when_nobody_names_them_any_more(tmp_path: Path) -> None:
    saves = Saves(tmp_path, values=frozen_but("embedding"))
    for step in (5, 6, 7):
        saves.checkpoint(step)
    named = {step: set(manifest.load_manifest(saves.path(step)).packs) for step in (5, 6, 7)}
    assert manifest.prune(tmp_path, 2) == (saves.path(5),)
    assert set(saves.packs()) == named[6] | named[7] < named[5] | named[6] | named[7]
    assert manifest.prune(tmp_path, 1) == (saves.path(6),)
    assert set(saves.packs()) == named[7]
    last = manifest.latest(tmp_path)
    assert last is not None and last.step == 7 and saves.is_right(last)


def test_packs_of_a_save_under_way_stay(tmp_path: Path) -> None:
    saves = Saves(tmp_path)
    saves.checkpoint(5)
    shards = saves.save(6)
    manifest.prune(tmp_path, 1)
    assert saves.is_right(saves.commit(6, 1, shards))


def test_a_pack_mostly_dead_is_told(tmp_path: Path) -> None:
    saves = Saves(tmp_path, a_plan(1, [[0, 3]]), frozen_but("embedding"))
    saves.checkpoint(5)
    parts = manifest.load_indexes(saves.path(5), manifest.load_manifest(saves.path(5)))
    assert list(manifest.live_shares(parts).values()) == [1.0]
    saves.checkpoint(6)
    parts = manifest.load_indexes(saves.path(6), manifest.load_manifest(saves.path(6)))
    shares = {pack.split("/")[1]: share for pack, share in manifest.live_shares(parts).items()}
    assert 0.0 < shares["00000005.g1.pack"] < 0.02 and shares["00000006.g1.pack"] == 1.0


def test_a_commit_that_names_a_pack_that_is_gone_fails(tmp_path: Path) -> None:
    saves = Saves(tmp_path, values=frozen_but("norm"))
    saves.checkpoint(5)
    shards = saves.save(6)
    max(tmp_path.glob("packs/*/*5.g1.pack"), key=lambda path: path.stat().st_size).unlink()
    with pytest.raises(manifest.CheckpointCorrupt, match="pack cannot be read"):
        saves.commit(6, 1, shards)


# --- codings -------------------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(
    arrays(np.uint32, st.integers(1, 3000), elements=st.integers(0, 2**32 - 1), fill=st.integers(0, 2**32 - 1)),
    st.sampled_from([Coding(), Coding(ZSTD), *(Coding(PLANES, planes) for planes in range(8))]),
)
def test_every_coding_gives_back_every_bit(bits: np.ndarray, coding: Coding) -> None:
    content, coder = bits.view(np.uint8), Coder()
    name, stored = coder.encode(content, coding)
    assert len(stored) < content.size or name == RAW
    back = np.zeros_like(content)
    coder.decode(name, np.frombuffer(stored, dtype=np.uint8), back)
    assert np.array_equal(back, content) and digest(back.data) == digest(content.data)


@pytest.mark.parametrize("name", [ZSTD, PLANES])
@settings(max_examples=150, deadline=None)
@given(stored=st.binary(max_size=200), numel=st.integers(1, 100))
def test_bytes_that_are_no_coded_content_are_refused(name: str, stored: bytes, numel: int) -> None:
    with pytest.raises(ValueError):
        Coder().decode(name, np.frombuffer(stored, dtype=np.uint8), np.zeros(numel * 4, dtype=np.uint8))


def test_the_coding_is_what_pays() -> None:
    rng, coder = np.random.default_rng(0), Coder()
    weights = (rng.standard_normal(1 << 16) * 0.02).astype(np.float32)
    cases = {
        (RAW, 0): rng.integers(0, 256, 1 << 18, dtype=np.uint8),
        (ZSTD, 0): np.zeros(1 << 18, dtype=np.uint8),
        (PLANES, 1): weights.view(np.uint8),
        (PLANES, 5): (weights.view(np.uint32) & 0xFFFF0000).view(np.uint8),
    }
    for (name, planes), content in cases.items():
        chosen = coder.choose(content, PAYS_ONCE)
        assert (chosen.name, chosen.planes) == (name, planes)
    shorter = {
        name: len(coder.encode(content, coder.choose(content, PAYS_ONCE))[1]) / content.size
        for (name, _), content in cases.items()
    }
    assert shorter[RAW] == 1.0 and shorter[ZSTD] < 0.01 and shorter[PLANES] < 0.5
    assert coder.choose(weights.view(np.uint8)).name == RAW, "a state is read whole: too little is gained"
    assert coder.choose(cases[PLANES, 5]).name == PLANES
