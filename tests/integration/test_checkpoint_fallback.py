"""A checkpoint that cannot be read, and one that can and is not what was saved: real ranks go back to an older one. They
wait for one that is away."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.adapters import manifest
from orchestrator.domain.events import CancelRequested
from orchestrator.domain.failure import Cause
from orchestrator.domain.faults import FaultKind, FaultRequested
from orchestrator.domain.job import JobRecord
from orchestrator.domain.spec import CheckpointSpec, JobSpec, ParallelSpec
from orchestrator.domain.state import Cancelled, Running
from tests.jobs import ENDLESS, a_job, largest_gap
from tests.rig import JOB, a_rig
from tests.saved import save, state_of

pytestmark = pytest.mark.timeout(180)
EVERY, ROOM = 16, 8
"""Steps from one checkpoint to the next, and how many of them are left, at least, when the newest is damaged and the rank
killed. The others are for a busy disk to have written it."""
LAYER_S = 0.005
"""Steps are paced, to more than a tenth of a second: so many are not made between a look and what is done then."""


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
            damage = [_emptied, _damaged, _forged]
            given_back: list[asyncio.Task[None]] = []

            async def give_back(folder: Path) -> None:
                """Once the job has found nothing there again and again."""
                while "resting" not in [entry.type for entry in rig.history]:  # noqa: ASYNC110  nobody tells
                    await asyncio.sleep(0.02)
                for path in _elsewhere(folder).iterdir():
                    path.rename(folder / path.name)

            async def disturb(step: int) -> None:
                record = await rig.store.get(JOB)
                told = [entry.type for entry in rig.history]
                if not isinstance(record.state, Running) or told.count("checkpoint_proven") < 3 - len(damage):
                    return
                if not damage:
                    await rig.store.command(CancelRequested(job=JOB))
                elif record.older and record.checkpoint and 0 < record.committed - record.checkpoint.step <= EVERY - ROOM:
                    # The next is not due for a while: none comes between the damage and the kill. What is committed says
                    # so, and not `step`, which is one of those that were told at once. It stands still until it is killed.
                    (pid,) = record.pids.values()
                    os.kill(pid, signal.SIGSTOP)
                    if not given_back:
                        given_back.append(asyncio.create_task(give_back(Path(record.checkpoint.path).parent)))
                    damage.pop(0)(spec, record)
                    await rig.store.command(kill)

            job = await rig.run(spec, disturb)
            assert isinstance(job.state, Cancelled), job.state
            told = [(entry.type, entry.step) for entry in rig.history if entry.type.startswith("checkpoint_")]
            assert [kind for kind, _ in told].count("checkpoint_distrusted") == 2
            assert [kind for kind, _ in told].count("checkpoint_proven") == 3
            kinds = [kind for kind, _ in told]
            first = kinds.index("checkpoint_proven")
            assert first < kinds.index("checkpoint_distrusted"), "what was away for a while is believed as before"
            causes = [incident.fault.cause for incident in job.incidents]
            assert causes.count(Cause.CHECKPOINT) >= 1, causes
            assert job.distrusted == 0
            assert largest_gap(rig.losses, spec, len(rig.losses)) <= 1e-5

    asyncio.run(scenario())


def _elsewhere(folder: Path) -> Path:
    return folder.with_name("elsewhere")


def _emptied(_: JobSpec, record: JobRecord) -> None:
    """As where what is mounted there is not."""
    assert record.checkpoint is not None
    folder = Path(record.checkpoint.path).parent
    _elsewhere(folder).mkdir()
    for path in list(folder.iterdir()):
        path.rename(_elsewhere(folder) / path.name)


def _damaged(_: JobSpec, record: JobRecord) -> None:
    """A bit of what it alone has."""
    assert record.checkpoint is not None
    newest, *others = (Path(one.path) for one in (record.checkpoint, *record.older))
    shared = {pack for other in others for pack in manifest.load_manifest(other).packs}
    own = [newest.parent / "packs" / pack for pack in manifest.load_manifest(newest).packs if pack not in shared]
    pack = max(own, key=lambda path: path.stat().st_size)
    content = bytearray(pack.read_bytes())
    content[len(content) // 2] ^= 1
    pack.write_bytes(content)


def _forged(spec: JobSpec, record: JobRecord) -> None:
    """Whole, with every hash right, and of other weights."""
    assert record.checkpoint is not None
    path = Path(record.checkpoint.path)
    shutil.rmtree(path)
    save(path.parent, spec, state_of(spec), record.checkpoint.step, record.checkpoint.generation)
