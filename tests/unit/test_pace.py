"""What is saved how often follows from what saving costs and from how often memory does not survive."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.recovery.pace import LONGEST, PRIOR_S, SHARE, Costs, choose, every_auto, failure_rate

DENSE = Costs(step=1.0, stall=0.05, write=6.0, entry_stall=0.01, entry_write=0.2, read=3.0, replay=0.1)
"""A model whose state takes six steps to write and whose gradient a fifth of one."""
HOURLY = 1 / 3600
seconds = st.floats(1e-4, 1e3)


def test_more_failures_more_saves() -> None:
    rates = [1 / 86400, 1 / 3600, 1 / 600, 1 / 60]
    found = [every_auto(1.0, 0.5, rate) for rate in rates]
    assert found == sorted(found, reverse=True)
    young = sqrt(2 * 1.0 * 86400) / 0.5
    assert found[0] == pytest.approx(young, rel=0.02)


def test_saving_that_costs_nothing_is_done_every_step_and_one_that_never_ends_once_a_failure() -> None:
    assert every_auto(0.0, 1.0, HOURLY) == 1
    assert every_auto(10_000.0, 10.0, HOURLY) == 360


@given(cost=seconds, step=seconds, rate=st.floats(1e-7, 1e-2))
def test_the_interval_is_near_the_best_there_is(cost: float, step: float, rate: float) -> None:
    def lost(every: int) -> float:
        return cost / every + rate * step * every / 2 * step

    found = every_auto(cost, step, rate)
    assert found >= 1
    if cost < 0.1 / rate and step < 0.1 / rate:
        assert lost(found) <= 1.15 * min(lost(every) for every in (1, max(1, found // 2), found, 2 * found, 4 * found))


def test_what_is_not_known_yet_is_one_failure_a_day_and_what_was_seen_counts() -> None:
    assert failure_rate(0, 0.0) == 1 / PRIOR_S
    assert failure_rate(9, 9 * PRIOR_S) == pytest.approx(1 / PRIOR_S)
    assert failure_rate(5, 3600.0) > 4 * failure_rate(0, 3600.0)


def test_a_job_that_is_often_rolled_back_keeps_a_journal_and_one_that_hardly_is_does_not() -> None:
    often, hardly = choose(DENSE, 1 / 300), choose(replace(DENSE, stall=0.01), 1e-7)
    assert often.policy == "journal" and often.every <= LONGEST
    assert hardly.policy == "full"
    assert "would cost" in often.reason and f"every {often.every} steps" in often.reason


def test_a_disk_too_slow_for_every_step_gets_whole_states_as_often_as_it_can_take_them() -> None:
    slow = replace(DENSE, entry_write=0.6, write=18.0)
    found = choose(slow, 1 / 60)
    assert found.policy == "full"
    assert found.every >= 36 and slow.write <= SHARE * found.every * slow.step


@given(
    costs=st.builds(
        Costs,
        step=seconds,
        stall=seconds,
        write=seconds,
        entry_stall=seconds,
        entry_write=seconds,
        read=seconds,
        replay=seconds,
    ),
    rate=st.floats(1e-7, 1e-2),
)
def test_the_disk_always_keeps_up(costs: Costs, rate: float) -> None:
    found = choose(costs, rate)
    writing = costs.write + (found.every * costs.entry_write if found.policy == "journal" else 0.0)
    assert found.every >= 1 and found.cost_s > 0.0
    assert writing <= SHARE * found.every * costs.step * (1 + 1e-6)
    assert found.policy == "full" or found.every <= LONGEST
