"""A journal between bases: whatever is read of it, by whatever cuts, is what training had, to the bit."""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.adapters import index as indexes
from orchestrator.adapters import manifest, spec_file
from orchestrator.adapters.durable import DISK, Disk
from orchestrator.adapters.manifest import CheckpointCorrupt, CheckpointIncomplete
from orchestrator.domain.checkpoint import CheckpointRef
from orchestrator.domain.generation import Answer
from orchestrator.domain.ids import Generation, JobId, Step
from orchestrator.domain.layout import buckets
from orchestrator.domain.plan import Plan
from orchestrator.domain.profile import Interval, Line
from tests.checkpoints import CPU, TINY, Saves, a_plan
from tests.disks import Cut, Killed
from tests.tiny_model import a_spec
from worker.checkpoint.reader import read
from worker.checkpoint.snapshot import Snapshot
from worker.checkpoint.verify import verify
from worker.parallel.optimizer import adamw
from worker.state.holdings import KINDS, Holdings
from worker.state.relayout import from_checkpoint

ROOT = Path(__file__).parents[1] / "golden"
SPEC = a_spec(train={"steps": 500, "warmup_steps": 3, "weight_decay": 0.1})
PLANS = (a_plan(1, [[0, 1, 2]]), a_plan(2, [[0, 2]]), a_plan(1, [[0, 2], [0, 2], [0, 2]]), a_plan(2, [[0, 1, 2], [0, 2]]))


class Training:
    """What training has after each step: the state of every line, updated whole, and the gradient that led to it."""

    def __init__(self, steps: int) -> None:
        rng = np.random.default_rng(3)
        self.state = {0: {line.name: self._first(line, rng) for line in TINY.lines}}
        self.gradients: dict[int, dict[str, torch.Tensor]] = {}
        self.answers: dict[int, Answer] = {}
        for step in range(1, steps + 1):
            gradients = {
                line.name: torch.from_numpy(rng.standard_normal(line.numel, dtype=np.float32)) for line in TINY.lines
            }
            answer = Answer(step=Step(step), norm=0.5 + step / 7, losses=(3.0 / step,))
            state = {name: rows.clone() for name, rows in self.state[step - 1].items()}
            for line in TINY.lines:
                decayed = [(0, line.numel)] if line.decay else []
                adamw(SPEC.train, answer, state[line.name], gradients[line.name], decayed)
            self.state[step], self.gradients[step], self.answers[step] = state, gradients, answer

    @staticmethod
    def _first(line: Line, rng: np.random.Generator) -> torch.Tensor:
        weights = torch.from_numpy(rng.standard_normal(line.numel, dtype=np.float32))
        return torch.stack([weights, torch.zeros(line.numel), torch.zeros(line.numel)])


TRAINING = Training(12)


class Journal(Saves):
    """Bases and entries of that training."""

    def __init__(self, root: Path, plan: Plan = PLANS[0], disk: Disk = DISK) -> None:
        super().__init__(root, plan, self._value, disk, TINY)
        spec_file.keep(root, spec_file.Kept(job=JobId("j"), spec=SPEC, profile=TINY))
        self.spec_hash = spec_file.hash_of(SPEC)

    @staticmethod
    def _value(line: Line, kind: str, step: int) -> np.ndarray:
        return TRAINING.state[step][line.name][KINDS.index(kind)].numpy()

    def entry(self, step: int, generation: int = 1) -> CheckpointRef:
        shards = []
        for seat in self.plan.seats:
            held = Holdings(buckets(self.plan, TINY), seat.rank, None, Generation(generation), CPU)
            held.step = Step(step)
            for piece in held.owned_pieces:
                interval = piece.interval
                held.gradient[piece.offset : piece.offset + len(interval)] = TRAINING.gradients[step][interval.line][
                    interval.start : interval.stop
                ]
            snapshot = Snapshot.of_gradient(held, Generation(generation), TRAINING.answers[step])
            shards.append(self.writers[seat.device].write(snapshot))
        return self.commit(step, generation, shards)


def chain(root: Path, base: int, steps: int, plan: Plan = PLANS[0]) -> tuple[Journal, list[CheckpointRef]]:
    job = Journal(root, plan)
    return job, [job.checkpoint(base), *(job.entry(step) for step in range(base + 1, base + steps + 1))]


@settings(max_examples=25, deadline=None)
@given(
    base=st.integers(0, 6),
    steps=st.integers(0, 6),
    plan=st.sampled_from(PLANS),
    cuts=st.lists(st.tuples(st.sampled_from(TINY.lines), st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=6),
)
def test_any_interval_of_any_entry_is_what_training_had(
    base: int, steps: int, plan: Plan, cuts: list[tuple[Line, float, float]]
) -> None:
    wanted = []
    for line, a, b in cuts:
        start, stop = sorted((int(a * line.numel), int(b * line.numel)))
        wanted.append(
            Interval(line.name, start, min(line.numel, stop + 1)) if stop < line.numel else Interval(line.name, 0, 1)
        )
    with TemporaryDirectory() as folder:
        _, refs = chain(Path(folder), base, steps, plan)
        for ref in (refs[-1], refs[len(refs) // 2]):
            content = read(Path(ref.path), wanted)
            for interval in wanted:
                for row, kind in enumerate(KINDS):
                    had = TRAINING.state[ref.step][interval.line][row, interval.start : interval.stop]
                    assert torch.equal(content[interval, kind].view(torch.int32), had.view(torch.int32))


def _tell(told: list[tuple[int, int]], done: int, total: int) -> None:
    told.append((done, total))


def held_elements(held: Holdings) -> int:
    return sum(len(piece.interval) for piece in held.pieces)


@pytest.mark.parametrize("other", PLANS)
def test_a_rank_of_any_plan_is_restored_from_a_journal(tmp_path: Path, other: Plan) -> None:
    _, refs = chain(tmp_path, 2, 5, PLANS[3])
    for seat in other.seats:
        mirrored = other.seats[(seat.rank + 1) % len(other.seats)].rank
        held = Holdings(buckets(other, TINY), seat.rank, mirrored if mirrored != seat.rank else None, Generation(2), CPU)
        held.step = refs[-1].step
        told: list[tuple[int, int]] = []
        from_checkpoint(held, Path(refs[-1].path), progress=partial(_tell, told))
        total = 4 * len(KINDS) * held_elements(held) + 4 * 5 * held_elements(held)
        assert told == sorted(told) and told[-1] == (total, total), "a base and five gradients are read"
        seen = torch.zeros(held.state.shape[1], dtype=torch.bool)
        for piece in held.pieces:
            columns = slice(piece.offset, piece.offset + len(piece.interval))
            had = TRAINING.state[7][piece.interval.line][:, piece.interval.start : piece.interval.stop]
            assert torch.equal(held.state[:, columns].contiguous().view(torch.int32), had.contiguous().view(torch.int32))
            seen[columns] = True
        assert not held.state[:, ~seen].any(), "padding stays zero"


def test_an_entry_takes_a_third_of_the_bytes(tmp_path: Path) -> None:
    job, refs = chain(tmp_path, 2, 3)
    assert job.stored(3) < 0.34 * job.stored(2)
    told = manifest.load_manifest(Path(refs[2].path))
    assert (told.kind, told.depth, told.new_bytes) == ("journal", 2, job.stored(4))
    found = verify(Path(refs[3].path))
    assert found.bad == () and found.num_stored == sum(job.stored(step) for step in (2, 3, 4, 5))


def test_an_entry_goes_on_from_the_step_before_in_its_own_generation_alone(tmp_path: Path) -> None:
    job, _ = chain(tmp_path, 2, 1)
    with pytest.raises(CheckpointIncomplete, match=r"no checkpoint step-00000004.g1 for the journal of step 5"):
        job.entry(5)
    with pytest.raises(CheckpointIncomplete, match=r"no checkpoint step-00000003.g2 for the journal of step 4"):
        job.entry(4, generation=2)
    newest = manifest.latest(tmp_path)
    assert newest is not None and newest.step == 3
    job.checkpoint(4, generation=2)
    job.entry(5, generation=2)
    newest = manifest.latest(tmp_path)
    assert newest is not None and (newest.step, newest.generation) == (5, 2) and job.is_right(newest)


@pytest.mark.parametrize("damage", ["manifest", "index", "pack", "replaced"])
def test_what_breaks_a_chain_leaves_the_longest_good_one(tmp_path: Path, damage: str) -> None:
    """An entry in the middle is gone, or is another one."""
    job, refs = chain(tmp_path, 2, 5)
    middle = Path(refs[3].path)
    told = manifest.load_manifest(middle)
    match damage:
        case "manifest":
            (middle / "manifest.json").unlink()
        case "index":
            (middle / told.shards[0].index).unlink()
        case "pack":
            indexes.pack_path(middle, next(iter(told.packs))).unlink()
        case "replaced":
            other = Journal(tmp_path / "other")
            other.checkpoint(4)
            other.entry(5)
            shutil.copy(other.path(5) / "manifest.json", middle / "manifest.json")
    newest = manifest.latest(tmp_path)
    assert newest == refs[2] and job.is_right(newest)
    with pytest.raises(CheckpointCorrupt):
        job.is_right(refs[5])


def test_a_bad_byte_in_the_middle_is_found_and_the_entry_before_it_is_right(tmp_path: Path) -> None:
    job, refs = chain(tmp_path, 2, 4)
    middle = Path(refs[2].path)
    file = indexes.pack_path(middle, next(iter(manifest.load_manifest(middle).packs)))
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    for ref in refs[2:]:
        with pytest.raises(CheckpointCorrupt, match=f"{file.name}: g of"):
            job.is_right(ref)
        assert verify(Path(ref.path)).bad
    assert job.is_right(refs[1])


def test_an_entry_cut_short_at_any_call_leaves_the_one_before_it(tmp_path: Path) -> None:
    _, refs = chain(tmp_path / "before", 2, 2)
    number, is_over = 0, False
    while not is_over:
        number += 1
        root = tmp_path / str(number)
        shutil.copytree(tmp_path / "before", root)
        try:
            Journal(root, disk=Killed(number)).entry(5)
            is_over = True
        except Cut:
            pass
        newest = manifest.latest(root)
        assert newest is not None and Journal(root).is_right(newest)
        assert newest.step == 5 if is_over else newest.step in (4, 5)
        later = Journal(root).checkpoint(6, generation=2)
        assert Journal(root).is_right(later)
    assert number > 15 and refs[-1].step == 4


def test_what_an_entry_is_read_from_stays(tmp_path: Path) -> None:
    job, refs = chain(tmp_path, 2, 3)
    assert manifest.prune(tmp_path, 1) == ()
    assert job.is_right(refs[3])
    base = job.checkpoint(6)
    later = job.entry(7)
    assert {path.name for path in manifest.prune(tmp_path, 1)} == {Path(ref.path).name for ref in refs}
    assert job.is_right(later) and job.is_right(base)
    assert set(job.packs()) == manifest.named_packs(manifest.load_manifest(Path(ref.path)) for ref in (base, later))


def test_a_chain_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "LONGEST_CHAIN", 3)
    job, _ = chain(tmp_path, 2, 3)
    with pytest.raises(CheckpointIncomplete, match="3 steps from its base; the next is a base again"):
        job.entry(6)
    assert job.is_right(job.checkpoint(6))


def test_an_entry_without_an_answer_or_settings_cannot_be_used(tmp_path: Path) -> None:
    job, refs = chain(tmp_path, 2, 1)
    answer, TRAINING.answers[4] = TRAINING.answers[4], replace(TRAINING.answers[4], step=Step(3))
    try:
        with pytest.raises(CheckpointIncomplete, match="without the answer to the vote of step 4"):
            job.entry(4)
    finally:
        TRAINING.answers[4] = answer
    spec_file.file_of(tmp_path, job.spec_hash).unlink()
    with pytest.raises(CheckpointCorrupt, match="nobody knows what job"):
        job.is_right(refs[1])
    assert job.is_right(refs[0])


def test_what_this_format_wrote_stays_readable() -> None:
    """A base and two entries that were written when the format was new; its number says which one."""
    folder = ROOT / f"checkpoint-{indexes.FORMAT}"
    newest = manifest.latest(folder)
    assert newest is not None and (newest.step, newest.kind) == (5, "journal")
    hashes = {}
    for step in (3, 5):
        content = read(folder / f"step-{step:08d}.g1", [Interval(line.name, 0, line.numel) for line in TINY.lines])
        bits = b"".join(content[key].numpy().tobytes() for key in sorted(content))
        hashes[step] = hashlib.sha256(bits).hexdigest()[:16]
    assert hashes == {3: "6e7eb12e5dccb049", 5: "5ac764b462f82cba"}
    assert verify(Path(newest.path)).bad == ()
