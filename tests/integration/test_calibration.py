"""The simulated pause beside the real one: ranks of a job on eight devices are killed, and the simulator is told how long
each phase took. Both come from the same minute of the same machine, so how fast that is does not matter."""

from __future__ import annotations

import asyncio
from pathlib import Path
from statistics import median

import pytest

from orchestrator.domain.events import CancelRequested
from orchestrator.domain.faults import Verdict
from orchestrator.domain.job import Cancelled, Cause, Running
from orchestrator.domain.rungs import Rung
from orchestrator.sim.calibrate import calibrated
from tests.jobs import ENDLESS, a_job
from tests.rig import JOB, a_rig

pytestmark = pytest.mark.timeout(180)

KILLS = 5
APART = 4
"""Steps between a recovery and the next kill: enough for a typical step to be known."""


def test_a_killed_rank_stops_the_simulated_job_for_as_long_as_the_real_one(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with a_rig(tmp_path) as rig:
            asked, last = 0, 0

            async def kill(step: int) -> None:
                nonlocal asked, last
                record = await rig.store.get(JOB)
                judged = [one for one in record.injected if one.verdict is not Verdict.OPEN]
                if not isinstance(record.state, Running) or len(judged) < asked:
                    last = step
                elif step >= last + APART and asked == KILLS:
                    await rig.store.command(CancelRequested(job=JOB))
                elif step >= last + APART:
                    asked, last = asked + 1, step
                    await rig.kill_rank(asked % record.state.plan.world_size)

            job = await rig.run(a_job(steps=ENDLESS), kill)
            assert isinstance(job.state, Cancelled) and len(job.recent_step_s) > APART
            seen = [one for one in job.incidents if one.fault.cause in (Cause.RANK_LOST, Cause.LINK_LOST)]
            assert len(seen) == KILLS
            found = calibrated(seen, median(job.recent_step_s), devices=8)
            for one in seen:
                print(f"{one.pause_s:.3f} s", {name: round(seconds, 4) for name, seconds in one.phases.items()})
            print(found)
            assert found.rung is Rung.FORK and all(one.rung is Rung.FORK for one in seen)
            assert 0.7 < found.ratio < 1.3, found

    asyncio.run(scenario())
