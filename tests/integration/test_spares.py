"""A lost node's place is taken by a real process that stood by: forked, built, and given only a role and its state."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.domain.events import CancelRequested
from orchestrator.domain.rungs import Rung
from orchestrator.domain.spec import CheckpointSpec, ParallelSpec
from orchestrator.domain.state import Cancelled, Running
from tests.jobs import a_job, largest_gap
from tests.rig import JOB, a_rig

pytestmark = pytest.mark.timeout(240)
STEPS_AFTER = 5
LAYER_S = 0.003
"""Steps are paced: rounding has not grown beyond the tolerance when the spare is ready, however fast the machine."""


def test_a_lost_node_is_replaced_by_the_spare_and_the_curve_is_the_same(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with a_rig(tmp_path, num_nodes=3, num_devices=1) as rig:
            spec = a_job(steps=100_000, emulated_layer_s=LAYER_S)
            spec = replace(
                spec,
                parallel=ParallelSpec(tp=1, pp=1, dp=2),
                checkpoint=CheckpointSpec(every=0),
                recovery=replace(spec.recovery, spares=1),
            )
            spare_pids: list[int] = []
            killed_at = 0

            async def disturb(step: int) -> None:
                nonlocal killed_at
                record = await rig.store.get(JOB)
                if not isinstance(record.state, Running):
                    return
                if not spare_pids and any(spare.is_ready for spare in record.spares.values()):
                    (spare,) = record.spares.values()
                    spare_pids.extend(record.pids[device] for device in spare.devices)
                    killed_at = step
                    await rig.cluster.kill(record.state.plan.seats[0].device.node)
                elif record.incidents and record.incidents[0].pause_s is not None and step > killed_at + STEPS_AFTER:
                    assert set(spare_pids) <= set(record.pids.values()), "the very processes that stood by"
                    await rig.store.command(CancelRequested(job=JOB))

            job = await rig.run(spec, disturb)
            assert isinstance(job.state, Cancelled), job.state
            (incident,) = job.incidents
            print(incident.pause_s, incident.predicted_pause_s, dict(incident.phases))
            assert incident.rung is Rung.SPARE and incident.rolled_back == 0 and incident.source.count("living ranks")
            assert "prepare" in incident.predicted and incident.options[0].rung is Rung.SPARE
            assert largest_gap(rig.losses, spec, len(rig.losses)) <= 1e-4
            assert "spare_ready" in [entry.type for entry in rig.history]

    asyncio.run(scenario())
