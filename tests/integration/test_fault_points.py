"""At every named point of a step, of leaving and of restoring a rank is killed for real: the job recovers each time."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.domain.events import CancelRequested
from orchestrator.domain.faults import IN_THE_NEXT_PROCESS, POINTS, FaultKind, FaultRequested, Verdict
from orchestrator.domain.ids import Device
from orchestrator.domain.job import Cancelled, Running
from orchestrator.domain.layout import partners
from orchestrator.domain.plan import Plan
from orchestrator.domain.spec import CheckpointSpec
from tests.jobs import ENDLESS, a_job, largest_gap
from tests.rig import JOB, a_rig

pytestmark = pytest.mark.timeout(180)
APART = 2
"""Steps from the start, or the one in which a kill was judged, to the next kill at least."""


def test_a_rank_killed_at_each_point_changes_nothing(tmp_path: Path) -> None:
    # A snapshot every other step, so that points around one are reached as soon as others.
    spec = replace(a_job(steps=ENDLESS), checkpoint=CheckpointSpec(every=2))
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


def something_to_recover_from(point: str, plan: Plan, victim: Device) -> FaultRequested | None:
    """What a point needs that is only reached in a recovery."""
    if point in IN_THE_NEXT_PROCESS:
        return FaultRequested(fault=FaultKind.KILL, job=JOB, device=victim)
    if point == "before_report":
        mirror = partners(plan)
        kept = {victim, mirror[victim]} | {owner for owner, at in mirror.items() if at == victim}
        other = next(device for device in plan.devices if device not in kept)
        return FaultRequested(fault=FaultKind.KILL, job=JOB, device=other)
    return None
