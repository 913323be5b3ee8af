"""Constants from measured recoveries, and the pauses that the simulator makes of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.domain.failure import Cause, Fault
from orchestrator.domain.ids import Generation
from orchestrator.domain.incident import Incident
from orchestrator.domain.rungs import Rung
from orchestrator.sim.calibrate import Killed, calibrated

STEP_S = 0.2
PHASES = {
    "detect": 0.016, "settle": 0.046, "prepare": 0.01, "deliver": 0.004, "form": 0.026, "build": 0.013,
    "transfer": 0.028, "gather": 0.016, "first_step": 0.22,
}  # fmt: skip


def a_kill(unseen_s: float = 0.0, attempts: int = 1, **phases: float) -> Killed:
    """unseen_s: of the pause, in no phase."""
    took = {**PHASES, **phases}
    incident = Incident(
        number=1,
        fault=Fault(cause=Cause.RANK_LOST, message="killed", at=0.0),
        generation=Generation(1),
        phases=took,
        pause_s=sum(took.values()) - STEP_S + unseen_s,
        attempts=attempts,
    )
    return Killed(incident=incident, step_s=STEP_S)


@pytest.mark.parametrize("phases", [{}, {"prepare": 0.11}, {"first_step": 0.15}, {"settle": 0.3}])
def test_phases_that_follow_on_each_other_add_up_to_the_pause_and_others_do_not(phases: dict[str, float]) -> None:
    found = calibrated([a_kill(**phases)] * 3, devices=8)
    assert found.rung is Rung.FORK
    assert found.ratio == pytest.approx(1.0, abs=0.02)
    assert found.simulated_s == pytest.approx(found.measured_s, rel=0.02)


def test_recoveries_that_a_busy_machine_disturbed_in_different_ways_do_not_count_against_the_simulator() -> None:
    kills = [a_kill(settle=0.5), a_kill(form=0.4), a_kill(transfer=0.9), a_kill(), a_kill(first_step=1.4)]
    assert calibrated(kills, devices=8).ratio == pytest.approx(1.0, abs=0.02)


def test_time_that_no_phase_accounts_for_is_missed_by_the_simulator() -> None:
    assert calibrated([a_kill(unseen_s=0.12)] * 5, devices=8).ratio < 0.7


def test_the_first_step_is_predicted_from_other_failures() -> None:
    kills = [a_kill(first_step=0.2), a_kill(first_step=0.2), a_kill(first_step=0.6)]
    found = calibrated(kills, devices=8)
    assert found.measured_s == pytest.approx(0.159) and found.simulated_s == pytest.approx(0.359, rel=0.02)


def test_recoveries_that_were_disturbed_by_another_failure_count_for_nothing() -> None:
    kills = [a_kill(), a_kill(), a_kill(attempts=3, settle=9.0), replace(a_kill(), step_s=STEP_S)]
    assert calibrated(kills, devices=8).kills == 3
    with pytest.raises(ValueError, match="2 recoveries ended"):
        calibrated(kills[:3], devices=8)
