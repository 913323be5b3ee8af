"""The supervisor's loop, the kernel and real training processes together; only Ray and Redis are their in-memory twins."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.domain.events import CancelRequested
from orchestrator.domain.job import Cancelled, Cause, Failed, Running, Succeeded
from tests.jobs import ENDLESS, a_job, largest_gap
from tests.rig import JOB, a_rig

pytestmark = pytest.mark.timeout(240)
STEPS_AFTER = 5


def test_killed_ranks_one_after_another_do_not_change_the_curve(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with a_rig(tmp_path) as rig:
            spec = a_job(steps=36)
            job = await rig.run(spec, lambda step: rig.kill_rank(step // 4 - 1) if step % 4 == 0 and step <= 32 else None)
            assert isinstance(job.state, Succeeded), job.state
            assert [incident.fault.cause for incident in job.incidents] == [Cause.RANK_LOST] * 8
            assert sum(incident.rolled_back for incident in job.incidents) == 0
            assert largest_gap(rig.losses, spec) <= 1e-5
            print("pauses", [round(incident.pause_s or 0, 3) for incident in job.incidents])

    asyncio.run(scenario())


def test_killed_node_is_planned_around_and_a_new_one_is_used(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with a_rig(tmp_path, num_nodes=4, num_devices=2) as rig:
            spec = a_job(steps=ENDLESS)

            async def disturb(step: int) -> None:
                record = await rig.store.get(JOB)
                if step == 8:
                    assert isinstance(record.state, Running)
                    await rig.cluster.kill(record.state.plan.seats[0].device.node)
                elif step == 16:
                    await rig.cluster.add("A100", 2)
                elif len(record.incidents) == 2 and record.committed > record.incidents[1].committed + STEPS_AFTER:
                    await rig.store.command(CancelRequested(job=JOB))

            job = await rig.run(spec, disturb)
            assert isinstance(job.state, Cancelled), job.state
            assert [incident.fault.cause for incident in job.incidents] == [Cause.NODE_LOST, Cause.GROW]
            assert [incident.rolled_back for incident in job.incidents] == [0, 0]
            assert job.incidents[1].pause_s is not None
            assert largest_gap(rig.losses, spec, len(rig.losses)) <= 1e-4

    asyncio.run(scenario())


def test_supervisor_that_dies_is_succeeded_and_no_rank_restarts(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with a_rig(tmp_path, num_devices=2) as rig:
            spec = a_job(steps=45)
            pids: list[dict[object, int]] = []

            async def disturb(step: int) -> None:
                if step in (10, 25):
                    pids.append(dict((await rig.store.get(JOB)).pids))
                    await rig.stop_supervisor()
                    await asyncio.sleep(0.5)
                    rig.start_supervisor(f"after-{step}")

            job = await rig.run(spec, disturb)
            assert isinstance(job.state, Succeeded), job.state
            assert pids[0] == pids[1] and len(pids[0]) == 4
            assert job.generation == 1
            assert largest_gap(rig.losses, spec) <= 1e-5

    asyncio.run(scenario())


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
    """gloo instead of links; bf16 with a tied head and activation checkpointing."""
    spec = a_job(steps=24)
    if variant == "gloo":
        spec = replace(spec, recovery=replace(spec.recovery, backend="gloo"))
    else:
        train = replace(spec.train, dtype="bf16", activation_checkpointing=True)
        spec = replace(spec, train=train, model={**spec.model, "tied": True})

    async def scenario() -> None:
        async with a_rig(tmp_path) as rig:
            job = await rig.run(spec, lambda step: rig.kill_rank(5) if step == 9 else None)
            assert isinstance(job.state, Succeeded), job.state
            assert [incident.fault.cause for incident in job.incidents] == [Cause.RANK_LOST]
            assert sum(incident.rolled_back for incident in job.incidents) == 0
            assert largest_gap(rig.losses, spec) <= gap

    asyncio.run(scenario())
