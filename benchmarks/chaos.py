"""A job of eight ranks under random faults, and the same job undisturbed: whether anybody could tell the two apart.

    python -m benchmarks.chaos --json --faults 200 [--seed 7] [--exact]

One seed gives one sequence of faults. When the last has its verdict the job is ended at its next checkpoint; its twin then
trains to the same step on the same cluster without faults. Losses, the final weights and moments, and the samples that
were trained on are compared. The last line of output is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch

from api.chaos import DEFAULT_KINDS, Schedule
from api.client import Client
from api.client.chaos import CURVE_TOLERANCE, Chaos, ReportView, Said
from api.views import JobView, StepView
from orchestrator.adapters.manifest import load_manifest
from orchestrator.domain.profile import Interval
from worker.checkpoint.reader import read
from worker.data.sampling import sample_indices

from .cluster import NODES, NotMeasured, end_in_good_order, local_cluster, say

ENDLESS = 1_000_000
EVERY = 10
"""Steps from one checkpoint to the next."""
COMPARED = 200
"""Steps within which rounding has not yet grown beyond the tolerance."""
EPOCH = 1 << 20
"""Samples, more than any run takes: the ledger counts one epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Soaked:
    """What a disturbed and an undisturbed run came to. largest_gap: of losses, relative, over the steps compared."""

    report: ReportView
    steps: int
    plans: tuple[str, ...]
    curve_equal: bool
    largest_gap: float
    weights_bit_equal: bool
    weights_gap: float
    samples_lost: int
    samples_doubled: int


def job_file(*, steps: int = ENDLESS, exact: bool = False, sequence: int = 64) -> dict[str, Any]:
    """tp 2 x pp 2, dp as the devices allow; the learning rate does not depend on the number of steps."""
    train = {
        "steps": steps, "micro_batches": 8, "micro_batch_size": 1, "sequence": sequence, "seed": 3,
        "learning_rate": 1e-3, "min_learning_rate": 1e-3,
    }  # fmt: skip
    return {
        "name": "soak",
        "program": "causal_lm",
        "data": {"files": ["{stdlib}/*.py"], "max_bytes": 2_000_000},
        "model": {"layers": 4, "width": 64, "heads": 4, "kv_heads": 2, "ffn": 160},
        "train": train | ({"exact": "best_effort"} if exact else {}),
        "parallel": {"tp": 2, "pp": 2},
        "checkpoint": {"every": EVERY},
        "recovery": {"max_attempts": 50},
    }


def soak(client: Client, schedule: Schedule, *, exact: bool = False, sequence: int = 64) -> Soaked:
    """Raises NotMeasured where a job ends by itself."""
    say(f"seed {schedule.seed}")
    job = client.submit(job_file(exact=exact, sequence=sequence)).id
    _until_step(client, job, 3)
    seen: set[str] = set()

    def tell(said: Said) -> None:
        say(said.message)
        plan = client.job(job).plan
        seen.update([plan.summary] if plan else [])

    chaos = Chaos(client, job, schedule, tell)
    chaos.run()
    ended = _end_at_a_checkpoint(client, job)
    say(f"{ended.step} steps; now its undisturbed twin")
    assert ended.checkpoint is not None
    twin = client.wait(client.submit(job_file(steps=ended.checkpoint.step, exact=exact, sequence=sequence)).id)
    if not twin.succeeded or twin.checkpoint is None:
        raise NotMeasured(f"the twin is {twin.status}: {twin.reason}")
    disturbed, undisturbed = list(client.all_metrics(job)), list(client.all_metrics(twin.id))
    gaps = curve_gaps(disturbed, undisturbed, twin.step if exact else COMPARED)
    weights_gap = largest_difference(Path(ended.checkpoint.path), Path(twin.checkpoint.path))
    lost, doubled = samples_ledger(disturbed, ended.step, job_file()["train"])
    return Soaked(
        report=chaos.report(undisturbed),
        steps=ended.step,
        plans=tuple(sorted(seen)),
        curve_equal=max(gaps, default=0.0) <= (0.0 if exact else CURVE_TOLERANCE),
        largest_gap=max(gaps, default=0.0),
        weights_bit_equal=weights_gap == 0.0,
        weights_gap=weights_gap,
        samples_lost=lost,
        samples_doubled=doubled,
    )


def curve_gaps(disturbed: Sequence[StepView], undisturbed: Sequence[StepView], last: int) -> list[float]:
    """Relative differences of every loss that was ever committed, steps run again included, up to step `last`."""
    wanted = {one.step: one.loss for one in undisturbed}
    found = []
    for one in disturbed:
        reference = wanted.get(one.step)
        if one.step <= last and one.loss is not None and reference is not None:
            found.append(abs(one.loss - reference) / abs(reference))
    return found


def samples_ledger(steps: Sequence[StepView], last: int, train: Mapping[str, int]) -> tuple[int, int]:
    """Samples of the first `last` steps that no committed step holds, and those that more than one does.

    Of a step that was rolled back and run again, the last commit counts: the state it led to is the one that was kept.
    """
    kept: list[int] = []
    for one in steps:
        if kept and one.step <= kept[-1] and one.generation > 1:
            kept = [step for step in kept if step < one.step]  # rolled back
        kept.append(one.step)
    used: Counter[int] = Counter()
    for step in kept:
        used.update(_samples(step, train))
    wanted = {index for step in range(1, last + 1) for index in _samples(step, train)}
    lost = sum(1 for index in wanted if index not in used)
    return lost, sum(count - 1 for index, count in used.items() if count > 1)


def _samples(step: int, train: Mapping[str, int]) -> list[int]:
    ids, size = train["micro_batches"], train["micro_batch_size"]
    return [index for number in range(ids) for index in sample_indices(train["seed"], step, number, ids, size, EPOCH)]


def largest_difference(one: Path, other: Path) -> float:
    """Of master weights and moments in two checkpoints: 0.0 only where every bit is the same, NaN is infinite."""
    lines = load_manifest(one).lines
    whole = [Interval(name, 0, count) for name, count in lines.items()]
    first, second = read(one, whole), read(other, whole)
    gaps = [0.0]
    for key, values in first.items():
        if not torch.equal(values.view(torch.int32), second[key].view(torch.int32)):
            gap = float((values - second[key]).abs().max())
            gaps.append(max(gap, 1e-45) if gap == gap else float("inf"))
    return max(gaps)


def _until_step(client: Client, job: str, step: int) -> None:
    for event in client.events(job):
        if isinstance(event, StepView) and event.step >= step:
            return
    raise NotMeasured(f"the job ended before step {step}: {client.job(job).reason}")


def _end_at_a_checkpoint(client: Client, job: str) -> JobView:
    """Cancelled once it has made a checkpoint of everything that was disturbed."""
    disturbed_to = client.job(job).step
    for event in client.events(job):
        found = client.job(job)
        if found.is_over:
            raise NotMeasured(f"the job is {found.status}: {found.failure.message if found.failure else found.reason}")
        if isinstance(event, StepView) and found.checkpoint and found.checkpoint.step > disturbed_to:
            break
    client.cancel(job)
    return client.wait(job)


def main() -> int:
    asked = _arguments()
    end_in_good_order()
    seed = asked.seed if asked.seed is not None else Random().randrange(1 << 31)
    schedule = Schedule(seed=seed, num_faults=asked.faults, rate_per_minute=asked.rate, kinds=dict(DEFAULT_KINDS))
    with local_cluster(NODES) as cluster, Client(cluster.url, retry_s=60) as client:
        found = soak(client, schedule, exact=asked.exact)
    report = found.report
    result = {
        "faults": report.num_faults,
        "kinds": report.kinds,
        "curve_equal": found.curve_equal,
        "weights_bit_equal": found.weights_bit_equal,
        "samples_lost": found.samples_lost,
        "samples_doubled": found.samples_doubled,
        "goodput": report.goodput,
        "verdicts": report.verdicts,
        "points": report.points,
        "steps": found.steps,
        "steps_rolled_back": report.steps_rolled_back,
        "largest_gap": found.largest_gap,
        "weights_gap": found.weights_gap,
        "plans": found.plans,
        "exact": asked.exact,
        "seed": seed,
    }
    print(json.dumps(result), flush=True)
    is_well = found.curve_equal and not (found.samples_lost or found.samples_doubled)
    return 0 if is_well and set(report.verdicts) <= {"recovered", "harmless", "refused"} else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.chaos", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="the JSON line is printed in any case")
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--rate", type=float, default=30.0, help="faults a minute, on average")
    parser.add_argument("--seed", type=int, help="of whom and when; another one every time by default")
    parser.add_argument("--exact", action="store_true", help="gradients summed as integers: weights must be bit-equal")
    asked = parser.parse_args()
    if asked.faults < 1:
        parser.error(f"--faults is {asked.faults}, at least 1 is needed; raise it")
    return asked


if __name__ == "__main__":
    sys.exit(main())
