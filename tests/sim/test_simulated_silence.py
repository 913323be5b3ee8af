"""Cables are pulled in a simulated world: nodes fall silent, to everybody, and nobody is told."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.domain.spec import ParallelSpec
from orchestrator.sim import trouble
from orchestrator.sim.run import Outcome, Verdict, play
from orchestrator.sim.scenario import Scenario, Trouble, scenario

SEEDS = range(8)


def scene(seed: int) -> Scenario:
    """Five nodes and a job that trains on any of them; one cable at a time, so that nothing may be rolled back."""
    drawn = scenario(seed, steps=400)
    job = drawn.jobs[0]
    return replace(
        drawn,
        nodes=(2,) * 5,
        jobs=(replace(job, parallel=ParallelSpec(tp=1, pp=1), recovery=replace(job.recovery, spares=0)),),
        troubles=(Trouble.UNPLUG,),
        between_s=3.0,
        trouble_until_s=90.0,
        gentle=True,
        broken={},
    )


def outcomes(monkeypatch: pytest.MonkeyPatch, seconds: float) -> list[Outcome]:
    monkeypatch.setattr(trouble, "UNPLUGGED_S", (seconds,))
    found = [play(scene(seed), trace=False) for seed in SEEDS]
    for one in found:
        assert one.verdict is Verdict.PASSED, "\n".join((*one.trace[-40:], f"{one.verdict}: {one.message}"))
    return found


def told(found: list[Outcome], words: str) -> int:
    return sum(words in line for one in found for line in one.trace)


def test_a_node_without_power_is_given_up_and_used_again_when_it_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    found = outcomes(monkeypatch, 10.0)
    assert told(found, "does not answer, and") >= 4 and told(found, "a larger plan is ready") >= 4


def test_half_a_second_without_a_cable_costs_no_node(monkeypatch: pytest.MonkeyPatch) -> None:
    found = outcomes(monkeypatch, 0.5)
    assert told(found, "unplug: ") >= 8 and told(found, "does not answer, and") == 0
