"""More jobs than a simulated cluster holds: they give way by priority, nobody starves, no step is lost by it."""

from __future__ import annotations

import pytest

from orchestrator.sim.__main__ import TAIL, replay
from orchestrator.sim.run import Verdict, play, run
from orchestrator.sim.scenario import crowd, scenario


@pytest.mark.parametrize("seed", range(10, 170, 20))
def test_jobs_that_do_not_fit_together_all_end(seed: int) -> None:
    assert len(scenario(seed).jobs) >= 3
    outcome = run(seed)
    told = "\n".join(outcome.trace[-TAIL:])
    assert outcome.verdict is Verdict.PASSED, f"{told}\n{outcome.verdict}: {outcome.message}\nreplay: {replay(seed, None)}"


@pytest.mark.parametrize("seed", [61, 241, 247])
def test_no_job_is_drawn_that_no_cluster_could_run(seed: int) -> None:
    """Here at least five devices were wanted, where tp, pp and the micro-batches left no such number."""
    outcome = play(crowd(seed))
    assert outcome.verdict is Verdict.PASSED, outcome.message
