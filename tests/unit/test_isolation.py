"""Unreachable is not failed: a host that nobody speaks to ends its ranks only once they have stopped, or at the limit."""

from __future__ import annotations

from worker.isolation import Isolation


def an_isolation(*, heard_at: float = 0.0, moved_at: float = 0.0, longest_step_s: float = 0.0) -> Isolation:
    return Isolation(heard_at=heard_at, moved_at=moved_at, grace_s=60.0, longest_step_s=longest_step_s)


def test_ranks_of_a_host_that_is_heard_are_left_alone_however_long_they_stand_still() -> None:
    assert an_isolation(heard_at=990.0).judge(1000.0, 600.0) is None


def test_healthy_ranks_train_on_without_a_supervisor() -> None:
    assert an_isolation(moved_at=599.0).judge(600.0, 0.0) is None
    assert an_isolation(moved_at=599.0).judge(599.9, 600.0) is None


def test_ranks_that_stopped_committing_are_ended_after_the_grace() -> None:
    isolation = an_isolation()
    assert isolation.judge(59.0, 600.0) is None
    verdict = isolation.judge(61.0, 600.0)
    assert verdict is not None and verdict.spares_finished and "no step was committed" in verdict.reason


def test_long_steps_are_given_ten_times_their_length() -> None:
    isolation = an_isolation(longest_step_s=20.0)
    assert isolation.judge(199.0, 600.0) is None
    assert isolation.judge(201.0, 600.0) is not None


def test_at_the_limit_even_healthy_and_finished_ranks_are_ended() -> None:
    verdict = an_isolation(moved_at=600.9).judge(601.0, 600.0)
    assert verdict is not None and not verdict.spares_finished


def test_host_that_everybody_counts_as_gone_ends_itself_unless_isolation_has_no_limit() -> None:
    isolation = an_isolation()
    assert not isolation.is_forsaken(659.0, 600.0) and isolation.is_forsaken(661.0, 600.0)
    isolation.hear(600.0)
    assert not isolation.is_forsaken(661.0, 600.0)
    assert not an_isolation().is_forsaken(1e6, 0.0)


def test_the_longest_step_is_learned_from_commits_not_from_forming() -> None:
    isolation = an_isolation()
    isolation.move(100.0)
    isolation.commit(103.0)
    isolation.commit(104.0)
    assert isolation.longest_step_s == 3.0


def test_a_host_that_was_stopped_itself_does_not_count_that_time_against_its_ranks() -> None:
    isolation = an_isolation()
    assert isolation.judge(1.0, 600.0) is None
    assert isolation.judge(400.0, 600.0) is None, "a machine that was suspended"
    assert isolation.judge(409.0, 600.0) is None
    for now in range(410, 461):
        verdict = isolation.judge(float(now), 600.0)
    assert verdict is not None and verdict.spares_finished
    other = an_isolation()
    assert other.judge(1.0, 600.0) is None and other.judge(700.0, 600.0) is not None, "others have given it up by then"
