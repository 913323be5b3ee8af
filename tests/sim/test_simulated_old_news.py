"""A supervisor ends, and the next one begins when what hosts had told is long over: it judges by what is so now."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from orchestrator.domain.effects import CallHost
from orchestrator.domain.host_events import RanksSeen
from orchestrator.domain.ids import Device
from orchestrator.domain.requests import KillRank
from orchestrator.domain.spec import ParallelSpec
from orchestrator.domain.state import Running, Succeeded
from orchestrator.sim.host import SimHost
from orchestrator.sim.rank import SimRank
from orchestrator.sim.scenario import scenario
from orchestrator.sim.supervisor import SimSupervisor
from orchestrator.sim.world import World

LONG_S = 300.0
AWAY_S = 4.0
"""For how long nobody governs: long enough for what hosts had told to be over."""


def stopped_while_it_forms() -> tuple[World, SimRank, SimRank]:
    """A job of two ranks that never begins its first generation: one rank stops before it does, and then the other one."""
    drawn = scenario(0, steps=20)
    recovery = replace(drawn.jobs[0].recovery, spares=0)
    job = replace(drawn.jobs[0], parallel=ParallelSpec(tp=1, pp=1, dp=2, max_devices=2), recovery=recovery)
    scene = replace(drawn, nodes=(1, 1), racks=0, jobs=(job,), broken={}, starts={}, saves=(), trouble_until_s=LONG_S)
    world = World(scene, SimSupervisor)
    until(world, lambda: len(ranks(world)) == 2)
    first, second = ranks(world)
    second.frozen = True
    until(world, lambda: first.arena is not None and not second.session_of)
    first.frozen = True
    return world, first, second


def test_who_had_stopped_when_a_supervisor_ended_and_does_what_it_should_by_now_is_not_killed() -> None:
    world, first, second = stopped_while_it_forms()
    until(world, lambda: all(is_blamed(rank) for rank in (first, second)))
    goes_on_without_a_supervisor(world, first)
    until(world, lambda: not second.alive)
    (closing,) = [line for line in world.lines if "generation_closing" in line]
    assert f"{second.device} (yet to begin generation 1) is strange" in closing and f"on {first.device}" not in closing
    ends_well(world)


def test_who_was_to_be_killed_when_a_supervisor_ended_and_does_what_it_should_by_now_is_spared() -> None:
    """Its successor carries out what is recorded; whether that is still right is for the rank's host to see."""
    world, first, second = stopped_while_it_forms()
    until(world, lambda: to_be_killed(world) == {first.device, second.device})
    goes_on_without_a_supervisor(world, first)
    until(world, lambda: not second.alive)
    until(world, lambda: all(isinstance(one.state, Running) for one in world.records().values()))
    assert first in ranks(world)
    ends_well(world)


def goes_on_without_a_supervisor(world: World, rank: SimRank) -> None:
    world.supervisor.crash()
    world.restart_supervisor(AWAY_S)
    rank.thaw()


def ends_well(world: World) -> None:
    until(world, lambda: world.is_over)
    world.checker.ended(world.records())
    assert all(isinstance(one.state, Succeeded) for one in world.records().values())


def to_be_killed(world: World) -> set[Device]:
    effects = [effect for record in world.records().values() for effect in record.outbox.values()]
    calls = [effect.request for effect in effects if isinstance(effect, CallHost)]
    return {call.device for call in calls if isinstance(call, KillRank)}


def ranks(world: World) -> list[SimRank]:
    return [rank for host in world.living() for _, rank in sorted(host.ranks.items()) if rank.alive]


def is_blamed(rank: SimRank) -> bool:
    """In an answer that no supervisor has recorded."""
    assert isinstance(rank.host, SimHost)
    told = [one.event for one in rank.host.outbox.fetch(0, 0)]
    return any(isinstance(one, RanksSeen) and any(sight.is_guilty for sight in one.sights) for one in told)


def until(world: World, is_so: Callable[[], bool]) -> None:
    while not is_so():
        assert world.clock.now < LONG_S and world.clock.advance()
