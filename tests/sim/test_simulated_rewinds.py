"""The store forgets its latest commits under a supervisor that lives, in worlds where anything else goes wrong too."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.sim.run import Verdict, play
from orchestrator.sim.scenario import Scenario, Trouble, scenario

CHUNK = 20


def that_goes_back(seed: int) -> Scenario | None:
    """One of five troubles is that; None where the seed's world is one of single failures."""
    scene = scenario(seed, None)
    if scene.gentle or scene.script:
        return None
    return replace(scene, troubles=(*scene.troubles, *(Trouble.REWIND_STORE,) * max(1, len(scene.troubles) // 4)))


@pytest.mark.parametrize("first", range(0, 2 * CHUNK, CHUNK))
def test_what_the_store_forgets_is_written_again_and_training_comes_to_the_same(first: int) -> None:
    rewritten = 0
    for seed in range(first, first + CHUNK):
        scene = that_goes_back(seed)
        if scene is None:
            continue
        outcome = play(scene)
        told = "\n".join(outcome.trace[-40:])
        assert outcome.verdict is Verdict.PASSED, f"{told}\n{outcome.verdict}: {outcome.message}\nseed {seed}"
        rewritten += sum("writes again all it knows" in line for line in outcome.trace)
    assert rewritten, "or nothing was tried"
