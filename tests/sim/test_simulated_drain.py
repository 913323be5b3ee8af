"""A node that is to go at a certain instant, in a simulated world where nothing else happens then."""

from __future__ import annotations

from dataclasses import replace

from orchestrator.domain.events import CordonRequested
from orchestrator.domain.ids import NodeId
from orchestrator.domain.spec import ParallelSpec
from orchestrator.sim.scenario import scenario
from orchestrator.sim.supervisor import SimSupervisor
from orchestrator.sim.world import World

DEADLINE_S = 12.0


def test_a_node_goes_at_its_deadline_though_nobody_has_anything_to_tell() -> None:
    drawn = scenario(0, steps=10_000)
    job = replace(
        drawn.jobs[0], parallel=ParallelSpec(tp=1, pp=1, dp=4), checkpoint=replace(drawn.jobs[0].checkpoint, every=0)
    )
    world = World(replace(drawn, nodes=(2, 2), racks=0, jobs=(job,), broken={}, starts={}, saves=()), SimSupervisor)
    run(world, 10.0)
    world.slow = {device: 400.0 for host in world.living() for device in host.ranks}
    run(world, 14.0)
    node = NodeId("n1")
    world.store.commands.append(CordonRequested(node=node, drain=True, remove=True, deadline_s=DEADLINE_S))
    run(world, 14.0 + DEADLINE_S - 0.1)
    assert node not in world.dead
    run(world, 14.0 + DEADLINE_S + 0.5)
    assert node in world.dead


def run(world: World, until_s: float) -> None:
    while world.clock.now < until_s:
        assert world.clock.advance()
