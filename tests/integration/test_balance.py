"""A real rank becomes slow while it trains: it is given fewer micro-batches, and the curve is the same to the bit."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.domain.events import CancelRequested
from orchestrator.domain.faults import FaultKind, FaultRequested
from orchestrator.domain.ids import Rank
from orchestrator.domain.job import Cancelled, Cause, Running
from orchestrator.domain.spec import ParallelSpec
from tests.jobs import ENDLESS, a_job, largest_gap
from tests.rig import JOB, a_rig

pytestmark = pytest.mark.timeout(180)


def test_a_slow_rank_gets_fewer_micro_batches_and_no_step_is_lost(tmp_path: Path) -> None:
    """Computing is paced, so that a step takes as long as its devices would, however busy this machine is."""
    spec = a_job(steps=ENDLESS, micro_batches=12, micro_batch_size=1, emulated_layer_s=0.01, exact=True)
    spec = replace(spec, parallel=ParallelSpec(tp=1, pp=1), checkpoint=replace(spec.checkpoint, every=0))

    async def scenario() -> None:
        async with a_rig(tmp_path, num_nodes=2, num_devices=1) as rig:
            changed_at = 0

            async def follow(step: int) -> None:
                nonlocal changed_at
                job = await rig.store.get(JOB)
                if step == 8:
                    slow = FaultRequested(fault=FaultKind.SLOW, job=JOB, rank=Rank(1), factor=2.5, duration_s=600.0)
                    await rig.store.command(slow)
                if not changed_at and isinstance(job.state, Running) and len(_shares(job.state)) > 1:
                    changed_at = step
                if changed_at and step >= changed_at + 3 and isinstance(job.state, Running):
                    assert min(_shares(job.state)) == _shares(job.state)[-1]
                    await rig.store.command(CancelRequested(job=JOB))

            job = await rig.run(spec, follow)
            assert isinstance(job.state, Cancelled)
            changes = [one for one in job.incidents if one.fault.cause is Cause.BALANCE]
            assert changes and not job.failures and sum(one.rolled_back for one in job.incidents) == 0
            assert "micro-batches instead of 6" in changes[0].fault.message
            assert largest_gap(rig.losses, spec, len(rig.losses)) == 0.0

    asyncio.run(scenario())


def _shares(state: Running) -> list[int]:
    """Numbers of micro-batches that pipelines take, the first pipeline's first, without repeats."""
    return list(dict.fromkeys(len(pipeline.micro_batches) for pipeline in state.plan.pipelines))
