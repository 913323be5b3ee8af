"""Work by speed while a job trains: a rank that becomes slow is given fewer micro-batches, and devices of several kinds
that lose one of them are planned anew by what they were seen to take. The curve is the same to the bit.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.domain.events import CancelRequested
from orchestrator.domain.failure import Cause
from orchestrator.domain.faults import FaultKind, FaultRequested
from orchestrator.domain.ids import NodeId, Rank
from orchestrator.domain.plan import Plan
from orchestrator.domain.spec import ParallelSpec
from orchestrator.domain.state import Cancelled, Running
from tests.jobs import ENDLESS, a_job, largest_gap
from tests.rig import JOB, a_rig

pytestmark = pytest.mark.timeout(180)
LOST = NodeId("n3")


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


def test_a_job_on_mixed_kinds_that_loses_a_node_goes_on_by_measured_speeds(tmp_path: Path) -> None:
    """2 x A100, an H100 and a B200, which is lost. Nobody who is whole changes places; ids and the state's shares are as
    uneven as the devices.
    """
    spec = a_job(steps=ENDLESS, micro_batches=12, micro_batch_size=1, emulated_layer_s=0.02, exact="best_effort")
    spec = replace(spec, parallel=ParallelSpec(tp=1, pp=1), checkpoint=replace(spec.checkpoint, every=0))

    async def scenario() -> None:
        async with a_rig(tmp_path, num_nodes=4, num_devices=1, kinds=("A100", "A100", "H100", "B200")) as rig:
            before: Plan | None = None
            after: Plan | None = None
            lost_at = 0

            async def follow(step: int) -> None:
                nonlocal before, after, lost_at
                state = (await rig.store.get(JOB)).state
                # Steps are paced, so that by then each device has said several times how long it computes.
                if before is None and step >= 20 and isinstance(state, Running):
                    before, lost_at = state.plan, step
                    await rig.cluster.kill(LOST)
                elif before and not after and isinstance(state, Running) and LOST not in state.plan.nodes:
                    after, lost_at = state.plan, step
                elif after and step >= lost_at + 3:
                    await rig.store.command(CancelRequested(job=JOB))

            job = await rig.run(spec, follow)
            assert isinstance(job.state, Cancelled) and before and after
            assert ids_of(before) == {"n0": 1, "n1": 1, "n2": 3, "n3": 7}
            ids = ids_of(after)
            assert set(ids) == {"n0", "n1", "n2"} and sum(ids.values()) == 12 and ids["n2"] > ids["n0"] + ids["n1"]
            assert len({pipeline.stages[0].shares[0] for pipeline in before.pipelines}) == 3
            assert {one.stages for one in after.pipelines} < {one.stages for one in before.pipelines}
            assert "1 of 4 pipelines broke" in after.reason and "stage times are measured" in after.reason
            (incident,) = job.incidents
            assert incident.rolled_back == 0 and incident.moved_elements > 0
            # No more than that: on a busy machine the reference takes longer for a step than the job did, and until it is
            # cancelled it makes as many as it likes.
            compared = {step: loss for step, loss in rig.losses.items() if step <= lost_at + 3}
            assert largest_gap(compared, spec, lost_at + 3) == 0.0

    asyncio.run(scenario())


def ids_of(plan: Plan) -> dict[str, int]:
    """Micro-batches by node, of pipelines of one stage."""
    return {str(pipeline.stages[0].devices[0].node): len(pipeline.micro_batches) for pipeline in plan.pipelines}


def _shares(state: Running) -> list[int]:
    """Numbers of micro-batches that pipelines take, the first pipeline's first, without repeats."""
    return list(dict.fromkeys(len(pipeline.micro_batches) for pipeline in state.plan.pipelines))
