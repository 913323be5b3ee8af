"""A job is made smaller, its node is drained and taken away, and it grows again, while its real ranks train."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.domain.cluster import NodeStatus
from orchestrator.domain.events import CancelRequested, CordonRequested, PauseRequested, ResizeRequested, ResumeRequested
from orchestrator.domain.ids import NodeId
from orchestrator.domain.job import JobRecord
from orchestrator.domain.size import Size
from orchestrator.domain.spec import ParallelSpec
from orchestrator.domain.state import Cancelled, Paused, Running
from tests.jobs import ENDLESS, a_job, largest_gap
from tests.rig import JOB, a_rig

pytestmark = pytest.mark.timeout(240)


def test_resizes_a_drain_and_a_pause_cost_no_step_and_leave_the_curve_as_it_was(tmp_path: Path) -> None:
    spec = replace(a_job(steps=ENDLESS, learning_rate=1e-3), parallel=ParallelSpec(tp=1, pp=1))

    async def scenario() -> None:
        async with a_rig(tmp_path, num_nodes=3, num_devices=1) as rig:
            left: list[NodeId] = []

            def size_is(size: int) -> Callable[[JobRecord], bool]:
                return lambda now: isinstance(now.state, Running) and now.state.plan.world_size == size

            def is_off(now: JobRecord) -> bool:
                return isinstance(now.state, Running) and left[0] not in {*now.state.plan.nodes, *now.hosts}

            async def resize(target: int) -> None:
                await rig.store.command(ResizeRequested(job=JOB, size=Size(target=target)))

            async def drain() -> None:
                state = (await rig.store.get(JOB)).state
                assert isinstance(state, Running)
                left.append(state.plan.nodes[0])
                await rig.store.command(CordonRequested(node=left[0], drain=True, remove=True))

            async def pause_and_resume() -> None:
                await rig.store.command(PauseRequested(job=JOB))
                while not isinstance((await rig.store.get(JOB)).state, Paused):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
                now = await rig.store.get(JOB)
                assert not now.hosts and now.checkpoint is not None and now.checkpoint.step == now.committed
                await rig.store.command(ResumeRequested(job=JOB))

            async def cancel() -> None:
                """Once the drained node has been taken away, which the job does not wait for."""
                gone = (left[0], NodeStatus.LOST)
                while gone not in {(one.id, one.status) for one in await rig.cluster.nodes()}:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
                await rig.store.command(CancelRequested(job=JOB))

            # Each is asked for two steps after what came before has come true.
            script = [
                (size_is(3), lambda: resize(1)),
                (size_is(1), lambda: resize(2)),
                (size_is(2), drain),
                (is_off, pause_and_resume),
                (size_is(2), lambda: resize(0)),
                (size_is(2), cancel),
            ]
            seen = 0

            async def follow(_: int) -> None:
                nonlocal seen
                seen = seen + 1 if script and script[0][0](await rig.store.get(JOB)) else 0
                if seen == 2:
                    seen = 0
                    await script.pop(0)[1]()

            job = await rig.run(spec, follow)
            assert isinstance(job.state, Cancelled) and not script
            assert sum(one.rolled_back for one in job.incidents) == 0
            resizes = [one for one in job.incidents if one.fault.cause in ("grow", "shrink")]
            assert len(resizes) >= 3 and not job.failures
            assert largest_gap(rig.losses, spec, len(rig.losses)) <= 1e-5

    asyncio.run(scenario())
