"""A rank that is told to leave and cannot because the machine is busy is not one that hangs."""

from __future__ import annotations

import pytest

from worker.leave import STARVED_S, Leave
from worker.watch import Process

LEAVE_S = 0.5


def a_process(starved_s: float, *, is_stopped: bool = False) -> Process:
    return Process(is_stopped=is_stopped, is_in_disk=False, cpu_s=1.0, starved_s=starved_s)


def taken(share: float, *, is_stopped: bool = False) -> float:
    """Seconds that a rank is given which never leaves, and gets the CPU for all but this share of the time."""
    leave, now = Leave(LEAVE_S, 0.0, a_process(7.0)), LEAVE_S
    while more_s := leave.more_s(now, a_process(7.0 + share * now, is_stopped=is_stopped)):
        now += more_s
    return now


@pytest.mark.parametrize(("share", "seconds"), [(0.0, LEAVE_S), (0.5, 2 * LEAVE_S), (0.95, LEAVE_S + STARVED_S)])
def test_time_in_which_it_was_not_run_counts_for_nothing_up_to_a_bound(share: float, seconds: float) -> None:
    assert taken(share) == pytest.approx(seconds, abs=0.05)


def test_one_that_is_stopped_or_gone_has_no_more_time() -> None:
    assert taken(0.9, is_stopped=True) == LEAVE_S
    assert Leave(LEAVE_S, 0.0, None).more_s(LEAVE_S, None) == 0.0
