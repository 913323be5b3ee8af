"""A flipped bit and a NaN in a running job, with the real supervisor, hosts and ranks: found, tested, undone."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.domain.faults import FaultKind, FaultRequested
from orchestrator.domain.job import Cause, Succeeded
from orchestrator.domain.quarantine import Standing
from orchestrator.domain.spec import CheckpointSpec, ParallelSpec
from tests.jobs import a_job, largest_gap
from tests.rig import JOB, a_rig

pytestmark = pytest.mark.timeout(240)


def test_flipped_bits_are_undone_and_accused_devices_come_back_after_their_self_test(tmp_path: Path) -> None:
    """A bit that flips in memory is known by its own rank; an update that comes out wrong only by the two copies."""
    spec = a_job(steps=100)
    spec = replace(
        spec,
        parallel=ParallelSpec(tp=1, pp=1, dp=2),  # two of four devices: the others take over
        checkpoint=CheckpointSpec(every=10),
        recovery=replace(spec.recovery, compare_every=0),
    )
    asked = {
        3: FaultRequested(fault=FaultKind.NAN, job=JOB, rank=1),
        8: FaultRequested(fault=FaultKind.BIT_FLIP, job=JOB, rank=1, seed=5),
        18: FaultRequested(fault=FaultKind.BIT_FLIP, job=JOB, rank=0, seed=5, at="in_vote"),
    }

    async def scenario() -> None:
        async with a_rig(tmp_path, num_devices=2) as rig:

            async def disturb(step: int) -> None:
                if fault := asked.pop(step, None):
                    await rig.store.command(fault)

            job = await rig.run(spec, disturb)
            assert isinstance(job.state, Succeeded), job.state
            nan, memory, update = (one for one in job.incidents if one.fault.cause is not Cause.GROW)
            assert (nan.fault.cause, nan.rolled_back) == (Cause.NOT_FINITE, 0)
            assert (memory.fault.cause, memory.rolled_back) == (Cause.CORRUPTION, 0)
            assert len(memory.fault.devices) == 1
            assert update.fault.cause is Cause.CORRUPTION and len(update.fault.devices) == 2
            # Where it hits depends on how quickly it is delivered; the newest checkpoint before that is known to be sound.
            said = [one.message for one in rig.history if one.type == "fault_carried_out" and "flipped" in one.message]
            sound = (int(said[-1].split()[-1]) - 1) // 10 * 10
            assert update.source.endswith(f"from the checkpoint of step {sound}") and 0 <= update.rolled_back <= 10
            told = [entry.type for entry in rig.history]
            assert told.count("quarantined") == 3 and told.count("released") == 3
            quarantine = await rig.store.quarantine()
            assert {one.device for one in quarantine} >= {*memory.fault.devices, *update.fault.devices}
            assert {one.standing for one in quarantine} == {Standing.RELEASED}
            assert largest_gap(rig.losses, spec) <= 1e-5

    asyncio.run(scenario())
