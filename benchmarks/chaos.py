"""Jobs under random faults, one for each shape of plan, that are made larger and smaller meanwhile: whether anybody could
tell them from undisturbed ones.

    python -m benchmarks.chaos --json --faults 200 [--resizes 40] [--seed 7] [--shape pp4] [--kinds nan] [--inexact]

Both are dealt out over the shapes; one seed gives one sequence of each. See soak.py for what is compared. The last line of
output is one JSON object; the exit code is 1 where somebody could tell.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, get_args

from api.chaos import Kind, Schedule
from api.client import Client

from . import resizes
from .cluster import end_in_good_order, local_cluster, say
from .soak import ALL_KINDS, SHAPES, UNNOTICED, Soaked, soak


def main() -> int:
    asked = _arguments()
    end_in_good_order()
    seed = asked.seed if asked.seed is not None else Random().randrange(1 << 31)
    shapes = [asked.shape] if asked.shape else list(SHAPES)
    found = {}
    for number, name in enumerate(shapes):
        share, changes = (_part(of, number, len(shapes)) for of in (asked.faults, asked.resizes))
        if share:
            found[name] = _one(name, seed + number, share, changes, asked)
    result = summed(list(found.values())) | {
        "exact": not asked.inexact,
        "seed": seed,
        "runs": {name: _described(one) for name, one in found.items()},
    }
    print(json.dumps(result), flush=True)
    return 0 if all(_is_well(one) for one in found.values()) else 1


def summed(runs: Sequence[Soaked]) -> dict[str, Any]:
    """Of all runs together; goodput is the mean, by steps."""
    steps = sum(run.steps for run in runs)
    return {
        "faults": sum(run.report.num_faults for run in runs),
        "kinds": dict(sum((Counter(run.report.kinds) for run in runs), Counter())),
        "curve_equal": all(run.curve_equal for run in runs),
        "weights_bit_equal": all(run.weights_bit_equal for run in runs),
        "samples_lost": sum(run.samples_lost for run in runs),
        "samples_doubled": sum(run.samples_doubled for run in runs),
        "goodput": sum((run.report.goodput or 0.0) * run.steps for run in runs) / steps if steps else None,
        "verdicts": dict(sum((Counter(run.report.verdicts) for run in runs), Counter())),
        "points": dict(sum((Counter(run.report.points) for run in runs), Counter())),
        "steps": steps,
        "steps_rolled_back": sum(run.report.steps_rolled_back for run in runs),
        "largest_gap": max((run.largest_gap for run in runs), default=0.0),
        "weights_gap": max((run.weights_gap for run in runs), default=0.0),
        "resizes": sum(run.resized.changes for run in runs),
        "recuts": sum(run.resized.recuts for run in runs),
        "plans": sorted({plan for run in runs for plan in run.plans}),
    }


def _part(of: int, number: int, parts: int) -> int:
    return of * (number + 1) // parts - of * number // parts


def _one(name: str, seed: int, faults: int, changes: int, asked: argparse.Namespace) -> Soaked:
    say(f"{name}: {faults} faults and {changes} changes of size from seed {seed}")
    schedule = Schedule(
        seed=seed,
        num_faults=faults,
        rate_per_minute=asked.rate,
        kinds=asked.kinds,
        duration_s=60 * asked.minutes,
        longest_s=2.0,
        regrow_s=3.0,
    )
    shape = SHAPES[name]
    with (
        local_cluster(shape.nodes, asked.state_dir and asked.state_dir / name) as cluster,
        Client(cluster.url, retry_s=60) as client,
    ):
        return soak(client, schedule, shape, resizes.draw(Random(seed), shape.sizes, changes), exact=not asked.inexact)


def _described(run: Soaked) -> dict[str, Any]:
    bad = [view for view in run.report.faults if view.verdict not in UNNOTICED]
    return {
        "seed": run.report.seed,
        "steps": run.steps,
        "plans": run.plans,
        "resizes": run.resized.changes,
        "recuts": run.resized.recuts,
        "pauses_s": [round(pause, 3) for pause in run.report.pauses_s],
        "goodput": run.report.goodput,
        "largest_gap": run.largest_gap,
        "weights_gap": run.weights_gap,
        "bad": [f"{view.kind} of {view.devices} at step {view.step}: {view.verdict}, {view.why}" for view in bad],
    }


def _is_well(run: Soaked) -> bool:
    is_same = run.curve_equal and not (run.samples_lost or run.samples_doubled)
    return is_same and set(run.report.verdicts) <= UNNOTICED


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.chaos", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="the JSON line is printed in any case")
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--resizes", type=int, help="changes of size; one for every five faults by default")
    parser.add_argument("--rate", type=float, default=30.0, help="faults a minute, on average")
    parser.add_argument("--minutes", type=float, default=0.0, help="no new fault in a run after that long; 0 for no limit")
    parser.add_argument("--seed", type=int, help="of whom and when; another one every time by default")
    parser.add_argument("--shape", choices=list(SHAPES), help="of the plan; each in turn by default")
    parser.add_argument("--kinds", type=_kinds, default=dict(ALL_KINDS), help="some of them, separated by commas")
    parser.add_argument("--inexact", action="store_true", help="gradients summed as floats: curves equal within 1e-5")
    parser.add_argument("--state-dir", type=Path, help="keep logs and checkpoints there, a folder for each shape")
    asked = parser.parse_args()
    if asked.faults < 1:
        parser.error(f"--faults is {asked.faults}, at least 1 is needed; raise it")
    if asked.resizes is None:
        asked.resizes = asked.faults // 5
    return asked


def _kinds(given: str) -> dict[str, float]:
    """Equally often."""
    names = given.split(",")
    if unknown := sorted(set(names) - set(get_args(Kind))):
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is no kind of fault: {', '.join(get_args(Kind))}")
    return dict.fromkeys(names, 1.0)


if __name__ == "__main__":
    sys.exit(main())
