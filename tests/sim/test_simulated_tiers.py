"""Ranks go in a simulated world where every step is saved: what memory lacks comes from disk, and only that."""

from __future__ import annotations

from dataclasses import replace

from orchestrator.domain.spec import ParallelSpec
from orchestrator.sim.run import Outcome, Verdict, play
from orchestrator.sim.scenario import Scenario, Trouble, scenario

SEEDS = (0, 1, 2, 4)


def scene(seed: int) -> Scenario:
    """Nobody mirrors, or failures so close together that owners and mirrors go in one recovery; checkpoints that go bad."""
    drawn = scenario(seed, steps=100)
    job = drawn.jobs[0]
    return replace(
        drawn,
        nodes=(2,) * 6,
        racks=0,
        jobs=(
            replace(
                job,
                train=replace(job.train, micro_batches=4),
                parallel=ParallelSpec(tp=2, pp=2, dp=2),
                checkpoint=replace(job.checkpoint, policy="journal", every=8, restore_from="", local="/own/disk"),
                recovery=replace(job.recovery, mirrors=seed % 2),
            ),
        ),
        starts={},
        broken={},
        troubles=(*(Trouble.KILL_RANK,) * 6, Trouble.DAMAGE_CHECKPOINT, Trouble.CRASH_SUPERVISOR),
        between_s=0.6,
        trouble_until_s=15.0,
        gentle=False,
    )


def outcome(seed: int) -> Outcome:
    found = play(scene(seed))
    assert found.verdict is Verdict.PASSED, "\n".join((*found.trace[-40:], f"{found.verdict}: {found.message}"))
    return found


def test_memory_and_disk_are_mixed_where_they_hold_one_state() -> None:
    told = [line for seed in SEEDS for line in outcome(seed).trace]
    assert sum("intervals that are in no memory" in line for line in told) >= 2
    assert any("'s disk" in line for line in told), "a node that is still there has its part beside it"
