"""The simulated pause of a killed rank beside the real one: kills in a job on eight local ranks, told to the simulator.

    python -m benchmarks.calibration --json [--kills 9]

The simulator takes its constants from the phases that were measured (orchestrator/sim/calibrate.py). `ratio` is the
simulated pause over the real one, the median of all kills, wanted within 30 %; tests/integration/test_calibration.py
holds it there.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from orchestrator.domain.events import CancelRequested
from orchestrator.domain.failure import Cause
from orchestrator.domain.faults import Verdict
from orchestrator.domain.spec import JobSpec
from orchestrator.domain.state import Running
from orchestrator.sim.calibrate import Calibration, Killed, calibrated

from .cluster import say

APART = 4
"""Steps between a recovery and the next kill: enough for a typical step to be known."""
LAYER_S = 0.1
"""Computing is pretended, so that a step beside a kill takes what steps take, whatever else this machine does."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line of output")
    parser.add_argument("--kills", type=int, default=9)
    asked = parser.parse_args()
    with TemporaryDirectory() as folder:
        kills = asyncio.run(killed(Path(folder), asked.kills))
    print(json.dumps(asdict(compared(kills))), flush=True)
    return 0


def compared(kills: list[Killed]) -> Calibration:
    """And each kill told on stderr."""
    for one in kills:
        phases = ", ".join(f"{name} {seconds:.4f}" for name, seconds in one.incident.phases.items())
        say(f"{one.incident.pause_s or 0.0:.3f} s of steps of {one.step_s:.3f} s: {phases}")
    return calibrated(kills, devices=8)


async def killed(root: Path, kills: int) -> list[Killed]:
    """One rank after another in a job of eight, each once the job has recovered from the one before."""
    from tests.rig import JOB, a_rig

    async with a_rig(root) as rig:
        asked, last = 0, 0
        steps_s: dict[int, float] = {}
        """Incident -> what a step took before it."""

        async def kill(step: int) -> None:
            nonlocal asked, last
            record = await rig.store.get(JOB)
            judged = [one for one in record.injected if one.verdict is not Verdict.OPEN]
            if not isinstance(record.state, Running) or len(judged) < asked:
                last = step
            elif step >= last + APART and asked == kills:
                await rig.store.command(CancelRequested(job=JOB))
            elif step >= last + APART:
                asked, last = asked + 1, step
                steps_s[len(record.incidents)] = record.typical_step_s or 0.0
                await rig.kill_rank(asked % record.state.plan.world_size)

        record = await rig.run(paced(), kill)
    caused = (Cause.RANK_LOST, Cause.LINK_LOST)
    return [
        Killed(incident=one, step_s=steps_s[number])
        for number, one in enumerate(record.incidents)
        if number in steps_s and one.fault.cause in caused
    ]


def paced() -> JobSpec:
    from tests.jobs import ENDLESS, a_job

    spec = a_job(steps=ENDLESS, emulated_layer_s=LAYER_S)
    return replace(spec, checkpoint=replace(spec.checkpoint, every=0))


if __name__ == "__main__":
    sys.exit(main())
