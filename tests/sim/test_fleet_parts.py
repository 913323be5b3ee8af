"""What a fleet's weeks are made of: steps implied by when a generation began, and by how fast its devices are."""

from __future__ import annotations

from random import Random

import pytest

from orchestrator.domain.cluster import Node
from orchestrator.domain.ids import Device, Generation, NodeId, Step
from orchestrator.domain.origin import FromSeed
from orchestrator.domain.plan import Pipeline, Plan, Stage
from orchestrator.domain.requests import FormGeneration
from orchestrator.sim.arrivals import DAY_S, Maintenance, Slowness, SpotWaves, arrivals
from orchestrator.sim.march import March
from orchestrator.sim.tempo import Tempo

DEVICES = tuple(Device(NodeId(f"n{number}"), 0) for number in range(4))


def a_plan(ids: tuple[int, ...] = (4, 4, 4, 4)) -> Plan:
    """A pipeline of one device each, of two layers."""
    firsts = [sum(ids[:number]) for number in range(len(ids))]
    return Plan(
        pipelines=tuple(
            Pipeline(stages=(Stage(first=0, last=2, devices=(device,)),), micro_batches=tuple(range(first, first + number)))
            for device, first, number in zip(DEVICES, firsts, ids, strict=False)
        ),
    )


def a_march(committed: int = 10, step_s: float = 2.0) -> March:
    form = FormGeneration(
        generation=Generation(1), plan=a_plan(), committed=Step(committed), restore=FromSeed(), addresses={}
    )
    return March(form, 99.0, 100.0, step_s, 0.0)


def test_steps_pass_one_after_another_from_when_ranks_train() -> None:
    march = a_march()
    assert [march.reached(at) for at in (50.0, 100.0, 101.9, 102.0, 110.5)] == [10, 10, 10, 11, 15]
    assert march.at(Step(15)) == 110.0 and march.underway_s(110.5) == 0.5


def test_a_step_under_way_ends_as_it_began_and_the_next_ones_are_slower() -> None:
    march = a_march()
    march.change(105.0, 5.0, 3.0)
    assert march.step_s == 5.0
    assert [march.reached(at) for at in (105.9, 106.0, 110.9, 111.0, 116.0)] == [12, 13, 13, 14, 15]
    assert march.slowed_s(105.9) == 0.0 and march.slowed_s(116.0) == 6.0
    march.change(117.0, 2.0, 0.0)
    assert [march.reached(at) for at in (120.9, 121.0, 123.0)] == [15, 16, 17]
    assert march.at(Step(12)) == 104.0 and march.at(Step(14)) == 111.0 and march.at(Step(17)) == 123.0
    assert march.slowed_s(200.0) == 9.0


def test_a_change_within_one_step_replaces_the_one_before() -> None:
    march = a_march()
    march.change(105.0, 5.0, 3.0)
    march.change(105.5, 3.0, 1.0)
    assert march.at(Step(14)) == 109.0 and march.slowed_s(109.0) == 1.0


def test_before_ranks_train_all_steps_are_of_the_new_pace() -> None:
    march = a_march()
    march.change(99.5, 5.0, 3.0)
    assert march.at(Step(11)) == 105.0


def a_tempo(*kinds: str) -> Tempo:
    tempo = Tempo(
        8.0, [Node(id=device.node, kind=kind, num_devices=1) for device, kind in zip(DEVICES, kinds, strict=True)]
    )
    tempo.learn(a_plan())
    return tempo


def test_a_step_takes_as_long_as_the_pipeline_that_ends_last() -> None:
    tempo = a_tempo(*["cpu"] * 4)
    assert tempo.step_s(a_plan()) == pytest.approx(8.0) and tempo.slow_s(a_plan()) == 0.0
    assert tempo.step_s(a_plan((6, 5, 5))) == pytest.approx(12.0)  # one is lost, ids are whole
    tempo.slow[DEVICES[1]] = 2.0
    assert tempo.step_s(a_plan()) == pytest.approx(16.0) and tempo.slow_s(a_plan()) == pytest.approx(8.0)
    # Four ids are too many for it; with two it ends when the others do, who have one more each.
    shifted = a_plan((5, 2, 5, 4))
    assert tempo.step_s(shifted) == pytest.approx(10.0) and tempo.slow_s(shifted) == pytest.approx(2.0)
    assert tempo.told(shifted)[DEVICES[1]] == 2 * tempo.told(shifted)[DEVICES[0]]


def test_devices_of_other_kinds_are_as_fast_as_their_kind() -> None:
    tempo = a_tempo("A100", "A100", "A100", "H100")
    assert tempo.is_mixed and not a_tempo(*["H100"] * 4).is_mixed
    assert tempo.step_s(a_plan((3, 3, 3, 7))) < tempo.step_s(a_plan())


def test_what_is_announced_and_what_is_slow_arrives_beside_failures_without_changing_them() -> None:
    def drawn(**more: object) -> list[tuple[float, str]]:
        found = arrivals(Random("one"), days=20.0, gpus=8192, blocks=64, rate=1.0, **more)  # type: ignore[arg-type]
        return [(one.at, one.mode.cause) for one in found]

    plain = drawn()
    more = drawn(
        waves=SpotWaves(per_day=1.0, blocks=3, notice_s=120.0),
        maintenance=Maintenance(per_day=2.0),
        slowness=Slowness(per_day=3.0),
    )
    assert [one for one in more if one[1] not in ("spot", "planned maintenance", "straggler")] == plain
    counted = {cause: sum(one[1] == cause for one in more) for cause in ("spot", "planned maintenance", "straggler")}
    assert counted["spot"] % 3 == 0 and 15 <= counted["spot"] <= 120
    assert 15 <= counted["planned maintenance"] <= 80 and 30 <= counted["straggler"] <= 110
    assert more == sorted(more) and more[-1][0] < 20.0 * DAY_S + 60.0
