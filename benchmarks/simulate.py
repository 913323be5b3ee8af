"""The kernel under simulation: a month of 100,000 accelerators, goodput by policy, seeds a second, planted faults.

The month is that of a shared cluster: 390 jobs of 256 accelerators, each with its own supervisor's kernel, on one core.
`python -m benchmarks.simulate --json [--days 30] [--llama-days 14]`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import resource
import sys
import time
from dataclasses import asdict
from random import Random
from typing import Any

from orchestrator.sim.arrivals import Arrival, Maintenance, Slowness, SpotWaves, arrivals
from orchestrator.sim.run import Verdict, run
from orchestrator.sim.scene import POLICIES, WhatIf, trace_of
from orchestrator.sim.whatif import report

GPUS, JOB_GPUS = 100_000, 256
SEEDS = 40


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, nothing else")
    parser.add_argument("--days", type=float, default=30.0, help="of the month")
    parser.add_argument("--llama-days", type=float, default=14.0, help="of the Llama 3 scenario, which lasted 54")
    asked = parser.parse_args()
    figures: dict[str, Any] = {
        "month_100k": month(asked.days),
        "llama3_goodput": llama3(asked.llama_days),
        "seeds_per_s": seeds_per_s(),
        **planted(),
    }
    print(json.dumps(figures) if asked.json else json.dumps(figures, indent=2))
    return 0


def month(days: float) -> dict[str, Any]:
    """Each job meets those faults, losses that were announced and slow devices of the whole cluster that are its own."""
    began = time.process_time()
    block = 8
    jobs, blocks = GPUS // JOB_GPUS, JOB_GPUS // block
    drawn = arrivals(
        Random("month"),
        days=days,
        gpus=GPUS,
        blocks=jobs * blocks,
        rate=1.0,
        waves=SpotWaves(per_day=1.0, blocks=8),
        maintenance=Maintenance(per_day=10.0),
        slowness=Slowness(per_day=4.0),
    )
    of: dict[int, list[Arrival]] = {}
    for one in drawn:
        job, victim = divmod(one.victim, blocks)
        of.setdefault(job, []).append(Arrival(at=one.at, victim=victim, mode=one.mode))
    digest = hashlib.sha256()
    faults = 0
    for job in range(jobs):
        scene = WhatIf(name=f"job{job}", gpus=JOB_GPUS, block=block, pp=4, params=7e9, days=days, shrinks=False)
        found = report(scene, "everstep", of.get(job, []))
        faults += found.faults
        digest.update(json.dumps(asdict(found), sort_keys=True).encode())
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    took = time.process_time() - began
    return {
        "seconds": round(took, 2),
        "peak_mb": round(peak_mb, 1),
        "faults": faults,
        "seed_digest": digest.hexdigest()[:16],
    }


def llama3(days: float) -> dict[str, float]:
    """Two spare machines: 0.1 % of the accelerators."""
    scene = WhatIf(name="llama3-405b", gpus=16_384, block=8, pp=4, days=days, spares=2)
    return {policy: report(scene, policy, trace_of(scene)).goodput for policy in POLICIES}


def seeds_per_s() -> float:
    began = time.process_time()
    for seed in range(SEEDS):
        if run(seed).verdict is not Verdict.PASSED:
            raise SystemExit(f"seed {seed} does not pass; replay: python -m orchestrator.sim --seed {seed} --trace")
    return round(SEEDS / (time.process_time() - began), 2)


def planted() -> dict[str, int]:
    import pytest

    from tests.sim.planted import ALL, caught

    found = 0
    for one in ALL:
        with pytest.MonkeyPatch.context() as patch:
            seen = caught(one, patch, run)
        found += seen is not None and seen[1].verdict is one.verdict
    return {"planted_faults_caught": found, "planted_faults": len(ALL)}


if __name__ == "__main__":
    sys.exit(main())
