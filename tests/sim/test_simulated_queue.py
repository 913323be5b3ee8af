"""More jobs than a simulated cluster holds: they give way by priority, nobody starves, no step is lost by it."""

from __future__ import annotations

import pytest

from orchestrator.sim.__main__ import TAIL
from orchestrator.sim.run import Verdict, play
from orchestrator.sim.scenario import crowd


@pytest.mark.parametrize("seed", range(8))
def test_jobs_that_do_not_fit_together_all_end(seed: int) -> None:
    outcome = play(crowd(seed))
    told = "\n".join(outcome.trace[-TAIL:])
    assert outcome.verdict is Verdict.PASSED, f"{told}\n{outcome.verdict}: {outcome.message}\nreplay: crowd({seed})"
