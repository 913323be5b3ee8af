"""Devices that become slow in a simulated world: work is shared out anew, and not each time one comes and goes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from orchestrator.detection import straggler
from orchestrator.domain.failure import Cause
from orchestrator.domain.ids import Device, JobId, NodeId
from orchestrator.domain.job import JobRecord
from orchestrator.domain.plan import Plan
from orchestrator.domain.spec import ParallelSpec
from orchestrator.sim.memory import Violation
from orchestrator.sim.scenario import scenario
from orchestrator.sim.supervisor import SimSupervisor
from orchestrator.sim.world import World
from orchestrator.supervisor import balancing

JOB = JobId("job0")
SLOW = Device(NodeId("n1"), 0)
UNTIL_S = 240.0


def a_world(
    seed: int, pp: int, nodes: tuple[int, ...] = (2, 2), kinds: tuple[str, ...] = ("cpu",), spares: int = 0
) -> World:
    """Nobody troubles it; devices of other kinds than cpu are planned as such."""
    drawn = scenario(seed, steps=10_000)
    job = drawn.jobs[0]
    job = replace(
        job,
        train=replace(
            job.train, micro_batches=24, exact="best_effort", emulated_layer_s=0.0 if kinds == ("cpu",) else 0.01
        ),
        parallel=ParallelSpec(tp=1, pp=pp),
        checkpoint=replace(job.checkpoint, every=0),
        recovery=replace(job.recovery, spares=spares, compare_every=0),
    )
    scene = replace(drawn, nodes=nodes, kinds=kinds, racks=0, jobs=(job,), broken={}, starts={}, saves=())
    return World(scene, SimSupervisor)


def run(world: World, until_s: float) -> JobRecord:
    while world.clock.now < until_s:
        assert world.clock.advance()
    return world.records()[JOB]


def changes(record: JobRecord) -> int:
    return sum(one.fault.cause is Cause.BALANCE for one in record.incidents)


def test_a_job_on_mixed_kinds_absorbs_the_loss_of_a_node() -> None:
    world = a_world(0, 1, nodes=(1, 1, 1, 1), kinds=("A100", "A100", "H100", "B200"))
    before = plan_of(run(world, 15.0))
    assert len({len(pipeline.micro_batches) for pipeline in before.pipelines}) > 1
    world.kill_node(NodeId("n1"))
    record = run(world, 60.0)
    after = plan_of(record)
    assert {p.stages for p in after.pipelines} < {p.stages for p in before.pipelines} and after.dp == before.dp - 1
    lost = next(one for one in record.incidents if one.fault.cause is not Cause.BALANCE)
    assert "the others take their ids" in lost.decision and not world.checker.rolled_back


def test_a_spare_takes_the_place_of_a_node_that_stays_slow_and_only_once() -> None:
    world = a_world(0, 1, nodes=(2, 2, 2), spares=1)
    before = plan_of(run(world, 15.0))
    assert NodeId("n1") in before.nodes and len(before.nodes) == 2
    (spare,) = world.records()[JOB].spares
    world.slow = {SLOW: 3.0}
    record = run(world, 120.0)
    after = plan_of(record)
    assert set(after.nodes) == {*before.nodes, spare} - {SLOW.node}
    assert {len(pipeline.micro_batches) for pipeline in after.pipelines} == {6}, "as fast as before"
    assert changes(record) <= 3 and not world.checker.rolled_back
    assert changes(run(world, UNTIL_S)) == changes(record), "the slow node stands by now, and is not taken back"


def test_a_spare_is_not_taken_for_what_it_would_not_pay() -> None:
    world = a_world(0, 1, nodes=(2, 2, 2), spares=1)
    before = plan_of(run(world, 15.0))
    world.slow = {SLOW: 1.2}
    record = run(world, 80.0)
    assert set(plan_of(record).nodes) == set(before.nodes) and not changes(record)


def comes_and_goes(world: World, every_s: float) -> None:
    def flip() -> None:
        world.slow = {} if world.slow else {SLOW: 3.0}
        world.clock.after(every_s, flip)

    world.clock.after(15.0, flip)


@pytest.mark.parametrize("pp", [1, 2])
def test_a_slow_device_gets_less_to_do_and_gets_it_back(pp: int) -> None:
    world = a_world(0, pp)
    even = run(world, 15.0)
    world.slow = {SLOW: 3.0}
    slow = run(world, 40.0)
    assert 1 <= changes(slow) <= 2 and slow.incidents[-1].rolled_back == 0
    (mine,) = [p for p in plan_of(slow).pipelines if any(SLOW in stage.devices for stage in p.stages)]
    assert len(mine.micro_batches) < 24 / plan_of(slow).dp
    world.slow = {}
    well = run(world, 80.0)
    assert shares(well) == shares(even) and not world.checker.rolled_back


def test_one_that_comes_and_goes_is_followed_a_few_times_at_most() -> None:
    world = a_world(1, 1)
    comes_and_goes(world, 7.0)
    assert 1 <= changes(run(world, UNTIL_S)) <= 6


def never_loses_patience(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(straggler, "patience_s", lambda times: 1.0)


def counts_nothing(patch: pytest.MonkeyPatch) -> None:
    never_loses_patience(patch)
    patch.setattr(balancing, "MAX_CHANGES", 10_000)


def test_growing_patience_alone_is_not_the_only_thing_that_bounds_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    never_loses_patience(monkeypatch)
    world = a_world(1, 1)
    comes_and_goes(world, 7.0)
    assert changes(run(world, UNTIL_S)) == 6
    assert any("6 times within an hour" in line for line in world.lines)


@pytest.mark.parametrize("plant", [counts_nothing])
def test_planted_oscillation_is_found(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    world = a_world(1, 1)
    comes_and_goes(world, 7.0)
    with pytest.raises(Violation, match="more than 6 times within an hour"):
        run(world, UNTIL_S)


def plan_of(record: JobRecord) -> Plan:
    return record.plans[record.generation]


def shares(record: JobRecord) -> list[tuple[int, ...]]:
    return [(len(p.micro_batches), *(s.first for s in p.stages)) for p in plan_of(record).pipelines]
