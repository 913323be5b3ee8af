"""Weeks of training on many machines, in which what is the same for all is implied; and what is asked of them."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from orchestrator.sim.arrivals import Arrival, Mode
from orchestrator.sim.fleet import Fleet
from orchestrator.sim.whatif import WhatIf, away, fleet_of, play, report, scene_of, trace_of

SMALL = WhatIf(name="small", gpus=64, block=8, pp=2, params=1e9, step_s=30.0, days=1.0, rate=800.0, spares=1)


def played(scene: WhatIf, *, dense: bool) -> Fleet:
    fleet = fleet_of(scene, dense=dense)
    play(scene, fleet, trace_of(scene))
    return fleet


@pytest.mark.parametrize("seed", range(3))
def test_what_is_implied_and_what_is_told_step_by_step_lead_to_the_same_decisions(seed: int) -> None:
    scene = replace(SMALL, seed=seed)
    implied, dense = played(scene, dense=False), played(scene, dense=True)
    assert implied.tally.faults > 5 and implied.tally.decisions
    assert implied.tally.decisions == dense.tally.decisions
    assert implied.tally.committed == dense.tally.committed
    assert implied.tally.kernel_steps < dense.tally.kernel_steps / 2


def test_the_same_seed_gives_the_same_report_to_the_byte_in_another_process() -> None:
    asked = {"name": "small", "gpus": 64, "block": 8, "pp": 2, "days": 1, "rate": 2000, "sweep": {"spares": [0, 1]}}

    def told() -> str:
        command = [sys.executable, "-m", "orchestrator.sim.whatif"]
        return subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True, check=True).stdout

    first = told()
    reports = json.loads(first)["reports"]
    assert first == told() and len(reports) == 6
    assert [one["scenario"]["spares"] for one in reports] == [0, 0, 0, 1, 1, 1]


def test_losses_and_what_was_trained_are_all_of_the_time() -> None:
    found = report(SMALL, "everstep", trace_of(SMALL))
    assert 0.5 < found.goodput < 1.0
    share = (sum(found.lost.values()) + found.rerun_s + found.rolled_back * SMALL.step_s) / 86400
    # What is left is training on fewer machines, which takes longer.
    assert found.goodput + share < 1.01


def test_memory_and_spares_lose_less_than_starting_again() -> None:
    scene = replace(SMALL, rate=500.0, spares=2)
    restart, ours = (report(scene, policy, trace_of(scene)) for policy in ("restart", "everstep"))
    assert restart.faults == ours.faults or ours.faults > 0
    assert ours.goodput > restart.goodput


def test_a_machine_without_a_spare_is_missed_until_it_is_back() -> None:
    scene = replace(SMALL, spares=1, shrinks=False)
    lost = Mode(cause="machine", times=0, takes_machine=True, repaired_s=3600.0)
    ended = Mode(cause="software", times=0, takes_machine=False, repaired_s=0.0)
    trace = [
        Arrival(at=float(at), victim=0, mode=mode) for at, mode in ((0, lost), (600, ended), (900, lost), (9000, lost))
    ]
    # The spare takes the first place, comes back after an hour, and is then late for the third by 45 minutes.
    assert [absent_s for _, absent_s in away(scene, trace)] == [0.0, 0.0, 2700.0, 0.0]
    assert [absent_s for _, absent_s in away(replace(scene, spares=0), trace)] == [3600.0, 0.0, 3600.0, 3600.0]
    for policy in ("restart", "shrink"):
        without, with_two = (report(replace(scene, spares=number), policy, trace).goodput for number in (0, 2))
        assert without < with_two


@pytest.mark.parametrize("policy", ["restart", "shrink", "everstep"])
def test_checkpoints_that_keep_training_waiting_cost_every_policy_the_same_share(policy: str) -> None:
    scene = replace(SMALL, rate=0.0, checkpoint_every=10, checkpoint_stall_s=15.0)
    found = report(scene, policy, [])
    assert found.goodput == pytest.approx(30.0 / 31.5, abs=1e-3)
    assert found.lost["checkpoints"] == pytest.approx(found.seconds * 1.5 / 31.5, rel=0.01)


def test_a_scenario_that_makes_no_sense_is_refused_in_words() -> None:
    with pytest.raises(ValueError, match="means nothing here"):
        scene_of({"name": "x", "gpus": 64, "gpu": 3})
    with pytest.raises(ValueError, match="pp 4 needs as many"):
        scene_of({"name": "x", "gpus": 8})
