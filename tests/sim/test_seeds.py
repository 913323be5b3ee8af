"""Ten seeds of the simulated world, the real kernel in the middle. A failure prints the command that replays it.

And failover, systematically: one failure each, and a supervisor that dies after every commit and effect of the recovery.
"""

from __future__ import annotations

import pytest

from orchestrator.sim.__main__ import TAIL, replay, replay_failover
from orchestrator.sim.run import Verdict, failovers, run


@pytest.mark.parametrize("seed", range(10))
def test_seed(seed: int) -> None:
    outcome = run(seed)
    told = "\n".join(outcome.trace[-TAIL:])
    assert outcome.verdict is Verdict.PASSED, f"{told}\n{outcome.verdict}: {outcome.message}\nreplay: {replay(seed, None)}"


@pytest.mark.parametrize("seed", [1278, 2570, 5277, 16892, 29484, 30408, 40960, 42264, 62688, 302660, 305688])
def test_a_seed_that_once_failed(seed: int) -> None:
    """1278: a rank raised, that was recorded, its supervisor died, and the next one was told of the same end again.

    2570: one newcomer's report was late, and with it went its node, on which everybody else had reported.

    5277: a step proven by reports was timed from a host's clock to the supervisor's, which had been set back.

    16892, 29484: a process was asked what it holds that was never told of a join, as successor and for want of moves.

    30408: two ends of one rank were heard at once, so its successor was told to form what was planned with its memory.

    40960: a job paused while it was asked whether it fits took the plan it was to begin with for that answer.

    42264: a job that began with a checkpoint had nothing to go back to when an entry and its base were damaged.

    62688: the answer for the size that a job had came late, and was taken for one to the size it has.

    302660: the only rank of a job hangs, and of the newcomers that hold all it had one cannot say so in time.

    305688: a spare was told step 28 by a generation that never restored, and said after a rollback that 28 had passed."""
    assert run(seed).verdict is Verdict.PASSED


@pytest.mark.parametrize("seed", range(3))
def test_supervisor_may_die_at_every_point_of_a_recovery(seed: int) -> None:
    points = 0
    for points, outcome in enumerate(failovers(seed)):  # noqa: B007
        told = "\n".join(outcome.trace[-TAIL:])
        assert outcome.verdict is Verdict.PASSED, f"{told}\n{outcome.message}\nreplay: {replay_failover(outcome)}"
        assert outcome.rolled_back == 0
    assert points >= 6


@pytest.mark.parametrize("seed", (2, 3))
def test_a_second_rank_may_die_with_the_supervisor_at_every_point_of_a_recovery(seed: int) -> None:
    """3: the first failure is a rank that alone had seen a vote pass."""
    losses = 0
    for outcome in failovers(seed, twice=True):
        told = "\n".join(outcome.trace[-TAIL:])
        again = replay_failover(outcome, twice=True)
        assert outcome.verdict is Verdict.PASSED, f"{told}\n{outcome.message}\nreplay: {again}"
        assert outcome.rolled_back == 0, again
        losses += any("* and with it" in line for line in outcome.trace)
    assert losses >= 5
