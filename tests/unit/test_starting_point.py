"""Which checkpoint a path means, and whether a job can begin with it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from orchestrator.adapters import spec_file
from orchestrator.adapters.checkpoints import note
from orchestrator.adapters.manifest import CheckpointCorrupt
from orchestrator.adapters.starting_point import find, start_of
from orchestrator.domain.checkpoint import CheckpointRef
from orchestrator.domain.errors import Refused
from orchestrator.domain.ids import Generation, Rank, Step
from orchestrator.domain.layout import buckets
from orchestrator.domain.spec import DataSpec, EvaluationSpec, JobSpec, ParallelSpec
from tests.saved import a_plan, answer_of, gradient_of, save, save_entry, state_of, updated
from tests.tiny_model import a_spec
from worker.data import sources
from worker.programs.causal_lm import PROGRAM
from worker.state.holdings import Holdings
from worker.state.relayout import from_checkpoint

SPEC = a_spec()


def begun_with(spec: JobSpec, path: Path) -> CheckpointRef | None:
    spec = replace(spec, checkpoint=replace(spec.checkpoint, restore_from=str(path)))
    return start_of(spec, PROGRAM.describe(spec))


def test_a_job_begins_with_the_newest_good_checkpoint_of_the_folder_it_names(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    found = [save(folder, SPEC, state_of(SPEC), step=step) for step in (2, 3)]
    for path in (tmp_path, folder, found[1].path):
        assert begun_with(SPEC, path) == found[1].reference
    assert begun_with(SPEC, found[0].path) == found[0].reference == find(tmp_path, step=2).reference
    assert start_of(SPEC, PROGRAM.describe(SPEC)) is None, "nothing was asked for"
    (found[1].path / "manifest.json").write_text("{}")
    assert begun_with(SPEC, tmp_path) == found[0].reference


def test_placement_numbers_and_schedule_may_be_others(tmp_path: Path) -> None:
    found = save(tmp_path, SPEC, state_of(SPEC), step=3)
    train = replace(SPEC.train, dtype="bf16", learning_rate=1e-4, seed=9, micro_batches=4)
    assert begun_with(replace(SPEC, train=train, parallel=ParallelSpec(tp=1)), found.path) == found.reference


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"ffn": 64}, "layers.1.gate is 48 x 32 there and 64 x 32 here.*and 1 more; use the same model"),
        ({"layers": 1}, "it has layers.2.q 32 x 32, which the program has not"),
        ({"layers": 3}, "it lacks layers.3.q 32 x 32"),
        ({"tied": True}, "it has head 256 x 32, which the program has not"),
        # As many elements, in another shape.
        ({"vocabulary": 512, "width": 16, "heads": 4}, "embedding is 256 x 32 there and 512 x 16 here"),
    ],
)
def test_other_parameters_are_refused_with_every_difference(tmp_path: Path, changes: dict[str, object], said: str) -> None:
    found = save(tmp_path, SPEC, state_of(SPEC), step=3)
    with pytest.raises(Refused, match=said) as refused:
        begun_with(a_spec(**changes), found.path)
    assert [problem.field for problem in refused.value.problems] == ["checkpoint.restore_from"]


def test_the_same_step_has_to_come_out_as_it_did_and_another_may_not_be_compared(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox\n" * 40)
    spec = replace(SPEC, data=DataSpec(files=(str(text),)))
    found = save(tmp_path / "saved", spec, state_of(spec), step=3)
    note(replace(found.reference, bits="tp2 on cpu", after=(1.5, 2.5)))

    def start(spec: JobSpec, source: str = "") -> CheckpointRef | None:
        text_sha256 = sources.digest(sources.load(spec.data))
        profile = replace(PROGRAM.describe(spec), text_sha256=text_sha256, program_sha256=source)
        asked = replace(spec.checkpoint, restore_from=str(found.path))
        return start_of(replace(spec, checkpoint=asked), profile)

    known = replace(found.reference, bits="tp2 on cpu", after=(1.5, 2.5))
    assert start(spec) == known
    assert start(replace(spec, train=replace(spec.train, learning_rate=1e-5))) == known
    assert start(replace(spec, train=replace(spec.train, seed=9))) == found.reference
    assert start(replace(spec, evaluation=EvaluationSpec(every=2))) == found.reference, "text that is held out is not drawn"
    assert start(replace(spec, evaluation=EvaluationSpec(micro_batches=2))) == known, "nothing is"
    for source, same in (("ab", True), ("", True), ("cd", False)):
        kept = replace(found.kept, profile=replace(found.kept.profile, program_sha256="ab"))
        spec_file.file_of(found.path.parent, found.manifest.spec_hash).unlink()
        spec_file.keep(found.path.parent, kept)
        assert start(spec, source) == (known if same else found.reference), "another program's losses are others"
    text.write_text("jumps over the lazy dog\n" * 40)
    assert start(spec) == found.reference


def test_of_a_journal_any_entry_will_do_and_the_next_one_says_what_its_first_step_has_to_give(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox\n" * 40)
    spec = replace(SPEC, data=DataSpec(files=(str(text),)))
    state = state_of(spec)
    folder = tmp_path / "saved"
    base = save(folder, spec, state, step=1)
    entries = [save_entry(folder, spec, gradient_of(spec, step), step) for step in (2, 3)]
    profile = replace(PROGRAM.describe(spec), text_sha256=sources.digest(sources.load(spec.data)))

    def start(path: Path, **asked: object) -> CheckpointRef | None:
        wanted = replace(spec.checkpoint, restore_from=str(path), **asked)  # type: ignore[arg-type]
        return start_of(replace(spec, checkpoint=wanted), profile)

    assert start(base.path) == replace(base.reference, after=answer_of(2).losses)
    assert start(entries[0].path) == replace(entries[0].reference, after=answer_of(3).losses)
    newest = start(folder)
    assert newest == entries[1].reference and (newest.kind, newest.depth, newest.step) == ("journal", 2, 3)
    note(replace(entries[1].reference, bits="tp2 on cpu", after=(1.5, 2.5)))
    told = start(folder)
    assert told is not None and (told.bits, told.after) == ("tp2 on cpu", (1.5, 2.5)), "what was noted is known better"
    assert start(folder, weights_only=True) == replace(entries[1].reference, step=Step(0), answer=None)
    for step in (2, 3):
        state = updated(spec, state, gradient_of(spec, step), step)
    held = Holdings(buckets(a_plan(profile.num_layers), profile), Rank(0), None, Generation(1), torch.device("cpu"))
    from_checkpoint(held, entries[1].path)
    for piece in held.owned_pieces:
        part, values = piece.interval, held.state[:, piece.offset : piece.offset + len(piece.interval)]
        assert torch.equal(values[0], state[part.line][0, part.start : part.stop]) and not values[1:].any()


def test_weights_alone_begin_a_job_at_step_0_with_moments_of_zero(tmp_path: Path) -> None:
    state = state_of(SPEC)
    found = save(tmp_path, SPEC, state, step=7)
    asked = replace(SPEC, checkpoint=replace(SPEC.checkpoint, weights_only=True))
    start = begun_with(asked, found.path)
    assert start == replace(found.reference, step=Step(0), answer=None), "although the job has 5 steps alone"
    profile = PROGRAM.describe(SPEC)
    plan = a_plan(profile.num_layers)
    for step in (Step(0), Step(7)):
        held = Holdings(buckets(plan, profile), plan.seats[0].rank, None, Generation(1), torch.device("cpu"))
        held.step = step
        from_checkpoint(held, found.path)
        for piece in held.owned_pieces:
            part, values = piece.interval, held.state[:, piece.offset : piece.offset + len(piece.interval)]
            expected = state[part.line][:, part.start : part.stop]
            assert torch.equal(values[0], expected[0])
            assert torch.equal(values[1:], expected[1:] if step else torch.zeros_like(expected[1:]))


def test_where_nothing_can_be_begun_with_the_sentence_says_why(tmp_path: Path) -> None:
    found = save(tmp_path, SPEC, state_of(SPEC), step=3)
    with pytest.raises(Refused, match=r"is the checkpoint of step 3 and train.steps is 3: nothing is left; raise"):
        begun_with(replace(SPEC, train=replace(SPEC.train, steps=3)), found.path)
    with pytest.raises(Refused, match="is no folder; give a checkpoint's folder or a job's"):
        begun_with(SPEC, tmp_path / "no")
    with pytest.raises(Refused, match="there is no checkpoint of step 4"):
        find(tmp_path, step=4)
    (found.path / "manifest.json").write_text("{}")
    with pytest.raises(Refused, match="there is no checkpoint that can be read"):
        begun_with(SPEC, tmp_path)


def test_what_a_checkpoint_is_of_is_kept_beside_it_and_checked(tmp_path: Path) -> None:
    found = save(tmp_path, SPEC, state_of(SPEC), step=3)
    assert (found.kept.spec, found.kept.profile, found.kept.job) == (SPEC, PROGRAM.describe(SPEC), "job-1")
    file = spec_file.file_of(tmp_path, found.manifest.spec_hash)
    content = file.read_text()
    for damage in (content.replace('"steps": 5', '"steps": 6'), content.replace("job-1", "job-2"), content[:-9], "{}"):
        file.write_text(damage)
        with pytest.raises(CheckpointCorrupt, match=f"{file.name} (is not what was written|cannot be read)"):
            _ = found.kept
    file.unlink()
    with pytest.raises(CheckpointCorrupt, match="is not there; without it nobody knows what job"):
        _ = found.kept
