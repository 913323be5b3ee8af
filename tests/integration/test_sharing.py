"""Real ranks of one job make room for those of another of higher priority, and take it back; no curve shows it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.domain.events import CancelRequested, StepRecord
from orchestrator.domain.ids import JobId
from orchestrator.domain.job import Cancelled, Running, Succeeded
from orchestrator.domain.spec import ParallelSpec
from tests.jobs import ENDLESS, a_job, largest_gap
from tests.rig import JOB, a_rig

pytestmark = pytest.mark.timeout(240)
HIGH = JobId("high")


def test_a_job_becomes_smaller_for_one_of_higher_priority_and_grows_back(tmp_path: Path) -> None:
    spec = replace(a_job(steps=ENDLESS, learning_rate=1e-3), parallel=ParallelSpec(tp=1, pp=1))
    short = replace(
        spec,
        train=replace(spec.train, steps=4),
        checkpoint=replace(spec.checkpoint, every=0),
        parallel=ParallelSpec(tp=1, pp=1, max_devices=1),
        priority=5,
    )

    async def scenario() -> None:
        async with a_rig(tmp_path, num_nodes=1, num_devices=2) as rig:
            seen, is_submitted = 0, False

            async def follow(_: int) -> None:
                """Each two steps after the job has both devices: the other comes, and when that has ended, all is over."""
                nonlocal seen, is_submitted
                state = (await rig.store.get(JOB)).state
                is_whole = isinstance(state, Running) and state.plan.world_size == 2
                is_over = not is_submitted or isinstance((await rig.store.get(HIGH)).state, Succeeded)
                seen = seen + 1 if is_whole and is_over else 0
                if seen == 2 and not is_submitted:
                    seen, is_submitted = 0, True
                    await rig.store.submit(HIGH, short, time.time(), None, "")
                elif seen == 2:
                    await rig.store.command(CancelRequested(job=JOB))

            job = await rig.run(spec, follow)
            assert isinstance(job.state, Cancelled) and "yielding" in [entry.type for entry in rig.history]
            assert sum(one.rolled_back for one in job.incidents) == 0 and not job.failures
            assert largest_gap(rig.losses, spec, len(rig.losses)) <= 1e-5
            steps = [one for _, one in await rig.store.steps(HIGH, "0", 100) if isinstance(one, StepRecord)]
            assert largest_gap({one.answer.step: one.answer.loss for one in steps}, short, 4) <= 1e-5

    asyncio.run(scenario())
