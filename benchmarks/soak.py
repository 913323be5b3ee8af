"""One job under random faults, made larger and smaller meanwhile, and the same job undisturbed: whether anybody could tell
the two apart.

When the last fault has its verdict the job is ended at its next checkpoint; its twin then trains to the same step on the
same cluster without any of that. Losses, the final weights and moments, and the samples that were trained on are compared.
It owns the comparison; what is done to the job is the schedule's business, and whether it was noticed the supervisor's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from api.chaos import Kind, Schedule
from api.client import Client
from api.client.chaos import CURVE_TOLERANCE, Chaos, ReportView, Said, kept
from api.views import JobView, StepView
from deploy.local import NodeSpec
from orchestrator.adapters.manifest import load_manifest
from orchestrator.domain.profile import Interval
from worker.checkpoint.reader import read
from worker.data.sampling import sample_indices

from .cluster import NODES, NotMeasured, say
from .resizes import Resized, Resizes

ALL_KINDS: Mapping[Kind, float] = {
    "kill": 8, "stop": 2, "slow": 1, "exit": 1, "raise": 1, "gil_hang": 2, "nan": 2, "bit_flip": 2, "cut_link": 2,
    "slow_link": 1, "node_kill": 2, "host_kill": 1, "zygote_kill": 1, "supervisor_kill": 2, "redis_stall": 2,
    "clock_jump": 2,
}  # fmt: skip
"""By weight. Devices that flipped bits had kept out for good are released: see Schedule.release."""
UNNOTICED = frozenset({"recovered", "harmless", "refused"})
"""Verdicts after which nothing is wrong."""
ENDLESS = 1_000_000
EVERY = 10
"""Steps from one checkpoint to the next."""
COMPARED = 200
"""Steps within which rounding has not yet grown beyond the tolerance."""
EPOCH = 1 << 20
"""Samples, more than any run takes: the ledger counts one epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a job is asked to run as, on which nodes. tp is fixed: with it, whatever is lost, the bits are.

    sizes: numbers of devices of which it uses every one, the most that its nodes have among them.
    """

    tp: int
    pp: int | None = None
    dp: int | None = None
    layers: int = 4
    nodes: tuple[NodeSpec, ...] = NODES
    sizes: tuple[int, ...]


SHAPES: Mapping[str, Shape] = {
    "tp2xpp2": Shape(tp=2, pp=2, sizes=(4, 8)),
    "pp4": Shape(tp=1, pp=4, sizes=(4, 8)),
    "dp8": Shape(tp=1, pp=1, sizes=(4, 6, 8)),
    "uneven": Shape(tp=2, layers=5, nodes=NODES[:3], sizes=(4, 6)),
    "recut": Shape(tp=1, dp=2, layers=6, sizes=(4, 6, 8)),
}
"""uneven: three pipelines share eight micro-batches. recut: two pipelines as deep as there are devices, so that whoever is
lost, comes or goes, every stage holds other layers than before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Soaked:
    """What a disturbed and an undisturbed run came to. largest_gap: of losses, relative, over the steps compared."""

    report: ReportView
    resized: Resized
    steps: int
    plans: tuple[str, ...]
    curve_equal: bool
    largest_gap: float
    weights_bit_equal: bool
    weights_gap: float
    samples_lost: int
    samples_doubled: int


def job_file(shape: Shape, *, steps: int = ENDLESS, exact: bool = True, sequence: int = 64) -> dict[str, Any]:
    """dp is what the devices allow; the learning rate does not depend on the number of steps."""
    train = {
        "steps": steps, "micro_batches": 8, "micro_batch_size": 1, "sequence": sequence, "seed": 3,
        "learning_rate": 1e-3, "min_learning_rate": 1e-3,
    }  # fmt: skip
    return {
        "name": "soak",
        "program": "causal_lm",
        "data": {"files": ["{stdlib}/*.py"], "max_bytes": 2_000_000},
        "model": {"layers": shape.layers, "width": 64, "heads": 4, "kv_heads": 2, "ffn": 160},
        "train": train | ({"exact": "best_effort"} if exact else {}),
        "parallel": {name: one for name, one in (("tp", shape.tp), ("pp", shape.pp), ("dp", shape.dp)) if one},
        "checkpoint": {"every": EVERY},
        "recovery": {"max_attempts": 50},
    }


def soak(
    client: Client,
    schedule: Schedule,
    shape: Shape,
    script: Sequence[int] = (),
    *,
    exact: bool = True,
    sequence: int = 64,
) -> Soaked:
    """script: of changes of size (resizes.py). Raises NotMeasured where a job ends by itself."""
    job = client.submit(job_file(shape, exact=exact, sequence=sequence)).id
    _until_step(client, job, 3)
    seen: set[str] = set()

    def tell(said: Said) -> None:
        say(said.message)
        plan = client.job(job).plan
        seen.update([plan.summary] if plan else [])

    chaos = Chaos(client, job, schedule, tell)
    resized = _run_beside(chaos, client, job, script)
    ended = _end_at_a_checkpoint(client, job)
    say(f"{ended.step} steps; now its undisturbed twin")
    assert ended.checkpoint is not None
    again = job_file(shape, steps=ended.checkpoint.step, exact=exact, sequence=sequence)
    twin = client.wait(client.submit(again).id)
    if not twin.succeeded or twin.checkpoint is None:
        raise NotMeasured(f"the twin is {twin.status}: {twin.reason}")
    disturbed, undisturbed = list(client.all_metrics(job)), list(client.all_metrics(twin.id))
    gaps = curve_gaps(disturbed, undisturbed, twin.step if exact else COMPARED)
    weights_gap = largest_difference(Path(ended.checkpoint.path), Path(twin.checkpoint.path))
    lost, doubled = samples_ledger(disturbed, ended.step, again["train"])
    return Soaked(
        report=chaos.report(undisturbed),
        resized=resized,
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
    """Relative differences of losses, up to step `last`; of a step that was rolled back and run again, of the last commit.

    What was committed first may differ: between a flipped bit and the comparison that finds it, steps are made with it.
    """
    wanted = {one.step: one.loss for one in undisturbed}
    found = []
    for one in kept(disturbed):
        reference = wanted.get(one.step)
        if one.step <= last and one.loss is not None and reference is not None:
            found.append(abs(one.loss - reference) / abs(reference))
    return found


def samples_ledger(steps: Sequence[StepView], last: int, train: Mapping[str, int]) -> tuple[int, int]:
    """Samples of the first `last` steps that no committed step holds, and those that more than one does.

    Of a step that was rolled back and run again, the last commit counts: the state it led to is the one that was kept.
    """
    used: Counter[int] = Counter()
    for one in kept(steps):
        used.update(_samples(one.step, train))
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


def _run_beside(chaos: Chaos, client: Client, job: str, script: Sequence[int]) -> Resized:
    """Faults and changes of size, each as they come; returns once both are through."""
    with Client(client.base_url, retry_s=60) as own, ThreadPoolExecutor(1) as thread:
        resizes = Resizes(own, job, script)
        changing = thread.submit(resizes.run)
        try:
            chaos.run()
            chaos.tend(changing.done)
        finally:
            resizes.end()
        return changing.result()


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
