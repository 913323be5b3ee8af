"""Machines die and come back one after another in a simulated world, with trouble on the way: in the end all are used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest

from orchestrator.domain.ids import JobId, NodeId
from orchestrator.domain.spec import ParallelSpec
from orchestrator.domain.state import Running
from orchestrator.sim.host import SimHost
from orchestrator.sim.scenario import scenario
from orchestrator.sim.supervisor import SimSupervisor
from orchestrator.sim.world import World

SEEDS = range(2)
JOB = JobId("job0")
BACK = (NodeId("n4"), NodeId("n5"))
USED_WITHIN_S = 75.0
"""After the last trouble: a host that was given up is asked for again after ten seconds, newcomers after a minute."""


def four_machines_of_which_two_come_back(seed: int) -> tuple[World, float]:
    """And when the second one is back."""
    drawn, rng = scenario(seed, steps=10_000), Random(f"growth {seed}")
    job = drawn.jobs[0]
    job = replace(
        job,
        train=replace(job.train, micro_batches=8),
        parallel=ParallelSpec(tp=1, pp=1),
        checkpoint=replace(job.checkpoint, every=0),
        recovery=replace(job.recovery, spares=0, compare_every=0),
    )
    world = World(replace(drawn, nodes=(2,) * 4, racks=0, jobs=(job,), broken={}), SimSupervisor)
    at = 7.0
    for number in (0, 1):
        world.clock.after(at, lambda number=number: world.kill_node(NodeId(f"n{number}")))  # type: ignore[misc]
        at += rng.uniform(0.5, 3.0)
    at += rng.uniform(0.0, 6.0)
    for _ in BACK:
        world.clock.after(at, lambda: world.add_node(2))
        at += rng.uniform(0.0, 6.0)
    return world, at


def peace(world: World) -> None:
    """Nothing more."""


def a_rank_there_dies(world: World) -> None:
    for host in hosts_there(world):
        for device, rank in sorted(host.ranks.items()):
            world.note(f"* the rank on {device} dies")
            host.kill(rank)
            return


def a_host_there_ends(world: World) -> None:
    for host in hosts_there(world)[:1]:
        world.note(f"* the host on {host.node} ends")
        host.end(0.02)


def a_zygote_there_ends(world: World) -> None:
    for host in hosts_there(world)[:1]:
        host.fail()


def hosts_there(world: World) -> list[SimHost]:
    return [host for host in world.living(JOB) if host.node in BACK]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("trouble", [peace, a_rank_there_dies, a_host_there_ends, a_zygote_there_ends])
def test_machines_that_come_back_one_after_another_are_all_used(trouble: Callable[[World], None], seed: int) -> None:
    world, at = four_machines_of_which_two_come_back(seed)
    for _ in range(4):
        world.clock.after(at, lambda: trouble(world))
        at += 1.5
    while size(world) < 8 or world.clock.now < at:
        assert world.clock.now < at + USED_WITHIN_S and world.clock.advance(), "\n".join(world.lines[-60:])


def size(world: World) -> int:
    record = world.records().get(JOB)
    return record.state.plan.world_size if record and isinstance(record.state, Running) else 0
