"""Exact mode among real ranks: the same bits under every plan of one tp, after losses, restores and steps run again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_trainer import PROGRAM, SPEC, TP2_PP2_DP2, Ranks, Said, a_plan, assert_mirrors_equal_owners, moved, ranks

from orchestrator.adapters import manifest
from orchestrator.domain.checkpoint import CheckpointRef
from orchestrator.domain.generation import Answer
from orchestrator.domain.ids import Device, Generation, Step
from orchestrator.domain.origin import FromCheckpoint, FromSeed, Restore
from orchestrator.domain.plan import Plan
from orchestrator.domain.spec import CheckpointSpec, EvaluationSpec, JobSpec
from worker.reference import run

pytestmark = pytest.mark.timeout(300)

EXACT = replace(SPEC, train=replace(SPEC.train, exact=True), evaluation=EvaluationSpec(every=2, micro_batches=3))
RECOMPUTED_BF16: dict[str, Any] = {"dtype": "bf16", "activation_checkpointing": True}
TP2_PP1_DP2 = a_plan(([0, 6], [0, 1]), ([0, 6], [2, 3]), tp=2)
TP2_PP3 = a_plan(([0, 1, 4, 6], [2, 0, 3, 1]), tp=2)
UNEQUAL = a_plan(([0, 4, 6], [3, 0, 2]), ([0, 6], [1]), tp=2)


def owned_as(plan: Plan, *weights: int) -> Plan:
    """With what each stage owns of its layers' state, against others that hold them."""
    left = iter(weights)
    return replace(
        plan,
        pipelines=tuple(
            replace(pipeline, stages=tuple(replace(s, shares=(next(left),) * (s.last - s.first)) for s in pipeline.stages))
            for pipeline in plan.pipelines
        ),
    )


UNEVEN = owned_as(UNEQUAL, 1, 5, 3)
OF_ONE = owned_as(TP2_PP1_DP2, 0, 1)


@dataclass
class Job:
    """One job's ranks; every `run` is a generation of it."""

    spec: JobSpec
    ranks: Ranks
    directory: Path
    generation: int = 0
    said: dict[Device, Said] = field(default_factory=dict)

    def run(self, plan: Plan, restore: Restore, last: int) -> tuple[list[Answer], dict[str, torch.Tensor]]:
        """What everybody was told, and each line's whole state (3, numel)."""
        self.generation += 1
        self.said = self.ranks.run(plan, self.generation, restore, last)
        for one in self.said.values():
            assert not one.error, one.error
        assert_mirrors_equal_owners(plan, self.said)
        answers = [one.answers for one in self.said.values()]
        assert all(others == answers[0] for others in answers)
        return answers[0], self._joined()

    def checkpoint(self, step: int) -> CheckpointRef:
        """Of the last generation."""
        events = [event for one in self.said.values() for event in one.shards]
        shards = [event.shard for event in events if (event.step, event.generation) == (step, self.generation)]
        path = self.directory / manifest.directory_name(Step(step), Generation(self.generation))
        return manifest.commit(path, Step(step), Generation(self.generation), "hash", 0, shards)

    def _joined(self) -> dict[str, torch.Tensor]:
        whole = {line.name: torch.full((3, line.numel), float("nan")) for line in PROGRAM.describe(self.spec).lines}
        for one in self.said.values():
            intervals, state = one.held["owned"]
            position = 0
            for interval in intervals:
                width = len(interval)
                whole[interval.line][:, interval.start : interval.stop] = state[:, position : position + width]
                position += -(-width // 64) * 64  # padding behind a line's end
        return whole


@contextmanager
def a_job(spec: JobSpec, directory: Path) -> Iterator[Job]:
    with ranks(spec, TP2_PP2_DP2, directory) as made:
        yield Job(spec, made, directory)


def assert_same_bits(
    mine: tuple[list[Answer], dict[str, torch.Tensor]], theirs: tuple[list[Answer], dict[str, torch.Tensor]]
) -> None:
    """Answers of the steps that both ran, and the final state."""
    steps = {answer.step: answer for answer in theirs[0]}
    assert mine[0] and all(answer == steps[answer.step] for answer in mine[0])
    for name, state in mine[1].items():
        assert torch.equal(state, theirs[1][name]), name


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(replace(EXACT, model={**EXACT.model, "dropout": 0.1}), id="fp32-dropout"),
        pytest.param(replace(EXACT, train=replace(EXACT.train, **RECOMPUTED_BF16)), id="bf16-recompute"),
    ],
)
def test_every_plan_of_one_tp_trains_to_the_same_bits(spec: JobSpec, tmp_path: Path) -> None:
    with a_job(spec, tmp_path) as job:
        undisturbed = job.run(TP2_PP2_DP2, FromSeed(), 4)
        for plan in (OF_ONE, TP2_PP3, UNEVEN):
            assert_same_bits(job.run(plan, FromSeed(), 4), undisturbed)


def test_a_tied_model_keeps_its_bits_through_a_loss_a_restore_and_a_jump(tmp_path: Path) -> None:
    tied = replace(EXACT, model={**EXACT.model, "tied": True}, checkpoint=CheckpointSpec(every=3))
    with a_job(tied, tmp_path) as job:
        undisturbed = job.run(TP2_PP2_DP2, FromSeed(), 6)
        saved = job.checkpoint(3)
        assert saved.answer == undisturbed[0][2] and saved.answer.maxima
        # A node is lost, what it held comes from its mirrors, and the others go on under another plan on another node.
        job.run(UNEVEN, FromSeed(), 4)
        elsewhere = a_plan(([0, 1, 4, 6], [2, 0, 3, 1]), tp=2, nodes="dab")
        survivors = {device for device in UNEVEN.devices if device.node != "c"}
        lost = moved(tied, UNEVEN, elsewhere, 4, undisturbed[0][3], survivors)
        assert_same_bits(job.run(elsewhere, lost, 6), undisturbed)
        # Everything is lost: the checkpoint says which scale its next step has.
        restored = job.run(TP2_PP1_DP2, FromCheckpoint(checkpoint=saved), 6)
        assert_same_bits(restored, undisturbed)
        # Gradients that have grown a thousandfold since the last answer: the step is run again, by all alike.
        small = replace(saved.answer, maxima=tuple(maximum / 1000 for maximum in saved.answer.maxima))
        jumped = [job.run(plan, FromCheckpoint(checkpoint=replace(saved, answer=small)), 5) for plan in (TP2_PP3, UNEQUAL)]
        assert_same_bits(jumped[1], jumped[0])
        assert jumped[0][0][0].maxima == undisturbed[0][3].maxima


def test_one_process_is_every_plan_of_tp_1(tmp_path: Path) -> None:
    reference = run(EXACT, 5)
    plan = a_plan(([0, 2, 6], [0, 2, 3]), ([0, 6], [1]))
    with ranks(EXACT, plan, tmp_path) as made:
        for one in made.run(plan, 1, FromSeed(), 5).values():
            assert not one.error, one.error
            assert one.answers == reference
    plain = run(SPEC, 5)
    for exact, ordinary in zip(reference, plain, strict=True):
        assert exact.loss == pytest.approx(ordinary.loss, rel=1e-5) and ordinary.maxima == ()


def test_without_it_a_plan_stays_within_1e_5_of_one_process_for_200_steps(tmp_path: Path) -> None:
    train = replace(SPEC.train, steps=200, micro_batch_size=1, sequence=16)
    short = replace(SPEC, train=train, model={**SPEC.model, "layers": 1})
    reference = run(short, 200)
    plan = a_plan(([0, 3], [0, 2, 3]), ([0, 3], [1]))
    restore: Restore = FromSeed()
    with ranks(short, plan, tmp_path) as made:
        for generation, last in enumerate((50, 100, 150, 200), start=1):
            said = made.run(plan, generation, restore, last)
            for one in said.values():
                assert not one.error, one.error
            answers = said[plan.devices[0]].answers
            for mine in answers:
                assert mine.loss == pytest.approx(reference[mine.step - 1].loss, rel=1e-5), mine.step
            restore = moved(short, plan, plan, last, answers[-1], set(plan.devices))
    assert answers[-1].step == 200
