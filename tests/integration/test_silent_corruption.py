"""A flipped bit and a NaN in a running job, with the real supervisor, hosts and ranks: found, tested, undone."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.domain.events import CancelRequested
from orchestrator.domain.failure import Cause
from orchestrator.domain.faults import FaultKind, FaultRequested
from orchestrator.domain.quarantine import Standing
from orchestrator.domain.spec import CheckpointSpec, ParallelSpec
from orchestrator.domain.state import Cancelled
from tests.jobs import ENDLESS, a_job, largest_gap
from tests.rig import JOB, a_rig

pytestmark = pytest.mark.timeout(240)
LAYER_S = 0.003
"""Steps are paced: rounding has not grown beyond the tolerance when the last test is over, however fast the machine."""


def test_flipped_bits_are_undone_and_accused_devices_come_back_after_their_self_test(tmp_path: Path) -> None:
    """A bit that flips in memory is known by its own rank; an update that comes out wrong only by the two copies."""
    spec = a_job(steps=ENDLESS, learning_rate=1e-3, emulated_layer_s=LAYER_S)
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
                if sum(entry.type == "released" for entry in rig.history) >= 3:
                    await rig.store.command(CancelRequested(job=JOB))
                is_judged = sum(entry.type == "fault_judged" for entry in rig.history) == 3 - len(asked)
                due = min(asked, default=step + 1)
                if not is_judged or step < due or (due > 10 and (await rig.store.get(JOB)).checkpoint is None):
                    return  # one at a time, and the last is to have something to go back to, however late that is written
                await rig.store.command(asked.pop(due))

            job = await rig.run(spec, disturb)
            assert isinstance(job.state, Cancelled), job.state
            nan, memory, update = (one for one in job.incidents if one.fault.cause is not Cause.GROW)
            assert (nan.fault.cause, nan.rolled_back) == (Cause.NOT_FINITE, 0)
            assert (memory.fault.cause, memory.rolled_back) == (Cause.CORRUPTION, 0)
            assert len(memory.fault.devices) == 1
            assert update.fault.cause is Cause.CORRUPTION and len(update.fault.devices) == 2
            # Where it hits depends on how quickly it is delivered; the newest checkpoint before that is known to be sound.
            told = [entry.type for entry in rig.history]
            hits = [n for n, one in enumerate(rig.history) if one.type == "fault_carried_out" and "flipped" in one.message]
            hit = int(rig.history[hits[-1]].message.split()[-1])
            until = told.index("generation_closing", hits[-1])
            saved = [int(one.message.split()[3]) for one in rig.history[:until] if one.type == "checkpoint"]
            sound = max(step for step in saved if step < hit)
            words, _, restored = update.source.rpartition(" ")
            # One more may have been committed while the generation closed.
            assert words.endswith("from the checkpoint of step") and sound <= int(restored) < hit
            assert 0 <= update.rolled_back <= hit - sound
            assert told.count("quarantined") == 3 and told.count("released") == 3
            quarantine = await rig.store.quarantine()
            assert {one.device for one in quarantine} >= {*memory.fault.devices, *update.fault.devices}
            assert {one.standing for one in quarantine} == {Standing.RELEASED}
            assert largest_gap(rig.losses, spec, len(rig.losses)) <= 1e-5

    asyncio.run(scenario())
