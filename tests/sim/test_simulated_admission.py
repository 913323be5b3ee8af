"""Nodes that are not fit to be used, in a simulated world: no job gets to them, and the others train on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.domain.admission import Admittance
from orchestrator.domain.ids import JobId, NodeId
from orchestrator.domain.job import JobRecord
from orchestrator.domain.spec import ParallelSpec
from orchestrator.domain.state import Running
from orchestrator.recovery import admission
from orchestrator.sim.memory import Violation
from orchestrator.sim.run import Verdict, run
from orchestrator.sim.scenario import scenario
from orchestrator.sim.supervisor import SimSupervisor
from orchestrator.sim.world import World

JOB = JobId("job0")
NEW, OLD = NodeId("n2"), NodeId("n1")


def a_world(seed: int = 0) -> World:
    drawn = scenario(seed, steps=10_000)
    job = replace(
        drawn.jobs[0],
        parallel=ParallelSpec(tp=1, pp=1),
        checkpoint=replace(drawn.jobs[0].checkpoint, every=0),
        recovery=replace(drawn.jobs[0].recovery, spares=0, compare_every=0),
    )
    train = replace(job.train, micro_batches=8)
    scene = replace(drawn, nodes=(2, 2), racks=0, checks=True, broken={}, starts={}, saves=(), kinds=("cpu",))
    return World(replace(scene, jobs=(replace(job, train=train),)), SimSupervisor)


def until(world: World, at_s: float) -> JobRecord:
    while world.clock.now < at_s:
        assert world.clock.advance()
    return world.records()[JOB]


def nodes_of(record: JobRecord) -> set[NodeId]:
    assert isinstance(record.state, Running), record.state
    return set(record.state.plan.nodes)


def standing(world: World, node: NodeId) -> Admittance:
    return next(one.standing for one in world.store.admissions if one.node == node)


def test_a_newcomer_that_is_not_fit_is_used_once_it_has_been_mended() -> None:
    world = a_world()
    until(world, 10.0)
    world.unfit.add(NEW)
    world.add_node(2)
    record = until(world, 30.0)
    assert NEW not in nodes_of(record) and standing(world, NEW) is Admittance.REFUSED
    world.unfit.clear()
    record = until(world, 10.0 + admission.PAROLE_S + 30.0)
    assert NEW in nodes_of(record) and standing(world, NEW) is Admittance.ADMITTED


def test_a_node_that_comes_and_goes_is_left_and_taken_back_later() -> None:
    world = a_world()
    world.add_node(2)
    until(world, 10.0)
    for turn in range(2 * admission.FLAPS + 1):
        host = world.hosts[JOB, OLD]
        host.cut = not turn % 2
        until(world, 10.0 + 8.0 * (turn + 1))
    record = until(world, world.clock.now + 30.0)
    assert standing(world, OLD) is Admittance.REFUSED and OLD not in nodes_of(record)
    assert not world.checker.rolled_back
    assert OLD in nodes_of(until(world, world.clock.now + 2 * admission.PAROLE_S + 30.0))


@pytest.mark.parametrize("seed", [25, 35])
def test_jobs_end_well_beside_nodes_that_are_not_fit(seed: int) -> None:
    found = run(seed)
    assert found.verdict is Verdict.PASSED, found.message


def test_a_kernel_that_believes_every_node_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.supervisor.admitting.Admissions.unfit", frozenset())
    with pytest.raises(Violation, match="not found fit"):
        until(a_world(), 30.0)
