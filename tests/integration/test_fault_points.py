"""At every named point of a step, of leaving and of restoring a rank is killed for real: the job recovers each time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.domain.faults import IN_THE_NEXT_PROCESS, POINTS, FaultKind, FaultRequested, Verdict
from orchestrator.domain.ids import Device, Step
from orchestrator.domain.job import Running, Succeeded
from orchestrator.domain.layout import partners
from orchestrator.domain.plan import Plan
from orchestrator.domain.spec import CheckpointSpec
from tests.jobs import a_job, largest_gap
from tests.rig import JOB, a_rig

pytestmark = pytest.mark.timeout(180)
FIRST, APART = 4, 4
"""Steps: of the first kill, and from one to the next at least."""


def test_a_rank_killed_at_each_point_changes_nothing(tmp_path: Path) -> None:
    # A snapshot every other step, so that points around one are reached as soon as others.
    spec = replace(a_job(steps=FIRST + APART * (len(POINTS) + 2)), checkpoint=CheckpointSpec(every=2))
    due = [(FIRST + APART * number, point) for number, point in enumerate(POINTS)]

    async def scenario() -> None:
        async with a_rig(tmp_path) as rig:

            async def disturb(step: int) -> None:
                state = (await rig.store.get(JOB)).state
                if not due or step < due[0][0] or not isinstance(state, Running):
                    return
                _, point = due.pop(0)
                if due:
                    due[0] = (max(due[0][0], step + APART), due[0][1])
                for fault in faults_for(point, state.plan, state.plan.devices[len(due) % state.plan.world_size]):
                    await rig.store.command(fault)

            job = await rig.run(spec, disturb)
            assert isinstance(job.state, Succeeded), job.state
            fired = {one.id: one for one in job.injected if one.asked.at}
            assert set(fired) == set(POINTS)
            for point, one in fired.items():
                assert one.message.startswith(f"killed at {point} of step "), one
                assert one.verdict is Verdict.RECOVERED, one
                # Said by its page, which its host read after its death.
                assert f"was killed at fault point {point} of step {one.step}" in one.seen, one
            assert sum(incident.rolled_back for incident in job.incidents) == 0
            assert largest_gap(rig.losses, spec) <= 1e-5

    asyncio.run(scenario())


def faults_for(point: str, plan: Plan, victim: Device) -> Iterator[FaultRequested]:
    """The kill at the point; and before it has a chance to be reached in a recovery, something to recover from."""
    yield FaultRequested(fault=FaultKind.KILL, job=JOB, device=victim, at=point, step=Step(0), id=point)
    if point in IN_THE_NEXT_PROCESS:
        yield FaultRequested(fault=FaultKind.KILL, job=JOB, device=victim)
    elif point == "before_report":
        mirror = partners(plan)
        kept = {victim, mirror[victim]} | {owner for owner, at in mirror.items() if at == victim}
        other = next(device for device in plan.devices if device not in kept)
        yield FaultRequested(fault=FaultKind.KILL, job=JOB, device=other)
