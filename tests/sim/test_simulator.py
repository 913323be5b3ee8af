"""The simulator itself: it replays exactly, and it finds bugs that are planted in the kernel."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from orchestrator.domain.effects import Effect
from orchestrator.domain.profile import Interval
from orchestrator.domain.state import Reforming
from orchestrator.recovery import breaker
from orchestrator.sim.__main__ import main, replay
from orchestrator.sim.clock import Clock
from orchestrator.sim.memory import Violation, check_filled, uncovered
from orchestrator.sim.run import Verdict, failovers, run
from orchestrator.supervisor import hearing
from orchestrator.supervisor.draft import Draft


def test_a_seed_replays_to_the_letter_in_another_process() -> None:
    """Whatever the order in which another interpreter iterates over sets."""

    def trace(hash_seed: str) -> str:
        command = [sys.executable, "-m", "orchestrator.sim", "--seed", "3", "--trace"]
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
        return said.rpartition(", ")[0]  # all but the CPU time

    first = trace("1")
    assert "running" in first and first == trace("2")


def raises(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(hearing, "rank_ready", lambda *_: 1 / 0)


def test_failures_are_told_with_the_command_that_replays_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    raises(monkeypatch)
    monkeypatch.setattr(sys, "argv", ["sim", "--first", "0", "--seeds", "1", "--steps", "4"])
    assert main() == 3
    assert replay(0, 4) in capsys.readouterr().out


def test_time_jumps_in_order() -> None:
    clock, seen = Clock(), []
    for delay in (0.3, 0.1, 0.2, 0.1):
        clock.after(delay, lambda delay=delay: seen.append((clock.now, delay)))  # type: ignore[misc]
    clock.after(0.15, lambda: seen.append((0.0, 0.0))).cancel()
    while clock.advance():
        pass
    assert seen == [(0.1, 0.1), (0.1, 0.1), (0.2, 0.2), (0.3, 0.3)]


def test_uncovered_names_the_missing_piece() -> None:
    held = [Interval("w", 0, 10), Interval("w", 10, 20), Interval("w", 30, 40)]
    assert not uncovered([Interval("w", 5, 15)], held)
    assert uncovered([Interval("w", 5, 35)], held) == [Interval("w", 20, 35)]
    assert uncovered([Interval("v", 0, 1)], held) == [Interval("v", 0, 1)]


def test_moves_that_leave_a_gap_or_fill_twice_are_violations() -> None:
    whole = (Interval("w", 0, 20),)
    check_filled("b", whole, [Interval("w", 10, 30)], [Interval("w", 0, 10)])
    with pytest.raises(Violation, match="no source"):
        check_filled("b", whole, [], [Interval("w", 0, 10)])
    with pytest.raises(Violation, match="30 elements where 20"):
        check_filled("b", whole, [Interval("w", 10, 20)], [Interval("w", 0, 20)])


def test_effects_that_a_successor_does_not_take_up_are_found_by_failover(monkeypatch: pytest.MonkeyPatch) -> None:
    emit = Draft.emit

    def forgets(draft: Draft, effect: Effect) -> None:
        before = dict(draft.record.outbox)
        emit(draft, effect)
        if isinstance(draft.state, Reforming):
            draft.set(outbox=before)

    monkeypatch.setattr(Draft, "emit", forgets)
    assert any(outcome.verdict is not Verdict.PASSED for seed in range(3) for outcome in failovers(seed))


def test_a_job_whose_program_raises_at_a_step_must_end_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(7).verdict is Verdict.PASSED
    monkeypatch.setattr(breaker, "_is_like", lambda one, other: one is other)
    outcome = run(7)
    assert outcome.verdict is Verdict.LIVENESS and "no_progress" in outcome.message
