"""Ranks on a CUDA device: the curve of a single process on CPU, whichever backend carries it, and losses along the way."""

from __future__ import annotations

import math
import os
import signal
import time
from dataclasses import replace

import pytest

from orchestrator.domain.generation import Answer
from orchestrator.domain.ids import Device, Step
from orchestrator.domain.layout import layout, transfers
from orchestrator.domain.origin import FromMemory, FromSeed
from orchestrator.domain.plan import Plan
from orchestrator.domain.spec import JobSpec
from tests.integration.rank_processes import Ranks
from worker.program import load_program
from worker.reference import run

from .jobs import LAYERS, a_plan, a_spec, on_cpu
from .ranks import Abort, Left, Train, Trained, obey, said, until_step

pytestmark = pytest.mark.timeout(200)

ALONE = a_plan(([0, LAYERS], [0, 1, 2, 3]))
DP2 = a_plan(([0, LAYERS], [0, 1]), ([0, LAYERS], [2, 3]))
OTHERWISE = a_plan(([0, LAYERS], [3, 0, 2]), ([0, LAYERS], [1]))
TP2 = a_plan(([0, LAYERS], [0, 1, 2, 3]), tp=2)
PP2 = a_plan(([0, 3, LAYERS], [0, 1, 2, 3]))
TP2_PP2_DP2 = a_plan(([0, 3, LAYERS], [0, 1]), ([0, 3, LAYERS], [2, 3]), tp=2)


def trained(spec: JobSpec, plan: Plan, last: int = 8) -> list[Trained]:
    with Ranks(plan.world_size, obey, spec) as ranks:
        for pipe in ranks.pipes:
            pipe.send(Train(plan=plan, generation=1, restore=FromSeed(), last=last))
        found: list[Trained] = [said(ranks, rank, Trained) for rank in range(plan.world_size)]
    assert all(one.answers == found[0].answers for one in found)
    return found


def assert_close(answers: list[Answer], spec: JobSpec, tolerance: float = 1e-5) -> None:
    gap = 0.0
    for answer, expected in zip(answers, run(on_cpu(spec), answers[-1].step)[answers[0].step - 1 :], strict=True):
        for mine, theirs in zip(answer.losses, expected.losses, strict=True):
            gap = max(gap, abs(mine - theirs) / abs(theirs))
            assert math.isclose(mine, theirs, rel_tol=tolerance), (answer.step, mine, theirs)
    print(f"largest gap to the curve on CPU: {gap:.1e}")


@pytest.mark.parametrize(
    ("backend", "plan"),
    [
        pytest.param("links", ALONE, id="links-alone"),
        pytest.param("links", TP2_PP2_DP2, id="links-tp2-pp2-dp2"),
        pytest.param("nccl", ALONE, id="nccl-alone"),
        pytest.param("nccl", DP2, id="nccl-dp2"),
        pytest.param("nccl", TP2, id="nccl-tp2"),
        pytest.param("nccl", PP2, id="nccl-pp2"),
        pytest.param("nccl", TP2_PP2_DP2, id="nccl-tp2-pp2-dp2"),
    ],
)
def test_any_plan_has_the_curve_of_one_process_on_cpu(backend: str, plan: Plan) -> None:
    spec = a_spec("cuda", backend)  # type: ignore[arg-type]
    found = trained(spec, plan)
    assert_close(found[0].answers, spec)
    print(f"step: {found[0].step_s * 1000:.1f} ms")


def test_bf16_stays_within_a_hundredth() -> None:
    spec = a_spec(dtype="bf16", activation_checkpointing=True)
    assert_close(trained(spec, ALONE)[0].answers, spec, 1e-2)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_exact_mode_has_the_same_bits_twice_and_wherever_micro_batches_are(dtype: str) -> None:
    spec = a_spec(exact=True, dtype=dtype)
    found = [trained(spec, plan)[0].answers for plan in (ALONE, ALONE, DP2, OTHERWISE, PP2)]
    assert all(answers == found[0] for answers in found)
    over_nccl = trained(replace(spec, recovery=replace(spec.recovery, backend="nccl")), ALONE)
    assert over_nccl[0].answers == found[0]
    assert_close(found[0], spec, 1e-5 if dtype == "fp32" else 1e-2)


@pytest.mark.parametrize("backend", ["links", "nccl"])
def test_a_killed_rank_is_left_at_once_and_its_state_comes_from_its_mirror(backend: str) -> None:
    """Exact: the bits must be those of a run in which nobody died."""
    spec = a_spec("cuda", backend, exact=True)  # type: ignore[arg-type]
    undisturbed = trained(spec, DP2, 12)[0]
    with Ranks(2, obey, spec) as ranks:
        for pipe in ranks.pipes:
            pipe.send(Train(plan=DP2, generation=1, restore=FromSeed(), last=10**6))
        until_step(ranks, 0, 4)
        ranks.kill(1)
        if backend == "nccl":
            # Nobody answers any more: the survivor is inside a kernel, or says by itself that its peer is lost.
            ranks.processes[1].join(10)
            ranks.pipes[0].send(Abort())
        left: Left = said(ranks, 0, Left)
        print(f"left after {left.after_s} s: {left.reason}")
        assert left.after_s is None or left.after_s < spec.recovery.leave_s
        report = left.report
        assert report.held is not None and report.held.step == report.passed >= 4
        ranks.start(1, obey, spec)
        restore = moved(spec, DP2, report.passed, report.answer, DP2.devices[0])
        for pipe in ranks.pipes:
            pipe.send(Train(plan=DP2, generation=2, restore=restore, last=12))
        found: list[Trained] = [said(ranks, rank, Trained) for rank in range(2)]
    assert found[0].answers == undisturbed.answers[report.passed :]
    assert found[0].hashes == undisturbed.hashes
    assert found[1].hashes == found[0].hashes[::-1], "a mirror differs from its owner"


def moved(spec: JobSpec, plan: Plan, step: int, answer: Answer | None, survivor: Device) -> FromMemory:
    profile = load_program(spec.program).describe(spec)
    wanted = layout(plan, profile, mirrors=1)
    found = transfers({survivor: wanted.held(survivor)}, wanted)
    assert not found.missing
    return FromMemory(step=Step(step), answer=answer, moves=found.moves)


def test_a_survivor_inside_a_kernel_leaves_when_its_communicators_are_aborted() -> None:
    """The peer is stopped, not dead: nothing but the abort can end the wait."""
    spec = a_spec("cuda", "nccl")
    with Ranks(2, obey, spec) as ranks:
        for pipe in ranks.pipes:
            pipe.send(Train(plan=DP2, generation=1, restore=FromSeed(), last=10**6))
        until_step(ranks, 0, 4)
        os.kill(ranks.processes[1].pid, signal.SIGSTOP)
        while ranks.pipes[0].poll(1.0):
            ranks.pipes[0].recv()  # steps that had passed
        time.sleep(0.5)
        ranks.pipes[0].send(Abort())
        left: Left = said(ranks, 0, Left, 20)
    print(f"left {left.after_s} s after the abort: {left.reason}")
    assert left.after_s is not None and left.after_s < spec.recovery.leave_s
    assert left.report.held is not None and left.report.held.step >= 4
