"""Two jobs that have each lost a part, in a simulated world to which no node ever comes: both end all the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from orchestrator.domain.ids import NodeId
from orchestrator.domain.job import JobRecord
from orchestrator.domain.spec import ParallelSpec
from orchestrator.domain.state import Reforming, Running, Succeeded
from orchestrator.sim.scenario import scenario
from orchestrator.sim.supervisor import SimSupervisor
from orchestrator.sim.world import World
from orchestrator.supervisor.deadlines import STUCK_S

FOREVER_S = 3000.0


def test_two_jobs_that_hold_half_of_what_each_needs_both_end() -> None:
    drawn = scenario(0, steps=200)
    half = ParallelSpec(tp=1, pp=1, dp=4, max_devices=4)
    jobs = tuple(
        replace(drawn.jobs[0], name=f"job{n}", parallel=half, recovery=replace(drawn.jobs[0].recovery, spares=0))
        for n in range(2)
    )
    world = World(
        replace(drawn, nodes=(2, 2, 2, 2), racks=0, jobs=jobs, broken={}, starts={}, saves=(), trouble_until_s=FOREVER_S),
        SimSupervisor,
    )
    until(world, lambda: trained(world, 20))
    for record in list(world.records().values()):
        world.kill_node(nodes_of(record)[0])
    at = world.clock.now
    until(world, lambda: all(isinstance(one.state, Reforming) for one in world.records().values()))
    until(world, lambda: any(isinstance(one.state, Running) for one in world.records().values()))
    assert world.clock.now - at >= STUCK_S, "first it waits for a node"
    until(world, lambda: world.is_over)
    world.checker.ended(world.records())
    assert all(isinstance(one.state, Succeeded) for one in world.records().values())


def trained(world: World, steps: int) -> bool:
    records = world.records().values()
    return len(records) == 2 and all(isinstance(one.state, Running) and one.committed >= steps for one in records)


def nodes_of(record: JobRecord) -> tuple[NodeId, ...]:
    assert isinstance(record.state, Running)
    return record.state.plan.nodes


def until(world: World, is_so: Callable[[], bool]) -> None:
    while not is_so():
        assert world.clock.now < FOREVER_S and world.clock.advance()
