"""`python -m orchestrator.sim --seed N [--trace]` replays one seed; `--seeds K [--first N]` runs K of them.

Exit status: 0 every seed passed, 3 a crash, 4 a broken promise (safety), 5 no end in time (liveness).
"""

from __future__ import annotations

import argparse
import sys
import time

from .run import Outcome, Verdict, run

EXIT = {Verdict.PASSED: 0, Verdict.CRASH: 3, Verdict.SAFETY: 4, Verdict.LIVENESS: 5}
TAIL = 40


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m orchestrator.sim", description=__doc__)
    parser.add_argument("--seed", type=int, help="replay this one")
    parser.add_argument("--seeds", type=int, default=10, help="run this many")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--steps", type=int, help="training steps of every job, in place of what the seed says")
    parser.add_argument("--trace", action="store_true", help="print what happens as it happens")
    asked = parser.parse_args()
    seeds = [asked.seed] if asked.seed is not None else range(asked.first, asked.first + asked.seeds)
    worst = 0
    for seed in seeds:
        began = time.process_time()
        outcome = run(seed, steps=asked.steps, trace=asked.trace)
        print(_line(outcome, time.process_time() - began), flush=True)
        if outcome.verdict is not Verdict.PASSED:
            if not asked.trace:
                print("\n".join(outcome.trace[-TAIL:]))
            print(f"{outcome.verdict}: {outcome.message}\nreplay: {replay(outcome.seed, asked.steps)}", flush=True)
        worst = worst or EXIT[outcome.verdict]
    return worst


def replay(seed: int, steps: int | None) -> str:
    return f"python -m orchestrator.sim --seed {seed}{f' --steps {steps}' if steps else ''} --trace"


def _line(outcome: Outcome, cpu_s: float) -> str:
    return (
        f"seed {outcome.seed}: {outcome.verdict}, {outcome.votes} votes in {outcome.generations} generations, "
        f"{outcome.rolled_back} steps rolled back, {outcome.virtual_s:.0f} virtual s, {cpu_s:.2f} s of CPU"
    )


if __name__ == "__main__":
    sys.exit(main())
