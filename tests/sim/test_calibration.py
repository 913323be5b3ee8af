"""Constants from measured recoveries, and the pause that the simulator makes of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.domain.ids import Generation
from orchestrator.domain.job import Cause, Fault, Incident
from orchestrator.domain.rungs import Rung
from orchestrator.sim.calibrate import calibrated, pace_of

MEASURED = Incident(
    number=1,
    fault=Fault(cause=Cause.RANK_LOST, message="killed", at=0.0),
    generation=Generation(1),
    phases={
        "detect": 0.016, "settle": 0.046, "prepare": 0.01, "deliver": 0.004, "form": 0.026, "build": 0.013,
        "transfer": 0.028, "gather": 0.016, "first_step": 0.22,
    },
    pause_s=0.179,
)  # fmt: skip


def test_phases_that_follow_on_each_other_add_up_to_the_pause_and_others_do_not() -> None:
    found = calibrated([MEASURED], step_s=0.2, devices=8)
    assert found.rung is Rung.FORK
    assert found.simulated_s == pytest.approx(0.179, rel=0.02)
    # A process that is forked while others settle costs what it takes longer than they do.
    slow = replace(MEASURED, phases={**MEASURED.phases, "prepare": 0.11}, pause_s=0.279)
    assert calibrated([slow], step_s=0.2, devices=8).simulated_s == pytest.approx(0.279, rel=0.02)
    early = replace(MEASURED, phases={**MEASURED.phases, "first_step": 0.15}, pause_s=0.109)
    assert calibrated([early], step_s=0.2, devices=8).simulated_s == pytest.approx(0.109, rel=0.02)


def test_constants_are_medians_of_recoveries_that_were_not_disturbed() -> None:
    odd = replace(MEASURED, phases={**MEASURED.phases, "settle": 9.0})
    again = replace(MEASURED, phases={"settle": 0.5}, attempts=3)
    assert pace_of([MEASURED, odd, MEASURED, again], 0.2) == pace_of([MEASURED], 0.2)
    with pytest.raises(ValueError, match="no recovery"):
        pace_of([again], 0.2)
