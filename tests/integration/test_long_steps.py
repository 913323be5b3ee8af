"""A step that takes far longer than a rank may take to leave: whoever computes leaves between two micro-batches."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.domain.events import CancelRequested
from orchestrator.domain.failure import Cause
from orchestrator.domain.faults import FaultKind, FaultRequested
from orchestrator.domain.spec import CheckpointSpec, ParallelSpec, RecoverySpec
from orchestrator.domain.state import Cancelled
from tests.jobs import ENDLESS, a_job
from tests.rig import JOB, a_rig

pytestmark = pytest.mark.timeout(240)
LAYER_S = 0.03
"""Twelve micro-batches of six layers take a rank over two seconds; one of them, a fifth of one."""


def test_a_survivor_in_the_middle_of_a_long_step_leaves_with_what_it_holds(tmp_path: Path) -> None:
    """With one stage alone it asks nothing of others until all of the step is computed."""
    spec = a_job(steps=ENDLESS, micro_batches=24, emulated_layer_s=LAYER_S)
    spec = replace(
        spec,
        parallel=ParallelSpec(tp=1, pp=1, dp=2),
        checkpoint=CheckpointSpec(every=0),
        recovery=RecoverySpec(),
    )
    asked = [FaultRequested(fault=FaultKind.KILL, job=JOB, rank=1, at="in_compute")]

    async def scenario() -> None:
        async with a_rig(tmp_path, num_devices=1) as rig:

            async def disturb(step: int) -> None:
                if step >= 2 and asked:
                    await rig.store.command(asked.pop())
                elif any(entry.type == "recovered" for entry in rig.history):
                    await rig.store.command(CancelRequested(job=JOB))

            job = await rig.run(spec, disturb)
            assert isinstance(job.state, Cancelled), job.state
            (incident,) = (one for one in job.incidents if one.fault.cause is Cause.RANK_LOST)
            assert incident.rolled_back == 0 and incident.moved_elements > 0, "the survivor's memory is all there is"

    asyncio.run(scenario())
