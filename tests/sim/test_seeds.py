"""Ten seeds of the simulated world, the real kernel in the middle. A failure prints the command that replays it."""

from __future__ import annotations

import pytest

from orchestrator.sim.__main__ import TAIL, replay
from orchestrator.sim.run import Verdict, run


@pytest.mark.parametrize("seed", range(10))
def test_seed(seed: int) -> None:
    outcome = run(seed)
    told = "\n".join(outcome.trace[-TAIL:])
    assert outcome.verdict is Verdict.PASSED, f"{told}\n{outcome.verdict}: {outcome.message}\nreplay: {replay(seed, None)}"
