"""A job takes new devices in while it trains: the copy over a slow link costs no step, and whoever dies in it neither."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from orchestrator.adapters.local_hosts import LocalHosts
from orchestrator.domain.cluster import Node
from orchestrator.domain.errors import NotFound
from orchestrator.domain.events import CancelRequested
from orchestrator.domain.failure import Cause
from orchestrator.domain.ids import NodeId
from orchestrator.domain.job import JobRecord
from orchestrator.domain.spec import JobSpec, ParallelSpec
from tests.jobs import a_job
from tests.rig import JOB, Rig
from worker.reference import run

pytestmark = pytest.mark.timeout(240)

COPY_MB_S = 0.16
"""Of a newcomer's 0.5 MB: more than three seconds, and half as much again as the gradients of a step take."""


def a_slow_job() -> JobSpec:
    """Steps of a second or more, however fast the machine."""
    spec = a_job(steps=2000, micro_batches=4, micro_batch_size=1, sequence=16)
    return replace(
        spec,
        program="tests.slow_model:PROGRAM",
        model={"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "ffn": 64},
        parallel=ParallelSpec(tp=1, pp=1),
        checkpoint=replace(spec.checkpoint, every=0),
        # A survivor may be napping, which nothing interrupts, and is not to be killed for that.
        recovery=replace(spec.recovery, copy_mb_s=COPY_MB_S, leave_s=5.0),
    )


class Growing(Rig):
    """One device a node. When each event was recorded."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.cluster = LocalHosts(
            tuple(Node(id=NodeId(f"n{i}"), kind="A100", num_devices=1) for i in range(self.num_nodes))
        )

    def when(self, kind: str) -> list[float]:
        return [entry.at for entry in self.history if entry.type == kind]

    async def until_grown(self, spec: JobSpec, on_step: Callable[[int], Awaitable[object]]) -> JobRecord:
        """The job as it was some steps after it had grown; its curve is checked up to there."""
        found: list[JobRecord] = []

        async def watch(step: int) -> None:
            await on_step(step)
            record = await self.store.get(JOB)
            done = [one for one in record.incidents if one.fault.cause is Cause.GROW and one.pause_s is not None]
            if done and record.committed > done[0].committed and not found:
                found.append(record)
                await self.store.command(CancelRequested(job=JOB))

        self.start_supervisor()
        try:
            await self.run(spec, watch)
        finally:
            await self.stop_supervisor()
            await self.cluster.close()
        wanted = run(replace(spec, program="causal_lm"), len(self.losses))
        assert sorted(self.losses) == [answer.step for answer in wanted]
        assert [self.losses[answer.step] for answer in wanted] == pytest.approx([a.loss for a in wanted], rel=1e-5)
        return found[0]


def test_job_trains_on_while_a_newcomer_receives_over_a_slow_link_and_pauses_for_much_less(tmp_path: Path) -> None:
    async def scenario() -> None:
        rig = Growing(tmp_path, 1, 1)

        async def disturb(step: int) -> None:
            if step == 2:
                await rig.cluster.add("A100", 1)

        job = await rig.until_grown(a_slow_job(), disturb)
        (began, *_), (ended, *_) = rig.when("joining"), rig.when("joined")
        assert ended - began > 2.5, "the copy takes long"
        alone = rig.passed_at[2] - rig.passed_at[1]
        passed = [at for _, at in sorted(rig.passed_at.items()) if at < ended]
        # The one under way as it began is no sign of that. On a machine that stands still for a while one of both is left.
        goes_on = max(b - a for a, b in pairwise(passed)) < 2 * alone
        assert began < passed[-1] and (goes_on or sum(began < at for at in passed) >= 2), "steps go on meanwhile"
        (incident,) = job.incidents
        assert incident.fault.cause is Cause.GROW and incident.rolled_back == 0
        paused = sum(seconds for name, seconds in incident.phases.items() if name not in ("first_step", "detect"))
        print(f"copy {ended - began:.2f} s, pause {paused:.3f} s, {incident.pause_s}, phases {dict(incident.phases)}")
        assert paused < (ended - began) / 2
        assert incident.moved_elements < 34_976, "what the newcomer holds it has received before; members exchange the rest"

    asyncio.run(scenario())


def test_newcomer_and_then_its_source_killed_in_the_copy_cost_no_step(tmp_path: Path) -> None:
    async def scenario() -> None:
        rig = Growing(tmp_path, 2, 1)
        killed: list[str] = []

        async def disturb(step: int) -> None:
            if step == 2:
                await rig.cluster.add("A100", 1)

        async def kill() -> None:
            """While each of the first two copies is under way, which on a slow machine may take no longer than a step."""
            while len(killed) < 2:
                await asyncio.sleep(0.02)
                with contextlib.suppress(NotFound):
                    record = await rig.store.get(JOB)
                    if len(rig.when("joining")) > len(killed) and record.join is not None and record.join.begun:
                        move = record.join.moves[0]
                        victim = move.source if killed else move.target
                        killed.append(str(victim))
                        os.kill(record.pids[victim], signal.SIGKILL)

        killer = asyncio.create_task(kill())
        job = await rig.until_grown(a_slow_job(), disturb)
        killer.cancel()
        assert len(killed) == 2 and len(rig.when("joining_given_up")) == 1 and len(rig.when("joining")) == 3
        assert [incident.fault.cause for incident in job.incidents] == [Cause.RANK_LOST, Cause.GROW]
        assert sum(incident.rolled_back for incident in job.incidents) == 0

    asyncio.run(scenario())
