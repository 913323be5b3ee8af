"""The simulated pause of a killed rank beside the real one: kills in a job on eight local ranks, told to the simulator.

    python -m benchmarks.calibration --json [--kills 9]

The simulator takes its constants from the medians of the phases that were measured (orchestrator/sim/calibrate.py). `ratio`
is the simulated pause over the median real one, wanted within 30 %. No test: where other work fills the machine, a step
beside a kill differs from the typical one by as much as a whole pause.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from dataclasses import asdict
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from orchestrator.domain.events import CancelRequested
from orchestrator.domain.faults import Verdict
from orchestrator.domain.job import Cause, JobRecord, Running
from orchestrator.sim.calibrate import calibrated

from .cluster import say

APART = 4
"""Steps between a recovery and the next kill: enough for a typical step to be known."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line of output")
    parser.add_argument("--kills", type=int, default=9)
    asked = parser.parse_args()
    with TemporaryDirectory() as folder:
        job = asyncio.run(_killed(Path(folder), asked.kills))
    seen = [one for one in job.incidents if one.fault.cause in (Cause.RANK_LOST, Cause.LINK_LOST)]
    for one in seen:
        say(f"{one.pause_s or 0.0:.3f} s: {', '.join(f'{name} {seconds:.4f}' for name, seconds in one.phases.items())}")
    found = calibrated(seen, median(job.recent_step_s), devices=8)
    print(json.dumps({**asdict(found), "ratio": round(found.ratio, 3), "kills": len(seen)}), flush=True)
    return 0


async def _killed(root: Path, kills: int) -> JobRecord:
    from tests.jobs import ENDLESS, a_job
    from tests.rig import JOB, a_rig

    async with a_rig(root) as rig:
        asked, last = 0, 0

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
                await rig.kill_rank(asked % record.state.plan.world_size)

        return await rig.run(a_job(steps=ENDLESS), kill)


if __name__ == "__main__":
    sys.exit(main())
