"""Weeks of training on many machines, in which what is the same for all is implied; and what is asked of them."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from orchestrator.sim.arrivals import Arrival, Mode
from orchestrator.sim.fleet import Fleet
from orchestrator.sim.others import away
from orchestrator.sim.scene import WhatIf, scene_of, trace_of
from orchestrator.sim.whatif import fleet_of, play, report

SMALL = WhatIf(name="small", gpus=64, block=8, pp=2, params=1e9, step_s=30.0, days=1.0, rate=800.0, spares=1)


def played(scene: WhatIf, *, dense: bool) -> Fleet:
    fleet = fleet_of(scene, dense=dense)
    play(scene, fleet, trace_of(scene))
    return fleet


WEATHER = replace(
    SMALL, days=0.3, rate=300.0, stragglers_a_day=20.0, maintenance_a_day=12.0, spot_waves_a_day=3.0, spot_blocks=2,
    spot_notice_s=120.0,
)  # fmt: skip
MIXED = replace(WEATHER, kinds=("A100", "B200"))


@pytest.mark.parametrize("scene", [replace(SMALL, days=0.5), WEATHER, MIXED], ids=["failures", "weather", "mixed"])
@pytest.mark.parametrize("seed", range(2))
def test_what_is_implied_and_what_is_told_step_by_step_lead_to_the_same_decisions(scene: WhatIf, seed: int) -> None:
    scene = replace(scene, seed=seed)
    implied, dense = played(scene, dense=False), played(scene, dense=True)
    assert implied.tally.faults > 5 and implied.tally.decisions
    assert implied.tally.decisions == dense.tally.decisions
    assert implied.tally.committed == dense.tally.committed
    assert implied.tally.kernel_steps < dense.tally.kernel_steps / (1 if scene.stragglers_a_day else 2)


def one(cause: str, at: float = 1000.0, victim: int = 3, **mode: float) -> Arrival:
    takes = not mode.get("slows")
    return Arrival(at=at, victim=victim, mode=Mode(cause=cause, times=0, takes_machine=takes, **mode))  # type: ignore[arg-type]


def test_a_straggler_is_found_and_given_less_to_do_until_it_is_well() -> None:
    scene = replace(SMALL, rate=0.0)
    slow = one("straggler", repaired_s=7200.0, slows=2.5)
    fleet = fleet_of(replace(scene, spares=0))
    play(scene, fleet, [slow])
    kinds = [kind for kind, *_ in fleet.tally.decisions]
    assert [kind for kind in kinds if kind != "settled"] == ["straggler", "rebalancing", "straggler_well", "rebalancing"]
    assert fleet.tally.rolled_back == 0 and fleet.tally.rerun_s == 0.0
    # Two and a half times as long for two hours, less what the others take over.
    waited = report(replace(scene, spares=0), "restart", [slow]).lost["straggler"]
    assert 0 < fleet.tally.lost_s["straggler"] < waited / 2


def test_a_spare_takes_the_place_of_a_straggler() -> None:
    fleet = fleet_of(replace(SMALL, rate=0.0))
    play(replace(SMALL, rate=0.0), fleet, [one("straggler", repaired_s=40_000.0, slows=2.5)])
    changes = [str(words) for kind, _, _, words in fleet.tally.decisions if kind == "rebalancing"]
    assert any("takes the place of n00003" in words for words in changes), changes


def test_a_machine_that_is_announced_to_go_is_left_before_and_loses_nothing() -> None:
    scene = replace(SMALL, rate=0.0, spares=0)
    announced = one("planned maintenance", repaired_s=3600.0, notice_s=900.0)
    for trace, again in (([announced], False), ([one("machine", repaired_s=3600.0)], True)):
        fleet = fleet_of(scene)
        play(scene, fleet, trace)
        assert ("node_left" in [kind for kind, *_ in fleet.tally.decisions]) is not again
        assert bool(fleet.tally.rungs) is again and (fleet.tally.rerun_s > 0) is again
        assert fleet.record.incidents and fleet.tally.rolled_back == 0
        plan = fleet.record.plans[fleet.record.generation]
        assert plan.world_size == 8, "it is back"


def test_a_spare_stands_in_for_a_machine_that_is_announced_to_go() -> None:
    fleet = fleet_of(replace(SMALL, rate=0.0))
    play(replace(SMALL, rate=0.0), fleet, [one("spot", repaired_s=3600.0, notice_s=120.0)])
    assert {plan.world_size for plan in fleet.record.plans.values()} == {8}
    assert fleet.tally.rerun_s == 0.0 and not fleet.tally.rungs and sum(fleet.tally.lost_s.values()) < 1.0
    assert set(fleet.tally.lost_s) == {"spot"} and len(fleet.record.incidents) == 1


def test_pipelines_of_a_mixed_fleet_take_what_their_kind_can_do() -> None:
    fleet = fleet_of(replace(SMALL, rate=0.0, kinds=("A100", "B200"), spares=0))
    play(replace(SMALL, rate=0.0, kinds=("A100", "B200")), fleet, [])
    plan = fleet.record.plans[fleet.record.generation]
    assert len({len(pipeline.micro_batches) for pipeline in plan.pipelines}) > 1
    with pytest.raises(ValueError, match="no kind of accelerator is called abacus"):
        scene_of({"name": "x", "gpus": 64, "kinds": ["abacus"]})


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
