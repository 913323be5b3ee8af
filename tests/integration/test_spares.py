"""A lost node's place is taken by real processes that stood by: forked, built, and given only a role and its state."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.domain.job import Cause, Running, Succeeded
from orchestrator.domain.rungs import Rung
from orchestrator.domain.spec import ParallelSpec
from tests.jobs import a_job, largest_gap
from tests.rig import JOB, a_rig

pytestmark = pytest.mark.timeout(240)


def test_two_lost_nodes_in_turn_are_replaced_by_spares_and_the_curve_is_the_same(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with a_rig(tmp_path, num_nodes=3, num_devices=1) as rig:
            spec = a_job(steps=150)
            spec = replace(spec, parallel=ParallelSpec(tp=1, pp=1, dp=2), recovery=replace(spec.recovery, spares=1))
            stood_by: list[set[int]] = []

            async def disturb(step: int) -> None:
                record = await rig.store.get(JOB)
                is_ready = any(spare.is_ready for spare in record.spares.values())
                if not isinstance(record.state, Running) or not is_ready or len(stood_by) == 2:
                    return
                if len(record.incidents) == len(stood_by):
                    spares = {device for spare in record.spares.values() for device in spare.devices}
                    stood_by.append({record.pids[device] for device in spares})
                    await rig.cluster.kill(record.state.plan.seats[0].device.node)
                    await rig.cluster.add("A100", 1)

            job = await rig.run(spec, disturb)
            assert isinstance(job.state, Succeeded), job.state
            assert [incident.rung for incident in job.incidents] == [Rung.SPARE, Rung.SPARE], job.incidents
            assert {incident.fault.cause for incident in job.incidents} == {Cause.NODE_LOST}
            assert sum(incident.rolled_back for incident in job.incidents) == 0
            assert largest_gap(rig.losses, spec) <= 1e-4
            for incident in job.incidents:
                print(incident.pause_s, incident.predicted_pause_s, dict(incident.phases))
            ready = [entry.message for entry in rig.history if entry.type == "spare_ready"]
            assert len(ready) == 3 and all(pids for pids in stood_by)

    asyncio.run(scenario())
