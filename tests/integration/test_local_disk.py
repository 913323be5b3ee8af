"""A job that keeps copies of its checkpoints on its nodes' own disks: real ranks are restored from there."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.domain.events import CancelRequested, CheckpointNow
from orchestrator.domain.faults import FaultKind, FaultRequested
from orchestrator.domain.spec import CheckpointSpec, ParallelSpec
from orchestrator.domain.state import Cancelled, Running
from tests.jobs import ENDLESS, a_job, largest_gap
from tests.rig import JOB, a_rig
from worker.checkpoint.verify import verify

pytestmark = pytest.mark.timeout(180)
NEVER = 1_000_000
"""Checkpoints come when they are asked for: none between a look at the newest and what is done then."""


def test_training_is_restored_from_the_nodes_own_disk_and_a_damaged_piece_of_it_from_shared_storage(tmp_path: Path) -> None:
    """One rank alone: whatever it held is lost with it."""
    near = tmp_path / "own disk"
    spec = a_job(steps=ENDLESS, micro_batches=4, micro_batch_size=1)
    spec = replace(
        spec,
        parallel=ParallelSpec(tp=1, pp=1, dp=1),
        checkpoint=CheckpointSpec(every=NEVER, keep_last=3, local=str(near), path=f"file://{tmp_path}/shared"),
        recovery=replace(spec.recovery, mirrors=0),
    )

    async def scenario() -> None:
        async with a_rig(tmp_path, num_nodes=1, num_devices=1) as rig:
            kill = FaultRequested(fault=FaultKind.KILL, job=JOB, rank=0, beyond_mirrors=True)
            kills = asked = after = 0

            async def disturb(step: int) -> None:
                nonlocal kills, asked, after
                record = await rig.store.get(JOB)
                over = [one for one in record.incidents if one.pause_s is not None]
                if not isinstance(record.state, Running) or len(over) < kills:
                    return
                if kills == 2:
                    await rig.store.command(CancelRequested(job=JOB))
                elif asked == kills:
                    asked, after = kills + 1, record.checkpoint.step if record.checkpoint else 0
                    await rig.store.command(CheckpointNow(job=JOB))
                elif record.checkpoint is not None and record.checkpoint.step > after and record.checkpoint.local:
                    if kills == 1:
                        _spoil_the_newest(near)
                    kills += 1
                    await rig.store.command(kill)

            job = await rig.run(spec, disturb)
            assert isinstance(job.state, Cancelled), job.state
            sources = [incident.source for incident in job.incidents]
            assert len(sources) == 2 and all("'s disk" in source for source in sources), sources
            told = [entry.message for entry in rig.history if entry.type == "checkpoint_damaged"]
            assert len(told) == 1 and "do not have the hash they were written with on" in told[0], told
            assert not [entry for entry in rig.history if entry.type == "checkpoint_distrusted"]
            assert largest_gap(rig.losses, spec, len(rig.losses)) <= 1e-5

    asyncio.run(scenario())
    assert not list(near.rglob("*.pack")), "copies go with the job's hosts"
    newest = max((tmp_path / "shared" / JOB).glob("step-*"))
    assert verify(newest).bad == () and not list(tmp_path.rglob("checkpoints/step-*")), "they are where the job says"


def _spoil_the_newest(near: Path) -> None:
    copy = max(near.rglob("*.pack"), key=lambda path: path.name)
    content = bytearray(copy.read_bytes())
    content[len(content) // 2] ^= 1
    copy.write_bytes(content)
