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


def test_a_flipped_bit_is_undone_and_both_devices_come_back_after_their_self_test(tmp_path: Path) -> None:
    spec = a_job(steps=30)
    spec = replace(
        spec,
        parallel=ParallelSpec(tp=1, pp=1, dp=2),  # two of four devices: the others take over
        checkpoint=CheckpointSpec(every=10),
        recovery=replace(spec.recovery, compare_every=4),
    )
    asked = {
        3: FaultRequested(fault=FaultKind.NAN, job=JOB, rank=1),
        13: FaultRequested(fault=FaultKind.BIT_FLIP, job=JOB, rank=0, seed=5),
    }

    async def scenario() -> None:
        async with a_rig(tmp_path, num_nodes=2) as rig:

            async def disturb(step: int) -> None:
                if fault := asked.pop(step, None):
                    await rig.store.command(fault)

            job = await rig.run(spec, disturb)
            assert isinstance(job.state, Succeeded), job.state
            nan, flip = (incident for incident in job.incidents if incident.fault.cause is not Cause.GROW)
            assert (nan.fault.cause, nan.rolled_back) == (Cause.NOT_FINITE, 0)
            assert flip.fault.cause is Cause.CORRUPTION and len(flip.fault.devices) == 2
            # Where it hits depends on how quickly it is delivered; the newest checkpoint before that is known to be sound.
            said = next(one.message for one in rig.history if one.type == "fault_carried_out" and "flipped" in one.message)
            sound = (int(said.split()[-1]) - 1) // 10 * 10
            assert flip.source.endswith(f"from the checkpoint of step {sound}") and 0 < flip.rolled_back <= 10
            told = [entry.type for entry in rig.history]
            assert told.count("quarantined") == 2 and told.count("released") == 2
            quarantine = await rig.store.quarantine()
            assert {one.device for one in quarantine} == set(flip.fault.devices)
            assert {(one.standing, one.strikes) for one in quarantine} == {(Standing.RELEASED, 1)}
            assert largest_gap(rig.losses, spec) <= 1e-5

    asyncio.run(scenario())
