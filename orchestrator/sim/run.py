"""One seed from beginning to end: a phase with trouble, a quiet one in which every job must end, and the verdict."""

from __future__ import annotations

import traceback
from dataclasses import dataclass, field
from enum import StrEnum

from orchestrator.domain.job import Cancelled, Succeeded
from orchestrator.domain.rungs import Rung

from .memory import Violation
from .scenario import Scenario, scenario
from .trouble import Troublemaker
from .world import World

QUIET_S = 900.0
"""Virtual seconds in which every job must end once trouble is over: the longest deadlines, one after another."""
MAX_EVENTS = 3_000_000


class Verdict(StrEnum):
    PASSED = "passed"
    CRASH = "crash"
    SAFETY = "safety"
    LIVENESS = "liveness"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    seed: int
    verdict: Verdict
    message: str = ""
    virtual_s: float = 0.0
    votes: int = 0
    generations: int = 0
    rolled_back: int = 0
    rungs: tuple[Rung, ...] = ()
    """Ways out that were taken, one per incident."""
    trace: tuple[str, ...] = field(default=(), repr=False)


def run(seed: int, *, steps: int | None = None, trace: bool = False) -> Outcome:
    return play(scenario(seed, steps), trace=trace)


def play(scene: Scenario, *, trace: bool = False) -> Outcome:
    world = World(scene, trace=trace)
    verdict, message = _judge(world)
    return Outcome(
        seed=scene.seed,
        verdict=verdict,
        message=message,
        virtual_s=world.clock.now,
        votes=world.checker.votes,
        generations=sum(record.generation for record in world.records().values()),
        rungs=tuple(one.rung for record in world.records().values() for one in record.incidents if one.rung),
        rolled_back=sum(world.checker.rolled_back.values()),
        trace=tuple(world.lines),
    )


def _judge(world: World) -> tuple[Verdict, str]:
    troublemaker = Troublemaker(world)
    try:
        for _ in range(MAX_EVENTS):
            if world.is_over:
                break
            if world.clock.now > world.scenario.trouble_until_s + QUIET_S or not world.clock.advance():
                return Verdict.LIVENESS, _stuck(world)
        else:
            return Verdict.LIVENESS, f"{MAX_EVENTS} events and no end; {_stuck(world)}"
        world.checker.ended(world.records())
    except Violation as violation:
        return Verdict.SAFETY, str(violation)
    except Exception:
        return Verdict.CRASH, traceback.format_exc()
    failed = [f"{job}: {r.state}" for job, r in world.records().items() if not isinstance(r.state, Succeeded | Cancelled)]
    if failed:
        return Verdict.LIVENESS, "; ".join(failed)
    if world.checker.rolled_back and not troublemaker.may_roll_back:
        return Verdict.SAFETY, f"single failures rolled steps back: {dict(world.checker.rolled_back)}"
    return Verdict.PASSED, ""


def _stuck(world: World) -> str:
    jobs = [f"{job} is {type(record.state).__name__} at step {record.committed}" for job, record in world.records().items()]
    return f"at {world.clock.now:.0f} s {'; '.join(jobs) or 'no job is recorded'}"
