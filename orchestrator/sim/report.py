"""What a policy made of weeks of faults, in figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .arrivals import DAY_S
from .scene import WhatIf


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """lost: seconds of the job's time by cause. goodput: what was committed for good, of what undisturbed training is."""

    policy: str
    seconds: float
    """Of the time that was looked at."""
    goodput: float
    steps: int
    faults: int
    lost: dict[str, float]
    rerun_s: float
    rolled_back: int
    pause_p50_s: float
    pause_p99_s: float
    moved_gb: float
    rungs: dict[str, int]
    energy_kwh: float
    energy_lost_kwh: float


def report_of(
    scene: WhatIf, policy: str, *, steps: int, faults: int, lost: Mapping[str, float], rerun_s: float, rolled_back: int,
    pauses: Sequence[float], moved_gb: float, rungs: Mapping[str, int],
) -> Report:  # fmt: skip
    total = scene.days * DAY_S
    goodput = steps * scene.step_s / total
    kwh = scene.gpus * scene.device_w * scene.pue * total / 3600 / 1e3
    ordered = sorted(pauses) or [0.0]
    stalled = {"checkpoints": steps * (scene.paced_s - scene.step_s)} if scene.checkpoint_stall_s else {}
    return Report(
        policy=policy,
        seconds=round(total, 3),
        goodput=round(goodput, 6),
        steps=steps,
        faults=faults,
        lost={cause: round(seconds, 3) for cause, seconds in sorted({**lost, **stalled}.items())},
        rerun_s=round(rerun_s, 3),
        rolled_back=rolled_back,
        pause_p50_s=round(ordered[len(ordered) // 2], 3),
        pause_p99_s=round(ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)], 3),
        moved_gb=round(moved_gb, 1),
        rungs=dict(sorted(rungs.items())),
        energy_kwh=round(kwh),
        energy_lost_kwh=round(kwh * max(0.0, 1 - goodput)),
    )
