"""At every named point of a step, of leaving and of restoring a rank is killed for real: the job recovers each time."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.domain.events import CancelRequested
from orchestrator.domain.faults import IN_THE_NEXT_PROCESS, POINTS, FaultKind, FaultRequested, Verdict
from orchestrator.domain.ids import Device, Step
from orchestrator.domain.layout import partners
from orchestrator.domain.plan import Plan
from orchestrator.domain.spec import CheckpointSpec, EvaluationSpec, JobSpec
from orchestrator.domain.state import Cancelled, Running, Succeeded
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

            async def ask(fault: FaultRequested) -> None:
                nonlocal num_asked
                num_asked += 1
                await rig.store.command(fault)

            async def disturb(step: int) -> None:
                nonlocal due
                record = await rig.store.get(JOB)
                state, still = record.state, [one for one in record.injected if one.verdict is Verdict.OPEN]
                is_hit = any(one.carried_out_at is not None or not one.asked.at for one in still)
                if len(record.injected) < num_asked or is_hit or not isinstance(state, Running):
                    due = step + APART  # one recovery at a time: what is asked for meanwhile is refused
                elif step < due:
                    return
                elif still:
                    # Its rank learned of it when that recovery had passed its point; by now it has.
                    (waits,) = still
                    if (other := something_to_recover_from(waits.asked.at, state.plan, waits.devices[0])) is not None:
                        await ask(other)
                elif points:
                    victim, point = state.plan.devices[len(points) % state.plan.world_size], points.pop(0)
                    await ask(FaultRequested(fault=FaultKind.KILL, job=JOB, device=victim, at=point, id=point))
                    if (other := something_to_recover_from(point, state.plan, victim)) is not None:
                        await ask(other)
                else:
                    await rig.store.command(CancelRequested(job=JOB))

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
    steps = 13
    # Steps of half a second: the fault is armed long before the last one.
    paced = a_job(steps, emulated_layer_s=0.05)
    spec = replace(paced, checkpoint=CheckpointSpec(every=0), evaluation=EvaluationSpec(every=6, micro_batches=5))

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
            assert found.keys() == wanted.keys() == {6, 12, 13}
            assert all(found[step] == pytest.approx(loss, rel=1e-5) for step, loss in wanted.items())

    asyncio.run(scenario())


def evaluations(spec: JobSpec) -> dict[int, float | None]:
    """Of an undisturbed single process, by step."""
    found: dict[int, float | None] = {}
    unpaced = replace(spec, train=replace(spec.train, emulated_layer_s=0.0))
    run(unpaced, evaluated=lambda one: found.update({one.step: one.loss}))
    return found


def something_to_recover_from(point: str, plan: Plan, victim: Device) -> FaultRequested | None:
    """What a point needs that is only reached in a recovery."""
    if point in IN_THE_NEXT_PROCESS:
        return FaultRequested(fault=FaultKind.KILL, job=JOB, device=victim)
    if point in ("before_report", "after_report"):
        mirror = partners(plan)
        kept = {victim, mirror[victim]} | {owner for owner, at in mirror.items() if at == victim}
        other = next(device for device in plan.devices if device not in kept)
        return FaultRequested(fault=FaultKind.KILL, job=JOB, device=other)
    return None
