"""The supervisor's loop, the kernel and real training processes together; only Ray and Redis are their in-memory twins."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.domain.events import CancelRequested
from orchestrator.domain.failure import Cause
from orchestrator.domain.spec import ParallelSpec
from orchestrator.domain.state import Cancelled, Failed
from tests.jobs import ENDLESS, a_job, largest_gap
from tests.rig import JOB, a_rig

pytestmark = pytest.mark.timeout(240)


def test_program_that_diverges_is_tried_once_more_and_fails_the_job_with_its_words(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with a_rig(tmp_path, num_nodes=1) as rig:
            job = await rig.run(a_job(steps=20, learning_rate=1e30, clip_norm=1e30, warmup_steps=1))
            assert isinstance(job.state, Failed)
            assert "lower train.learning_rate" in job.state.message
            assert job.state.verdict == "repeated_error"

    asyncio.run(scenario())


def test_data_that_is_not_there_is_refused_before_any_device_is_held(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with a_rig(tmp_path, num_nodes=1) as rig:
            spec = a_job()
            job = await rig.run(replace(spec, data=replace(spec.data, files=(str(tmp_path / "nothing*.txt"),))))
            assert isinstance(job.state, Failed)
            assert "nothing*.txt" in job.state.message
            assert not [entry for entry in rig.history if entry.status not in ("PENDING", "FAILED")]

    asyncio.run(scenario())


@pytest.mark.parametrize(("variant", "gap"), [("gloo", 1e-5), ("bf16", 1e-2)])
def test_killed_rank_does_not_change_the_curve_on_other_settings(tmp_path: Path, variant: str, gap: float) -> None:
    """gloo instead of links; bf16 with a head tied across stages and activation checkpointing."""
    spec = a_job(steps=ENDLESS)
    if variant == "gloo":
        spec = replace(spec, parallel=ParallelSpec(tp=2, pp=1), recovery=replace(spec.recovery, backend="gloo"))
    else:
        train = replace(spec.train, dtype="bf16", activation_checkpointing=True)
        spec = replace(spec, parallel=ParallelSpec(tp=1, pp=2), train=train, model={**spec.model, "tied": True})
    # Nobody is killed for being slow to leave: that would be another failure.
    spec = replace(spec, recovery=replace(spec.recovery, leave_s=10.0))

    async def scenario() -> None:
        async with a_rig(tmp_path, num_devices=2) as rig:

            async def disturb(step: int) -> None:
                job = await rig.store.get(JOB)
                if step == 9:
                    await rig.kill_rank(2)
                elif job.incidents and job.incidents[0].pause_s is not None and step > job.incidents[0].committed + 5:
                    await rig.store.command(CancelRequested(job=JOB))

            job = await rig.run(spec, disturb)
            assert isinstance(job.state, Cancelled), job.state
            assert [incident.fault.cause for incident in job.incidents] == [Cause.RANK_LOST]
            assert sum(incident.rolled_back for incident in job.incidents) == 0
            assert largest_gap(rig.losses, spec, len(rig.losses)) <= gap

    asyncio.run(scenario())
