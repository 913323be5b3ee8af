"""A journal under real ranks: every step is a checkpoint, and what comes back from one is what was lost, to the bit."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import pytest

from orchestrator.adapters import manifest
from orchestrator.domain.checkpoint import FIRST_EVERY, CheckpointRef
from orchestrator.domain.events import CancelRequested
from orchestrator.domain.faults import FaultKind, FaultRequested
from orchestrator.domain.job import JobRecord
from orchestrator.domain.spec import CheckpointSpec, JobSpec, ParallelSpec
from orchestrator.domain.state import Cancelled, Running, Succeeded
from tests.jobs import ENDLESS, a_job
from tests.rig import JOB, Rig, a_rig
from worker.checkpoint.verify import verify
from worker.reference import run

pytestmark = pytest.mark.timeout(150)

Disturbance: TypeAlias = Callable[[JobRecord], Awaitable[bool]]


def journalled(steps: int, **checkpoint: object) -> JobSpec:
    """Two ranks that hold everything twice. Its steps nap, so that whoever writes is not starved by who trains."""
    spec = a_job(steps=steps, exact=True, micro_batches=2, micro_batch_size=1)
    return replace(
        spec,
        program="tests.slow_model:PROGRAM",
        parallel=ParallelSpec(tp=1, pp=1, dp=2),
        checkpoint=replace(CheckpointSpec(policy="journal", every=64), **checkpoint),  # type: ignore[arg-type]
    )


async def trained(rig: Rig, spec: JobSpec, *disturbances: Disturbance) -> JobRecord:
    """To the end; each disturbance is asked after each step until it says that it has happened, one after the other."""
    left = list(disturbances)

    async def disturb(_: int) -> None:
        if left and await left[0](await rig.store.get(JOB)):
            left.pop(0)

    job = await rig.run(spec, disturb)
    assert isinstance(job.state, Succeeded), job.state
    assert not left, "everything has happened"
    wanted = [answer.loss for answer in run(replace(spec, program="causal_lm"))]
    assert [rig.losses[step] for step in range(1, spec.train.steps + 1)] == wanted, "to the bit"
    return job


def test_with_all_of_its_ranks_lost_a_job_goes_on_from_the_newest_entry_that_is_good(tmp_path: Path) -> None:
    spec = journalled(40)

    async def scenario() -> None:
        async with a_rig(tmp_path, num_nodes=2, num_devices=1) as rig:
            lost: list[int] = []

            async def ask(rank: int, at: str = "") -> None:
                wanted = FaultRequested(fault=FaultKind.KILL, job=JOB, rank=rank, at=at, beyond_mirrors=True)
                await rig.store.command(wanted)

            async def all_die(record: JobRecord) -> bool:
                if _depth(record) < 3:
                    return False
                lost.append(record.generation)
                for rank in range(2):
                    await ask(rank)
                return True

            async def one_dies_handing_over(record: JobRecord) -> bool:
                if record.generation == lost[-1] or _depth(record) < 2:
                    return False
                lost.append(record.generation)
                await ask(0, "in_snapshot")
                return True

            async def an_entry_is_damaged_and_all_ranks_die(record: JobRecord) -> bool:
                if record.generation == lost[-1] or _depth(record) < 4:
                    return False
                entry = record.older[1]
                assert record.checkpoint and entry.depth == record.checkpoint.depth - 2, "one can go back to each"
                _flip(entry)
                lost.append(entry.step)
                for rank in range(2):
                    await ask(rank)
                return True

            job = await trained(rig, spec, all_die, one_dies_handing_over, an_entry_is_damaged_and_all_ranks_die)
            steps = [int(one.source.rpartition("step ")[2]) for one in job.incidents if "checkpoint" in one.source]
            assert len(steps) >= 2 and steps[0] >= 4 and steps[-1] == lost[-1] - 1, (steps, lost)
            said = [entry.message for entry in rig.history if entry.type == "checkpoint_distrusted"]
            # One more where an entry saved before they died is committed after that: it is read through the same one.
            assert 1 <= len(said) <= 2 and f"step {steps[-1]} is the newest now" in said[-1], said
            assert [entry.type for entry in rig.history].count("checkpoint_proven") >= 1
            await _swept(tmp_path, job)
            _is_kept_as_asked(tmp_path, job)

    asyncio.run(scenario())


def test_how_often_a_job_saves_follows_what_its_saves_were_measured_to_cost(tmp_path: Path) -> None:
    """On ranks as quick as these, a state every 25 steps costs more than anything that may ever be lost."""
    spec = replace(a_job(ENDLESS, micro_batches=1, micro_batch_size=1), parallel=ParallelSpec(tp=1, pp=1, dp=1))
    spec = replace(spec, checkpoint=CheckpointSpec(policy="auto", every="auto"), recovery=replace(spec.recovery, mirrors=0))

    async def scenario() -> None:
        async with a_rig(tmp_path, num_nodes=1, num_devices=1) as rig:
            gaps: list[int] = []

            async def disturb(step: int) -> None:
                record = await rig.store.get(JOB)
                if not gaps and record.pacing and record.pacing.every > 2 * FIRST_EVERY:
                    assert record.checkpoint is not None
                    if (gap := step - record.checkpoint.step) > 2 * FIRST_EVERY:  # nobody saves any more as they did
                        gaps.append(gap)
                        await rig.store.command(CancelRequested(job=JOB))

            job = await rig.run(spec, disturb)
            assert isinstance(job.state, Cancelled) and gaps
            said = next(entry.message for entry in rig.history if entry.type == "checkpoint_pace")
            assert f"instead of every {FIRST_EVERY} steps; " in said and "is expected to cost" in said, said
            assert len([entry for entry in rig.history if entry.type == "checkpoint"]) >= 3, "not before it has measured"

    asyncio.run(scenario())


def _depth(record: JobRecord) -> int:
    """Entries from its base to the newest checkpoint, where that is of the generation that trains."""
    newest, state = record.checkpoint, record.state
    is_new = newest is not None and isinstance(state, Running) and newest.generation == state.generation
    return newest.depth if newest is not None and is_new else 0


def _flip(checkpoint: CheckpointRef) -> None:
    """A bit of its gradient."""
    path = Path(checkpoint.path)
    pack = path.parent / "packs" / next(iter(manifest.load_manifest(path).packs))
    content = bytearray(pack.read_bytes())
    content[len(content) // 2] ^= 1
    pack.write_bytes(content)


async def _swept(root: Path, job: JobRecord) -> None:
    """A job may have ended before what its last checkpoint replaces is off the disk."""
    known = {Path(one.path).name for one in (job.checkpoint, *job.older) if one is not None}
    async with asyncio.timeout(60):
        while {one.name for one in (root / "jobs" / JOB / "checkpoints").glob("step-*")} - known:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


def _is_kept_as_asked(root: Path, job: JobRecord) -> None:
    """The last one is a base; those that are kept can be read, and nothing is there that none of them is read through."""
    known = [job.checkpoint, *job.older]
    assert known[0] is not None and (known[0].step, known[0].kind) == (job.spec.train.steps, "base")
    assert len([one for one in known if one.kind == "base"]) <= 3, "two are kept, and the newest that is proven"
    for one in known:
        assert one is not None and verify(Path(one.path)).bad == ()
    whole = known[0].total_bytes or 0
    assert all(3 * (one.new_bytes or whole) <= 1.03 * whole for one in known if one is not None and one.depth)
    folder = root / "jobs" / JOB / "checkpoints"
    gradients = {
        str(pack.relative_to(folder / "packs"))
        for one in folder.glob("step-*")
        if (told := manifest.load_manifest(one)).kind == "journal"
        for pack in map((folder / "packs").joinpath, told.packs)
    }
    assert {one.name for one in folder.glob("step-*")} == {Path(one.path).name for one in known if one is not None}
    assert gradients == {
        pack for one in known if one and one.depth for pack in manifest.load_manifest(Path(one.path)).packs
    }
