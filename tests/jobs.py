"""Jobs for tests of the whole: small enough to be quick, the example's own mathematics, and their undisturbed curve."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

from api.schemas import load_job_file
from orchestrator.domain import codec
from orchestrator.domain.spec import JobSpec
from worker.reference import run

EXAMPLE = Path(__file__).resolve().parent.parent / "worker" / "examples" / "byte-gpt.yaml"


ENDLESS = 100_000
"""Steps of a job that is stopped once what it is for has happened."""


def a_job(steps: int = 24, **train: object) -> JobSpec:
    """The example with short sequences: tp 2 x pp 2, dp as the devices allow."""
    spec = load_job_file(EXAMPLE.read_text("utf-8"), "application/yaml")
    changes: dict[str, object] = {"steps": steps, "micro_batch_size": 2, "sequence": 32, **train}
    return replace(
        spec,
        name="test",
        data=replace(spec.data, max_bytes=200_000),
        train=replace(spec.train, **changes),  # type: ignore[arg-type]
        checkpoint=replace(spec.checkpoint, every=10),
        # No survivor is killed for being slow to leave: that would be one failure more than a test is about.
        recovery=replace(spec.recovery, leave_s=5.0),
    )


def unpaced(spec: JobSpec) -> JobSpec:
    """The same mathematics, as fast as this machine computes it."""
    return replace(spec, train=replace(spec.train, emulated_layer_s=0.0))


@cache
def _curve(spec_json: str, steps: int) -> tuple[float, ...]:
    return tuple(answer.loss for answer in run(codec.loads(JobSpec, spec_json), steps))


def largest_gap(losses: dict[int, float], spec: JobSpec, steps: int | None = None) -> float:
    """The largest of gaps(losses, spec, steps)."""
    return max(gaps(losses, spec, steps))


def gaps(losses: dict[int, float], spec: JobSpec, steps: int | None = None) -> list[float]:
    """Relative differences to the undisturbed curve, step by step; every step must be there.

    steps: of a job that was stopped after so many.
    """
    steps = steps or spec.train.steps
    assert sorted(losses) == list(range(1, steps + 1)), f"{len(losses)} of {steps} steps"
    wanted = _curve(codec.dumps(unpaced(spec)).decode(), steps)
    return [abs(losses[step] - loss) / abs(loss) for step, loss in enumerate(wanted, start=1)]
