"""Two and four tensor-parallel ranks, real processes over gloo, compute what one does; so does a pipeline of such stages.

One set of processes per world size runs every case and leaves its losses and gradients in a file; the tests compare those
with the same case run here on one rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

from orchestrator.domain.ids import Rank
from orchestrator.domain.spec import JobSpec
from tests.integration.rank_processes import CONTEXT
from tests.tiny_model import a_spec, leaves_of, number, step_gradients, tokens_of, whole_model
from worker.parallel.alternation import Alternation
from worker.parallel.group import ALONE, Group
from worker.program import Leaves
from worker.programs.causal_lm import PROGRAM

pytestmark = pytest.mark.timeout(300)

CASES: dict[str, JobSpec] = {
    "grouped-query attention": a_spec(),
    "every head its own keys": a_spec(kv_heads=8),
    "dropout": a_spec(dropout=0.3),
    "tied head": a_spec(tied=True),
    "recomputed with dropout": a_spec(dropout=0.3, train={"activation_checkpointing": True}),
    "batch of one": a_spec(train={"micro_batch_size": 1}),
    "batch of three": a_spec(train={"micro_batch_size": 3}),
}
BF16 = a_spec(dropout=0.3, train={"dtype": "bf16"})
STEP = 3


@dataclass
class Outcome:
    """What one rank has after a step: losses by micro-batch id, gradients by use."""

    losses: list[float]
    grads: dict[tuple[str, int], torch.Tensor]


@dataclass
class Reports:
    """Of one world size: case -> outcome, for each rank in order."""

    outcomes: list[dict[str, Outcome]]

    def of(self, case: str) -> list[Outcome]:
        return [outcomes[case] for outcomes in self.outcomes]


@pytest.fixture(scope="module", params=[2, 4])
def reports(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reports]:
    yield run_ranks(request.param, tmp_path_factory.mktemp("ranks"))


def run_ranks(world_size: int, folder: Path) -> Reports:
    ranks = [CONTEXT.Process(target=rank_main, args=(rank, world_size, folder)) for rank in range(world_size)]
    for rank in ranks:
        rank.start()
    try:
        for rank in ranks:
            rank.join(timeout=200)
        assert [rank.exitcode for rank in ranks] == [0] * world_size
    finally:
        for rank in ranks:
            rank.kill()
    outcomes = [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world_size)]
    return Reports(outcomes)


def rank_main(rank: int, world_size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=FileStore(str(folder / "store"), world_size), rank=rank, world_size=world_size)
    tp = Group("tp", tuple(map(Rank, range(world_size))), rank, dist.group.WORLD)
    outcomes = {case: outcome_of(spec, tp) for case, spec in {**CASES, "bf16": BF16}.items()}
    if world_size == 4:
        outcomes["pipeline"] = pipeline_outcome(CASES["dropout"], rank)
    torch.save(outcomes, folder / f"{rank}.pt")
    dist.destroy_process_group()


def outcome_of(spec: JobSpec, tp: Group) -> Outcome:
    _, model, leaves = whole_model(spec, tp)
    losses = step_gradients(spec, model, leaves, STEP)
    return Outcome(losses, gradients(leaves))


def pipeline_outcome(spec: JobSpec, rank: int) -> Outcome:
    """tp 2 x pp 2; losses are those of the last stage."""
    stage, index = divmod(rank, 2)
    axes = {members: dist.new_group(list(members)) for members in ((0, 1), (2, 3), (0, 2), (1, 3))}
    tp_members, pp_members = (2 * stage, 2 * stage + 1), (index, index + 2)
    tp = Group("tp", tuple(map(Rank, tp_members)), index, axes[tp_members])
    pp = Group("pp", tuple(map(Rank, pp_members)), stage, axes[pp_members])
    first, last = ((0, 2), (2, 4))[stage]
    leaves = leaves_of(spec, tp, first, last)
    module = PROGRAM.build(spec, first, last, tp, leaves)
    losses: list[torch.Tensor] = []

    def forward(place: int, given: torch.Tensor | None) -> torch.Tensor:
        inputs, targets = tokens_of(spec, place)
        y = module(inputs if given is None else given, number(place), number(STEP))
        if stage:
            y = module.loss(y, targets)
            losses.append(y.detach())
        return y

    order = Alternation(pp, module.hidden_shape, module.hidden_dtype, torch.device("cpu"))
    order.run(spec.train.micro_batches, forward, lambda _: None)
    return Outcome([loss.item() for loss in losses], gradients(leaves))


def gradients(leaves: Leaves) -> dict[tuple[str, int], torch.Tensor]:
    return {use: leaf.grad for use, leaf in leaves.items() if leaf.grad is not None}


def whole(spec: JobSpec, parts: list[dict[tuple[str, int], torch.Tensor]]) -> dict[tuple[str, int], torch.Tensor]:
    """Gradients of tp ranks put together as the reduction to owners does: split lines end to end, others summed."""
    split = {line.name: line.split for line in PROGRAM.describe(spec).lines}
    return {
        use: torch.cat([part[use] for part in parts])
        if split[use[0]]
        else sum((part[use] for part in parts), torch.tensor(0.0))
        for use in parts[0]
    }


def assert_near(
    actual: dict[tuple[str, int], torch.Tensor], expected: dict[tuple[str, int], torch.Tensor], rel: float
) -> None:
    assert actual.keys() == expected.keys()
    for use, grad in expected.items():
        difference = torch.linalg.norm(actual[use].float() - grad) / torch.linalg.norm(grad)
        assert difference < rel, use


@pytest.mark.parametrize("case", CASES)
def test_loss_and_every_gradient_equal_those_of_one_rank(reports: Reports, case: str) -> None:
    spec, outcomes = CASES[case], reports.of(case)
    expected = outcome_of(spec, ALONE)
    for outcome in outcomes:
        assert outcome.losses == outcomes[0].losses
        assert outcome.losses == pytest.approx(expected.losses, rel=1e-5)
    assert_near(whole(spec, [outcome.grads for outcome in outcomes]), expected.grads, 1e-5)


def test_dropout_is_not_idle(reports: Reports) -> None:
    assert reports.of("dropout")[0].losses != pytest.approx(reports.of("grouped-query attention")[0].losses, rel=1e-5)


def test_bf16_is_near_one_fp32_rank(reports: Reports) -> None:
    expected = outcome_of(CASES["dropout"], ALONE)
    outcomes = reports.of("bf16")
    assert outcomes[0].losses == pytest.approx(expected.losses, rel=1e-2)
    assert_near(whole(BF16, [outcome.grads for outcome in outcomes]), expected.grads, 3e-2)


@pytest.mark.parametrize("reports", [4], indirect=True)
def test_a_pipeline_of_tensor_parallel_stages_equals_one_rank(reports: Reports) -> None:
    spec, outcomes = CASES["dropout"], reports.of("pipeline")
    expected = outcome_of(spec, ALONE)
    for outcome in outcomes[2:]:
        assert outcome.losses == pytest.approx(expected.losses, rel=1e-5)
    stages = [whole(spec, [outcome.grads for outcome in outcomes[i : i + 2]]) for i in (0, 2)]
    assert_near(stages[0] | stages[1], expected.grads, 1e-5)
