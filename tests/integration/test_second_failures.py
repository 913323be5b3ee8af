"""Failures while the job is recovering from another one, in every phase of it, and a supervisor that dies in between."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from orchestrator.adapters.memory import MemoryStore
from orchestrator.domain.events import CancelRequested
from orchestrator.domain.faults import FaultKind, FaultRequested, Injected, Verdict
from orchestrator.domain.ids import Device, Term
from orchestrator.domain.job import JobRecord
from orchestrator.domain.layout import partners
from orchestrator.domain.plan import Plan
from orchestrator.domain.spec import JobSpec
from orchestrator.domain.state import Cancelled, Running
from orchestrator.ports import Commit
from tests.jobs import ENDLESS, a_job, largest_gap
from tests.rig import JOB, Rig, a_rig
from worker.progress import Phase

pytestmark = pytest.mark.timeout(180)

SECOND: dict[str, Phase | str] = {
    "settling": "before_report",
    "preparing": "",
    "forming": Phase.FORM,
    "transferring": "in_restore",
    "gathering": Phase.RESTORE,
    "first step": Phase.COMPUTE,
}
"""Where the second rank is killed: at a fault point, as soon as it is forked, or once its page shows this phase."""
APART = 3
"""Steps from when all is quiet to the next blow."""
LEAVE_S = 10.0
"""No survivor is killed for being slow to leave: that would be one failure more than the test is about."""


def test_a_second_rank_killed_in_any_phase_of_a_recovery_changes_nothing(tmp_path: Path) -> None:
    spec = a_patient_job()
    due = list(SECOND.items())

    async def scenario() -> None:
        async with a_rig(tmp_path) as rig:
            last, asked = 0, 0
            threads: list[threading.Thread] = []
            struck: list[str] = []

            async def disturb(step: int) -> None:
                nonlocal last, asked
                record = await rig.store.get(JOB)
                state, waits = record.state, waiting(record)
                is_over = is_quiet(record, asked - len(waits)) and not any(one.is_alive() for one in threads)
                if not isinstance(state, Running) or not is_over:
                    last = step  # one recovery at a time: what is asked for meanwhile is refused
                    return
                if step < last + APART:
                    return
                if waits:
                    # Its rank learned of it when that recovery had passed its point; by now it has.
                    last, asked = step, asked + 1
                    other = bystander(state.plan, waits[0].devices[0])
                    await rig.store.command(FaultRequested(fault=FaultKind.KILL, job=JOB, device=other))
                    return
                if not due:
                    await rig.store.command(CancelRequested(job=JOB))
                    return
                name, where = due.pop(0)
                last = step
                first = state.plan.devices[len(due) % state.plan.world_size]
                second = bystander(state.plan, first)
                if where and isinstance(where, str):
                    await rig.store.command(FaultRequested(fault=FaultKind.KILL, job=JOB, device=second, at=where, id=name))
                    asked += 1
                    struck.append(name)
                else:
                    victim = second if where else first
                    watch = threading.Thread(target=strike, args=(rig, victim, state.generation, where, name, struck))
                    watch.start()
                    threads.append(watch)
                await rig.store.command(FaultRequested(fault=FaultKind.KILL, job=JOB, device=first))
                asked += 1

            job = await rig.run(spec, disturb)
            for thread in threads:
                thread.join(10)
            assert isinstance(job.state, Cancelled), job.state
            assert sorted(struck) == sorted(SECOND), "each was there to be killed"
            assert sum(incident.rolled_back for incident in job.incidents) == 0
            assert largest_gap(rig.losses, spec, len(rig.losses)) <= 1e-5
            print("attempts", [incident.attempts for incident in job.incidents])

    asyncio.run(scenario())


def a_patient_job() -> JobSpec:
    spec = a_job(steps=ENDLESS)
    return replace(spec, recovery=replace(spec.recovery, leave_s=LEAVE_S))


def is_quiet(record: JobRecord, asked: int) -> bool:
    """It trains, and everything that was done to it is over: so many faults that were asked for, and what came of them."""
    judged = [one for one in record.injected if one.verdict is not Verdict.OPEN]
    return (
        isinstance(record.state, Running) and len(judged) == asked and all(i.pause_s is not None for i in record.incidents)
    )


def waiting(record: JobRecord) -> list[Injected]:
    """Faults at a point that nobody has come to since they were asked for."""
    return [one for one in record.injected if one.verdict is Verdict.OPEN and one.asked.at and one.carried_out_at is None]


def bystander(plan: Plan, first: Device) -> Device:
    """Somebody who holds no copy of what `first` holds."""
    mirror = partners(plan)
    kept = {first, mirror[first]} | {owner for owner, at in mirror.items() if at == first}
    return next(device for device in plan.devices if device not in kept)


def strike(rig: Rig, victim: Device, generation: int, phase: Phase | str, name: str, struck: list[str]) -> None:
    """Kill the process on a device when its page shows that phase of a later generation; "": when it is a new one.

    Or a later phase: on a loaded machine the few milliseconds of one may pass between two looks.
    """
    crew = lambda: rig.cluster._hosts[JOB, victim.node]._opened().crew  # noqa: E731
    old = crew().at[victim].pid
    deadline = time.monotonic() + 90.0
    while time.monotonic() < deadline:
        with contextlib.suppress(KeyError, ValueError):  # between two processes; a page that is closed
            seat = crew().at[victim]
            sight = seat.page.glance()
            if (seat.pid not in (0, old)) if phase == "" else (sight.generation > generation and sight.phase >= phase):
                os.kill(seat.pid, signal.SIGKILL)
                struck.append(name)
                return
        time.sleep(0.0003)


class Failing(MemoryStore):
    """Ends its supervisor right after a commit of a recovery, before anything of it is carried out."""

    rig: Rig
    left = 0
    """Commits until then; 0 for never."""

    async def commit(self, term: Term, commit: Commit) -> None:
        await super().commit(term, commit)
        is_recovering = any(one.pause_s is None for record in commit.jobs.values() for one in record.incidents[-1:])
        if self.left and is_recovering:
            self.left -= 1
            if not self.left:
                supervisor = self.rig.supervisor
                assert supervisor is not None
                supervisor.cancel()
                await asyncio.sleep(60)


def test_supervisor_that_dies_after_any_commit_of_a_recovery_is_succeeded(tmp_path: Path) -> None:
    recoveries = 4
    spec = a_patient_job()

    async def scenario() -> None:
        async with a_rig(tmp_path, num_devices=2) as rig:
            await rig.stop_supervisor()
            rig.store = store = Failing(time.time)
            store.rig = rig
            rig.start_supervisor()
            died_after: list[int] = []
            pids: list[dict[Device, int]] = []

            async def follow() -> None:
                while True:
                    task = rig.supervisor
                    assert task is not None
                    await asyncio.wait([task])
                    died_after.append(len(pids))
                    rig.start_supervisor(f"number-{len(died_after) + 1}")

            last = 0

            async def disturb(step: int) -> None:
                nonlocal last
                record = await store.get(JOB)
                if not is_quiet(record, len(pids)):
                    last = step
                elif step < last + APART:
                    return
                elif len(pids) == recoveries:
                    await store.command(CancelRequested(job=JOB))
                else:
                    last = step
                    pids.append(dict(record.pids))
                    store.left = len(pids)  # the first recovery's first commit, the second one's second, ...
                    await rig.kill_rank(len(pids) % 4)

            keeper = asyncio.create_task(follow())
            job = await rig.run(spec, disturb)
            keeper.cancel()
            print("the supervisor died after commits", died_after)
            assert isinstance(job.state, Cancelled), job.state
            # How many commits a recovery has depends on what becomes known together: never fewer than closing and settling.
            assert {1, 2} <= set(died_after)
            assert sum(incident.rolled_back for incident in job.incidents) == 0
            assert [incident.attempts for incident in job.incidents] == [1] * recoveries
            for before, after in pairwise(pids):
                assert sum(before[device] == after[device] for device in before) == 3, "survivors keep their processes"
            assert largest_gap(rig.losses, spec, len(rig.losses)) <= 1e-5

    asyncio.run(scenario())
