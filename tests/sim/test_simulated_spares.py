"""Nodes die one after another in a simulated world where a spare stands by, and it takes over."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from orchestrator.domain.rungs import Rung
from orchestrator.domain.spec import ParallelSpec
from orchestrator.sim.run import Outcome, Verdict, play
from orchestrator.sim.scenario import Scenario, Trouble, scenario

SEEDS = range(10)


def scene(seed: int, *, spares: int) -> Scenario:
    """A plan of four nodes that cannot shrink, on six; nodes come and go, also while a recovery is under way."""
    drawn = scenario(seed, steps=500)
    job = drawn.jobs[0]
    train = replace(job.train, micro_batches=4)
    return replace(
        drawn,
        nodes=(2,) * 6,
        racks=seed % 3,
        jobs=(
            replace(
                job,
                train=train,
                parallel=ParallelSpec(tp=2, pp=2, dp=2),
                recovery=replace(job.recovery, spares=spares),
            ),
        ),
        troubles=(Trouble.KILL_NODE, Trouble.ADD_NODE, Trouble.ADD_NODE, Trouble.KILL_RANK, Trouble.CRASH_SUPERVISOR),
        between_s=4.0,
        trouble_until_s=60.0,
        gentle=False,
    )


def outcomes(spares: int) -> list[Outcome]:
    found = [play(scene(seed, spares=spares)) for seed in SEEDS]
    for one in found:
        assert one.verdict is Verdict.PASSED, "\n".join((*one.trace[-40:], f"{one.verdict}: {one.message}"))
    return found


def test_lost_nodes_are_replaced_by_spares_without_planning() -> None:
    found = outcomes(spares=1)
    rungs = Counter(rung for one in found for rung in one.rungs)
    assert rungs[Rung.SPARE] >= 3, rungs
    told = [line for one in found for line in one.trace]
    assert any("stands by: 2 ranks are forked and built" in line for line in told)
    assert any("stands by and takes over), expected pause" in line for line in told)


def test_without_spares_none_is_taken() -> None:
    assert not [rung for one in outcomes(spares=0) for rung in one.rungs if rung is Rung.SPARE]
