"""One seed from beginning to end: a phase with trouble, a quiet one in which every job must end, and the verdict."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum

from orchestrator.domain.job import JobRecord
from orchestrator.domain.rungs import Rung
from orchestrator.domain.state import Cancelled, Failed, Succeeded

from .memory import Violation
from .scenario import Scenario, one_failure, scenario
from .supervisor import SimSupervisor
from .trouble import Troublemaker
from .world import World

QUIET_S = 900.0
"""Virtual seconds in which every job must end once trouble is over: the longest deadlines, one after another."""
MAX_EVENTS = 3_000_000
YOUNG = 100_000
"""Objects that are made before the collector looks for cycles: a seed makes few, and looking was a sixth of its time."""


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
    points: int = 0
    """Commits and effects of its recoveries."""
    dies_at: int = 0
    trace: tuple[str, ...] = field(default=(), repr=False)


def run(seed: int, *, steps: int | None = None, trace: bool = False) -> Outcome:
    return play(scenario(seed, steps), trace=trace)


def play(scene: Scenario, *, trace: bool = False) -> Outcome:
    return _run(World(scene, SimSupervisor, trace=trace))


def run_failover(seed: int, dies_at: int = 0, *, twice: bool = False, trace: bool = False) -> Outcome:
    """One failure, and a supervisor that dies at that point of the recovery; at none where dies_at is 0.

    twice: and a second rank with it.
    """
    return _run(World(one_failure(seed), SimSupervisor, trace=trace, dies_at=dies_at, twice=twice))


def failovers(seed: int, *, twice: bool = False) -> Iterator[Outcome]:
    """The supervisor dies after every commit and every effect of a recovery, in turn: each must end as if it had not."""
    first = run_failover(seed)
    yield first
    for dies_at in range(1, first.points + 1):
        yield replace(run_failover(seed, dies_at, twice=twice), dies_at=dies_at)


@contextmanager
def _seldom_collected() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(YOUNG, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _run(world: World) -> Outcome:
    with _seldom_collected():
        verdict, message = _judge(world)
    return Outcome(
        seed=world.scenario.seed,
        verdict=verdict,
        message=message,
        virtual_s=world.clock.now,
        votes=world.checker.votes,
        generations=sum(record.generation for record in world.records().values()),
        rungs=tuple(one.rung for record in world.records().values() for one in record.incidents if one.rung),
        rolled_back=sum(world.checker.rolled_back.values()),
        points=world.points,
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
    failed = [f"{job}: {record.state}" for job, record in world.records().items() if not _ended_well(world, record)]
    if failed:
        return Verdict.LIVENESS, "; ".join(failed)
    if world.checker.rolled_back and not troublemaker.may_roll_back:
        return Verdict.SAFETY, f"single failures rolled steps back: {dict(world.checker.rolled_back)}"
    return Verdict.PASSED, ""


def _ended_well(world: World, record: JobRecord) -> bool:
    """As it must: a job whose program raises at a step ends before it, with a verdict; every other one succeeds.

    Or misses a deadline that it was given, and then what it has learned is saved, or it is said that it could not be.
    """
    step, state, spec = world.scenario.broken.get(record.id), record.state, record.spec
    if isinstance(state, Failed) and state.verdict == "not_started":
        return bool(spec.start_by_s) and not record.committed and state.at >= record.created_at + spec.start_by_s
    if isinstance(state, Failed) and state.verdict == "out_of_time":
        is_saved = record.checkpoint is not None and record.checkpoint.step == record.committed
        is_told = any(f" {record.id} " in line and " not_saved: " in line for line in world.lines)  # its disk was full
        return bool(spec.max_runtime_s) and (is_saved or is_told or not record.committed)
    if step is None or isinstance(state, Cancelled):
        return isinstance(state, Succeeded | Cancelled)
    return isinstance(state, Failed) and state.verdict == "repeated_error" and record.committed == step - 1


def _stuck(world: World) -> str:
    jobs = [f"{job} is {type(record.state).__name__} at step {record.committed}" for job, record in world.records().items()]
    return f"at {world.clock.now:.0f} s {'; '.join(jobs) or 'no job is recorded'}"
