"""At every named point of a step, of leaving and of restoring a rank is killed for real: the job recovers each time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.domain.events import CancelRequested
from orchestrator.domain.faults import IN_THE_NEXT_PROCESS, POINTS, FaultKind, FaultRequested, Verdict
from orchestrator.domain.ids import Device, Step
from orchestrator.domain.job import Cancelled, Running, Succeeded
from orchestrator.domain.layout import partners
from orchestrator.domain.plan import Plan
from orchestrator.domain.spec import CheckpointSpec, EvaluationSpec, JobSpec
from tests.jobs import ENDLESS, a_job, largest_gap
from tests.rig import JOB, a_rig
from worker.reference import run

pytestmark = pytest.mark.timeout(180)
APART = 2
"""Steps from the start, or the one in which a kill was judged, to the next kill at least."""


def test_a_rank_killed_at_each_point_changes_nothing(tmp_path: Path) -> None:
    # A snapshot every other step, so that points around one are reached as soon as others.
    spec = replace(a_job(steps=ENDLESS), checkpoint=CheckpointSpec(every=2), evaluation=EvaluationSpec(every=2))
    points = list(POINTS)
    num_asked, due = 0, APART

    async def scenario() -> None:
        async with a_rig(tmp_path) as rig:

            async def disturb(step: int) -> None:
                nonlocal num_asked, due
                record = await rig.store.get(JOB)
                state, judged = record.state, [one for one in record.injected if one.verdict is not Verdict.OPEN]
                if len(judged) < num_asked or not isinstance(state, Running):
                    due = step + APART  # one recovery at a time: what is asked for meanwhile is refused
                elif step >= due and not points:
                    await rig.store.command(CancelRequested(job=JOB))
                elif step >= due:
                    victim = state.plan.devices[len(points) % state.plan.world_size]
                    for fault in faults_for(points.pop(0), state.plan, victim):
                        num_asked += 1
                        await rig.store.command(fault)

            job = await rig.run(spec, disturb)
            assert isinstance(job.state, Cancelled), job.state
            fired = {one.id: one for one in job.injected if one.asked.at}
            assert set(fired) == set(POINTS)
            for point, one in fired.items():
                assert one.message.startswith(f"killed at {point} of step "), one
                assert one.verdict is Verdict.RECOVERED, one
                # Said by its page, which its host read after its death.
                assert f"was killed at fault point {point} of step {one.step}" in one.seen, one
            assert sum(incident.rolled_back for incident in job.incidents) == 0
            assert largest_gap(rig.losses, spec, len(rig.losses)) <= 1e-5

    asyncio.run(scenario())


def test_a_rank_killed_while_the_final_state_is_evaluated(tmp_path: Path) -> None:
    """No vote follows that could tell of it: the next generation evaluates what this one has left."""
    steps = 7
    spec = replace(a_job(steps), checkpoint=CheckpointSpec(every=0), evaluation=EvaluationSpec(every=3, micro_batches=5))

    async def scenario() -> None:
        async with a_rig(tmp_path) as rig:

            async def disturb(step: int) -> None:
                if step == 1:
                    state = (await rig.store.get(JOB)).state
                    assert isinstance(state, Running)
                    device = state.plan.devices[0]
                    kill = FaultRequested(
                        fault=FaultKind.KILL, job=JOB, device=device, at="in_evaluation", step=Step(steps)
                    )
                    await rig.store.command(kill)

            job = await rig.run(spec, disturb)
            assert isinstance(job.state, Succeeded), job.state
            assert [one.verdict for one in job.injected] == [Verdict.RECOVERED]
            assert f"in_evaluation of step {steps}" in job.injected[0].message
            assert largest_gap(rig.losses, spec) <= 1e-5
            found = {one.data["evaluated"]: one.data["loss"] for one in rig.history if one.type == "evaluated"}
            wanted = evaluations(spec)
            assert found.keys() == wanted.keys() == {3, 6, 7}
            assert all(found[step] == pytest.approx(loss, rel=1e-5) for step, loss in wanted.items())

    asyncio.run(scenario())


def evaluations(spec: JobSpec) -> dict[int, float | None]:
    """Of an undisturbed single process, by step."""
    found: dict[int, float | None] = {}
    run(spec, evaluated=lambda one: found.update({one.step: one.loss}))
    return found


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
