"""The store forgets its latest commits, under a supervisor or before one begins, where anything else goes wrong too."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.sim.run import Verdict, play
from orchestrator.sim.scenario import Scenario, Trouble, scenario

CHUNK = 20
SAID = {
    Trouble.REWIND_STORE: "writes again all it knows",
    Trouble.REWIND_UNSEEN: "goes on from what hosts remember",
}


def that_goes_back(seed: int, how: Trouble) -> Scenario | None:
    """One of five troubles is that; None where the seed's world is one of single failures."""
    scene = scenario(seed, None)
    if scene.gentle or scene.script:
        return None
    # What would tell a forged checkpoint is the step after it, which such a store may have forgotten.
    others = tuple(trouble for trouble in scene.troubles if trouble is not Trouble.FORGE_CHECKPOINT)
    return replace(scene, troubles=(*others, *(how,) * max(1, len(others) // 4)))


@pytest.mark.parametrize("how", SAID)
@pytest.mark.parametrize("first", range(0, 2 * CHUNK, CHUNK))
def test_what_the_store_forgets_is_known_again_and_training_comes_to_the_same(first: int, how: Trouble) -> None:
    recovered = 0
    for seed in range(first, first + CHUNK):
        scene = that_goes_back(seed, how)
        if scene is None:
            continue
        outcome = play(scene)
        told = "\n".join(outcome.trace[-40:])
        assert outcome.verdict is Verdict.PASSED, f"{told}\n{outcome.verdict}: {outcome.message}\nseed {seed}"
        recovered += sum(SAID[how] in line for line in outcome.trace)
    assert recovered, "or nothing was tried"
