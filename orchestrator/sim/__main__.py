"""`python -m orchestrator.sim --seed N [--trace]` replays one seed; `--seeds K [--first N] [--jobs J]` runs K of them.

--trace prints what happens as it happens, --trace FILE writes it there, one line an event.

With --replay BUNDLE the cluster, job and incidents are those of a real job; --seeds K tries K courses of chance in it.

With --failover each seed is one failure, and the supervisor dies at every point of the recovery in turn (or at --dies-at).

Exit status: 0 every seed passed, 2 nothing to replay, 3 a crash, 4 a broken promise (safety), 5 no end in time (liveness).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

from orchestrator.domain.errors import Refused

from .replay import scenario_of
from .run import Outcome, Verdict, failovers, play, run, run_failover

EXIT = {Verdict.PASSED: 0, Verdict.CRASH: 3, Verdict.SAFETY: 4, Verdict.LIVENESS: 5}
UNREADABLE = 2
TAIL = 40


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m orchestrator.sim", description=__doc__)
    parser.add_argument("--seed", type=int, help="replay this one")
    parser.add_argument("--seeds", type=int, default=10, help="run this many")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--steps", type=int, help="training steps of every job, in place of what the seed says")
    parser.add_argument(
        "--trace", nargs="?", const="", metavar="FILE", help="print what happens as it happens, or write it"
    )
    parser.add_argument(
        "--jobs", type=int, default=1, help="processes to run seeds in; only failures are told, and a count"
    )
    parser.add_argument("--failover", action="store_true", help="one failure, the supervisor dies at every point")
    parser.add_argument("--twice", action="store_true", help="with --failover: a second rank dies with the supervisor")
    parser.add_argument("--dies-at", type=int, help="with --failover: at this point only")
    parser.add_argument("--replay", type=Path, metavar="BUNDLE", help="what `everstep bundle JOB` wrote")
    asked = parser.parse_args()
    if asked.replay is not None and asked.seed is None and "--seeds" not in sys.argv:
        asked.seed = 0
    seeds = [asked.seed] if asked.seed is not None else range(asked.first, asked.first + asked.seeds)
    if asked.jobs > 1 and not (asked.failover or asked.replay):
        return _in_processes(range(asked.first, asked.first + asked.seeds), asked.steps, asked.jobs)
    worst = 0
    if asked.replay is not None:
        try:
            scenario_of(asked.replay)
        except Refused as error:
            print(error.message, file=sys.stderr)
            return UNREADABLE
    for seed in seeds:
        for outcome in _outcomes(seed, asked):
            if outcome.verdict is not Verdict.PASSED:
                if asked.trace is None:
                    print("\n".join(outcome.trace[-TAIL:]))
                again = replay(outcome.seed, asked.steps, asked.replay)
                if asked.failover:
                    again = replay_failover(outcome, twice=asked.twice)
                print(f"{outcome.verdict}: {outcome.message}\nreplay: {again}", flush=True)
            worst = worst or EXIT[outcome.verdict]
    return worst


def _outcomes(seed: int, asked: argparse.Namespace) -> Iterator[Outcome]:
    began = time.process_time()
    if not asked.failover:
        if asked.replay:
            outcome = play(scenario_of(asked.replay, seed), trace=asked.trace == "")
        else:
            outcome = run(seed, steps=asked.steps, trace=asked.trace == "")
        if asked.trace:
            Path(asked.trace).write_text("\n".join((*outcome.trace, f"{outcome.verdict} {outcome.message}".strip(), "")))
        print(_line(outcome, time.process_time() - began), flush=True)
        yield outcome
    elif asked.dies_at is not None:
        found = run_failover(seed, asked.dies_at, twice=asked.twice, trace=asked.trace is not None)
        yield replace(found, dies_at=asked.dies_at)
    else:
        number = 0
        for number, outcome in enumerate(failovers(seed, twice=asked.twice)):  # noqa: B007
            yield outcome
        print(f"seed {seed}: {number} points of failover, {time.process_time() - began:.2f} s of CPU", flush=True)


def _in_processes(seeds: range, steps: int | None, jobs: int) -> int:
    """Every seed, on several cores; the first of each kind of failure is told in full, and how to replay every one."""
    began, worst, failed = time.monotonic(), 0, 0
    with get_context("fork").Pool(jobs, maxtasksperchild=2000) as pool:
        work = ((seed, steps) for seed in seeds)
        for number, outcome in enumerate(pool.imap_unordered(_run_one, work, chunksize=20), 1):
            if outcome.verdict is not Verdict.PASSED:
                failed, worst = failed + 1, worst or EXIT[outcome.verdict]
                print(f"{outcome.verdict}: {outcome.message}\nreplay: {replay(outcome.seed, steps)}", flush=True)
            if number % 1000 == 0 or number == len(seeds):
                rate = number / (time.monotonic() - began)
                print(f"{number} of {len(seeds)} seeds, {failed} failed, {rate:.1f} a second", flush=True)
    return worst


def _run_one(work: tuple[int, int | None]) -> Outcome:
    return replace(run(work[0], steps=work[1]), trace=())


def replay_failover(outcome: Outcome, *, twice: bool = False) -> str:
    also = " --twice" * twice
    return f"python -m orchestrator.sim --failover{also} --seed {outcome.seed} --dies-at {outcome.dies_at} --trace"


def replay(seed: int, steps: int | None, bundle: Path | None = None) -> str:
    what = f"{f' --steps {steps}' if steps else ''}{f' --replay {bundle}' if bundle else ''}"
    return f"python -m orchestrator.sim --seed {seed}{what} --trace"


def _line(outcome: Outcome, cpu_s: float) -> str:
    return (
        f"seed {outcome.seed}: {outcome.verdict}, {outcome.votes} votes in {outcome.generations} generations, "
        f"{outcome.rolled_back} steps rolled back, {outcome.virtual_s:.0f} virtual s, {cpu_s:.2f} s of CPU"
    )


if __name__ == "__main__":
    sys.exit(main())
