"""A checkpoint that cannot be read, and one that can and is not what was saved: real ranks go back to an older one."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.domain.checkpoint import CheckpointRef
from orchestrator.domain.events import CancelRequested
from orchestrator.domain.faults import FaultKind, FaultRequested
from orchestrator.domain.job import Cancelled, Cause, Running
from orchestrator.domain.spec import CheckpointSpec, JobSpec, ParallelSpec
from tests.jobs import ENDLESS, a_job, largest_gap
from tests.rig import JOB, a_rig
from tests.saved import save, state_of

pytestmark = pytest.mark.timeout(180)
EVERY = 10
"""Steps: enough for a busy disk to have written one checkpoint well before the next is due."""
LAYER_S = 0.003
"""Steps are paced: none comes between a look at the newest checkpoint and what is done then, however fast the machine."""


def test_training_goes_back_to_a_checkpoint_that_can_be_read_and_is_what_was_saved(tmp_path: Path) -> None:
    """One rank alone: whatever it held is lost with it."""
    spec = a_job(steps=ENDLESS, micro_batches=4, micro_batch_size=1, emulated_layer_s=LAYER_S)
    spec = replace(
        spec,
        parallel=ParallelSpec(tp=1, pp=1, dp=1),
        checkpoint=CheckpointSpec(every=EVERY, keep_last=3),
        recovery=replace(spec.recovery, mirrors=0),
    )

    async def scenario() -> None:
        async with a_rig(tmp_path, num_nodes=1, num_devices=1) as rig:
            kill = FaultRequested(fault=FaultKind.KILL, job=JOB, rank=0, beyond_mirrors=True)
            damage = [_damaged, _forged]

            async def disturb(step: int) -> None:
                record = await rig.store.get(JOB)
                told = [entry.type for entry in rig.history]
                if not isinstance(record.state, Running) or told.count("checkpoint_proven") < 2 - len(damage):
                    return
                if not damage:
                    await rig.store.command(CancelRequested(job=JOB))
                elif record.older and record.checkpoint is not None and 0 < step - record.checkpoint.step < EVERY / 2:
                    # The newest has just been committed: none comes between the damage and the kill.
                    damage.pop(0)(spec, record.checkpoint)
                    await rig.store.command(kill)

            job = await rig.run(spec, disturb)
            assert isinstance(job.state, Cancelled), job.state
            told = [(entry.type, entry.step) for entry in rig.history if entry.type.startswith("checkpoint_")]
            assert [kind for kind, _ in told].count("checkpoint_distrusted") == 2
            assert [kind for kind, _ in told].count("checkpoint_proven") == 2
            causes = [incident.fault.cause for incident in job.incidents]
            assert causes.count(Cause.CHECKPOINT) >= 1, causes
            assert job.distrusted == 0
            assert largest_gap(rig.losses, spec, len(rig.losses)) <= 1e-5

    asyncio.run(scenario())


def _damaged(_: JobSpec, checkpoint: CheckpointRef) -> None:
    """A bit of what it alone has."""
    packs = (Path(checkpoint.path).parent / "packs").rglob("*.pack")
    pack = max(packs, key=lambda path: path.stat().st_mtime)
    content = bytearray(pack.read_bytes())
    content[len(content) // 2] ^= 1
    pack.write_bytes(content)


def _forged(spec: JobSpec, checkpoint: CheckpointRef) -> None:
    """Whole, with every hash right, and of other weights."""
    path = Path(checkpoint.path)
    shutil.rmtree(path)
    save(path.parent, spec, state_of(spec), checkpoint.step, checkpoint.generation)
