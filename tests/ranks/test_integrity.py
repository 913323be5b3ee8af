"""Bits flipped in real ranks: who sees it and when, what is saved, and that training goes on from the agreed state."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, Literal

import pytest
import torch

from orchestrator.adapters import manifest
from orchestrator.domain.generation import Answer, Disagrees, NotFinite, RankReport
from orchestrator.domain.host_events import ShardSaved
from orchestrator.domain.ids import Device, Generation, JobId, NodeId, Rank, Step
from orchestrator.domain.origin import FromCheckpoint, FromSeed, Restore
from orchestrator.domain.plan import Pipeline, Plan, Stage
from orchestrator.domain.requests import FormGeneration
from orchestrator.domain.spec import CheckpointSpec, DataSpec, JobSpec, RecoverySpec, TrainSpec
from tests.direct import Direct
from tests.integration.rank_processes import Child, run_all
from worker import faultpoints
from worker.data.sources import load
from worker.loop import Trainer
from worker.program import load_program
from worker.progress import Unwatched
from worker.session import Session

pytestmark = pytest.mark.timeout(300)

SPEC = JobSpec(
    name="small",
    program="causal_lm",
    data=DataSpec(files=("{stdlib}/json/*.py",)),
    train=TrainSpec(steps=20, micro_batches=4, micro_batch_size=1, sequence=16, warmup_steps=3),
    model={"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "ffn": 64, "dropout": 0.1},
    checkpoint=CheckpointSpec(every=0),
)
DEVICES = tuple(Device(NodeId(node), index) for node in "ab" for index in range(2))


def a_plan(*stages: tuple[int, int], devices: tuple[Device, ...]) -> Plan:
    """Two pipelines cut alike, of two ids each."""
    left = iter(devices)
    return Plan(
        pipelines=tuple(
            Pipeline(
                stages=tuple(Stage(first=first, last=last, devices=(next(left),)) for first, last in stages),
                micro_batches=(2 * p, 2 * p + 1),
            )
            for p in range(2)
        )
    )


TWO = a_plan((0, 4), devices=(DEVICES[0], DEVICES[2]))
"""Each rank mirrors the other."""
FOUR = a_plan((0, 2), (2, 4), devices=DEVICES)


@dataclass(frozen=True)
class Harm:
    """What is done to one rank before a step."""

    rank: int
    before: int
    what: Literal["owned", "mirrored", "weights", "memory", "gradient", "nan"]
    at: str = ""
    """A fault point of that step; by default right before it."""


@dataclass(frozen=True)
class Said:
    answers: list[Answer]
    report: RankReport
    shards: list[ShardSaved]
    error: str


def play(
    child: Child, spec: JobSpec, plan: Plan, restore: Restore, first: int, last: int, harm: Harm | None, root: str
) -> Said:
    """One generation of one rank, from `first` to `last`; to its peers a rank that finds something looks dead."""
    program = load_program(spec.program)
    profile = program.describe(spec)
    shards: list[ShardSaved] = []
    me = plan.devices[child.rank]
    snapshots = Direct(Path(root), profile, me, shards)
    trainer = Trainer(spec, profile, program, load(spec.data), me, Unwatched(), snapshots)
    addresses = {device: child.addresses[Rank(number)] for number, device in enumerate(plan.devices)}
    generation = Generation(first + 1)
    form = FormGeneration(generation=generation, plan=plan, addresses=addresses, restore=restore, committed=Step(first))
    session = Session(
        plan=plan,
        profile=profile,
        seat=plan.seat_of[me],
        generation=generation,
        job=JobId("job"),
        listener=child.listener,
        addresses=addresses,
        mirrors=spec.recovery.mirrors,
        moves=(),
        backend="links",
        progress=Unwatched(),
        form_timeout_s=30.0,
    )
    session.open()
    trainer.restore(session, form)
    answers: list[Answer] = []
    error = ""
    try:
        for step in range(first + 1, last + 1):
            if harm is not None and (harm.rank, harm.before) == (child.rank, step):
                if harm.at:
                    faultpoints.arm(lambda point: _harm_once(trainer, harm, point))
                else:
                    _harm(trainer, harm)
                if harm.what == "memory":
                    break  # told to leave right then
            answers.append(trainer.step(session, Step(step)))
    except Exception as problem:
        error = f"{type(problem).__name__}: {problem}"
    report = trainer.report(generation)
    if error:
        session.close()
    return Said(answers, report, shards, error)


def _harm_once(trainer: Trainer, harm: Harm, point: str) -> None:
    if point == harm.at:
        faultpoints.disarm()
        _harm(trainer, harm)


def _harm(trainer: Trainer, harm: Harm) -> None:
    match harm.what:
        case "owned" | "mirrored" | "memory":
            part = "owned" if harm.what == "memory" else harm.what
            seed = next(s for s in range(100) if Random(s).choice(("owned", "mirrored")) == part)
            assert part in trainer.flip_bit(seed)
        case "weights":
            assert trainer.holdings is not None
            trainer.holdings.state[0, : trainer.holdings.owned] = float("inf")
        case "gradient" | "nan":
            bit = 30 if harm.what == "gradient" else None
            module: Any = trainer._workbench.stage._module  # type: ignore[union-attr]
            spoiled: list[str] = []

            def spoil(*_: object) -> None:
                if not spoiled:
                    spoiled.append(trainer.spoil_gradient(bit))

            module.register_forward_pre_hook(spoil)


def run(
    job: JobSpec, last: int, harm: Harm | None, root: Path, plan: Plan = TWO, restore: Restore | None = None, first: int = 0
) -> list[Said]:
    return run_all(plan.world_size, play, job, plan, restore or FromSeed(), first, last, harm, str(root))


def spec(every: int = 0, **recovery: Any) -> JobSpec:
    return replace(SPEC, checkpoint=CheckpointSpec(every=every), recovery=RecoverySpec(**recovery))


# --- state ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["owned", "mirrored"])
def test_a_flipped_bit_is_found_by_its_own_rank_before_anything_is_made_of_it(
    part: Literal["owned", "mirrored"], tmp_path: Path
) -> None:
    said = run(spec(compare_every=0), 9, Harm(0, 5, part), tmp_path)
    assert said[0].report.found == Disagrees(rank=Rank(0), about="memory")
    assert said[1].report.found is None
    assert [one.report.passed for one in said] == [4, 4], "nobody votes step 5 through"
    assert said[0].report.held is None, "no source"
    assert said[1].report.held and said[1].report.held.step == 4


@pytest.mark.parametrize("part", ["owned", "mirrored"])
def test_one_that_flips_right_before_copies_are_compared_is_its_own_ranks_too(
    part: Literal["owned", "mirrored"], tmp_path: Path
) -> None:
    said = run(spec(every=5, compare_every=0), 9, Harm(0, 5, part, at="after_gather"), tmp_path)
    assert said[0].report.found == Disagrees(rank=Rank(0), about="memory") and said[0].report.held is None
    assert said[1].report.found is None and said[1].report.held and said[1].report.held.step == 5, "nothing is rolled back"
    assert not [shard for one in said for shard in one.shards]


@pytest.mark.parametrize("part", ["owned", "mirrored"])
def test_an_update_that_came_out_wrong_is_found_by_the_mirror_and_a_checkpoint_continues_the_curve(
    part: Literal["owned", "mirrored"], tmp_path: Path
) -> None:
    mirror, owner = (1, 0) if part == "owned" else (0, 1)
    job = spec(every=4, compare_every=0)
    said = run(job, 9, Harm(0, 6, part, at="after_vote"), tmp_path)
    assert said[mirror].report.found == Disagrees(rank=Rank(owner), about="state")
    assert said[owner].report.found is None
    assert [one.report.passed for one in said] == [6, 6]
    assert "after step 6" in said[mirror].error
    shards = [one for rank in said for one in rank.shards]
    assert [shard.step for shard in shards] == [4, 4]
    path = tmp_path / manifest.directory_name(Step(4), Generation(1))
    checkpoint = manifest.commit(path, Step(4), Generation(1), "hash", 0, [shard.shard for shard in shards])
    again = run(job, 9, None, tmp_path, restore=FromCheckpoint(checkpoint=checkpoint), first=4)
    assert again[0].answers == run(job, 9, None, tmp_path / "undisturbed")[0].answers[4:]


def test_copies_that_disagree_are_not_saved(tmp_path: Path) -> None:
    said = run(spec(every=5, compare_every=0), 6, Harm(0, 5, "owned", at="after_vote"), tmp_path)
    assert said[1].report.found == Disagrees(rank=Rank(0), about="state")
    assert "after step 5" in said[1].error and said[1].shards == []


def test_without_mirrors_a_rank_still_knows_its_own_memory_and_nothing_is_compared(tmp_path: Path) -> None:
    said = run(spec(every=2, mirrors=0, compare_every=1), 3, Harm(0, 2, "owned"), tmp_path)
    assert said[0].report.found == Disagrees(rank=Rank(0), about="memory")
    said = run(spec(every=2, mirrors=0, compare_every=1), 3, Harm(0, 2, "owned", at="after_vote"), tmp_path)
    assert [one.error for one in said] == ["", ""]


def test_memory_that_changes_after_it_was_agreed_on_is_not_offered(tmp_path: Path) -> None:
    said = run(spec(compare_every=1), 5, Harm(1, 4, "memory"), tmp_path)
    assert (said[1].report.found, said[1].report.held) == (Disagrees(rank=Rank(1), about="memory"), None)
    assert said[0].report.held and said[0].report.held.step == 3


# --- gradients -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", [TWO, FOUR], ids=["pp1", "pp2"])
def test_a_wrong_gradient_is_seen_where_it_is_computed_twice(plan: Plan, tmp_path: Path) -> None:
    # In an even step the first pipeline's first id is computed by the second pipeline too.
    hit, twin = (0, 1) if plan is TWO else (1, 3)
    said = run(spec(verify="recompute", compare_every=1), 4, Harm(hit, 4, "gradient"), tmp_path, plan)
    assert said[twin].report.found == Disagrees(rank=Rank(hit), about="gradient")
    assert "gradient of micro-batch 0" in said[twin].error
    assert [one.report.passed for one in said] == [3] * plan.world_size, "nobody votes for it"
    assert all(one.report.held and one.report.held.step == 3 for one in said)


def test_a_wrong_gradient_is_not_seen_where_it_is_computed_once(tmp_path: Path) -> None:
    said = run(spec(compare_every=1), 4, Harm(0, 4, "gradient"), tmp_path)
    assert [one.error for one in said] == ["", ""], "owner and mirror have the same wrong gradient"


@pytest.mark.parametrize("plan", [TWO, FOUR], ids=["pp1", "pp2"])
def test_computing_twice_changes_no_bit(plan: Plan, tmp_path: Path) -> None:
    twice = run(spec(verify="recompute"), 5, None, tmp_path, plan)
    assert [one.error for one in twice] == [""] * plan.world_size
    assert twice[0].answers == run(spec(), 5, None, tmp_path, plan)[0].answers


# --- what is not a number ------------------------------------------------------------------------------------------------


def test_a_gradient_that_is_not_finite_stops_every_rank_before_the_update(tmp_path: Path) -> None:
    said = run(spec(compare_every=0), 3, Harm(0, 3, "nan"), tmp_path)
    assert [one.report.found for one in said] == [NotFinite(step=Step(3), micro_batches=())] * 2
    assert all(one.report.held and one.report.held.step == 2 for one in said)


def test_state_that_makes_a_loss_infinite_is_told_from_a_loss_that_is(tmp_path: Path) -> None:
    said = run(spec(compare_every=0), 4, Harm(0, 2, "weights", at="after_vote"), tmp_path)
    assert said[1].report.found == Disagrees(rank=Rank(0), about="state")
    assert len(said[1].answers) == 2


torch.set_num_threads(1)
