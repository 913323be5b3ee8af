"""Failures while the job is recovering from another one, in every phase of it, and a supervisor that dies in between."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest

from orchestrator.adapters.memory import MemoryStore
from orchestrator.domain.faults import FaultKind, FaultRequested
from orchestrator.domain.ids import Device, Term
from orchestrator.domain.job import Reforming, Running, Succeeded
from orchestrator.domain.layout import partners
from orchestrator.domain.plan import Plan
from orchestrator.ports import Commit
from tests.jobs import a_job, largest_gap
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
"""Where the second rank is killed: at a fault point, as soon as it is forked, or when its page shows this phase."""
APART = 5


def test_a_second_rank_killed_in_any_phase_of_a_recovery_changes_nothing(tmp_path: Path) -> None:
    spec = a_job(steps=APART * (len(SECOND) + 1) + 2)
    due = list(SECOND.items())

    async def scenario() -> None:
        async with a_rig(tmp_path) as rig:
            last = 0
            threads: list[threading.Thread] = []
            struck: list[str] = []

            async def disturb(step: int) -> None:
                nonlocal last
                state = (await rig.store.get(JOB)).state
                if not due or step < last + APART or not isinstance(state, Running):
                    return
                last = step
                name, where = due.pop(0)
                first = state.plan.devices[len(due) % state.plan.world_size]
                second = bystander(state.plan, first)
                if where and isinstance(where, str):
                    await rig.store.command(FaultRequested(fault=FaultKind.KILL, job=JOB, device=second, at=where, id=name))
                    struck.append(name)
                else:
                    victim = second if where else first
                    watch = threading.Thread(target=strike, args=(rig, victim, state.generation, where, name, struck))
                    watch.start()
                    threads.append(watch)
                await rig.store.command(FaultRequested(fault=FaultKind.KILL, job=JOB, device=first))

            job = await rig.run(spec, disturb)
            for thread in threads:
                thread.join(10)
            assert isinstance(job.state, Succeeded), job.state
            assert sorted(struck) == sorted(SECOND), "each was there to be killed"
            assert sum(incident.rolled_back for incident in job.incidents) == 0
            assert largest_gap(rig.losses, spec) <= 1e-5
            print("attempts", [incident.attempts for incident in job.incidents])

    asyncio.run(scenario())


def bystander(plan: Plan, first: Device) -> Device:
    """Somebody who holds no copy of what `first` holds."""
    mirror = partners(plan)
    kept = {first, mirror[first]} | {owner for owner, at in mirror.items() if at == first}
    return next(device for device in plan.devices if device not in kept)


def strike(rig: Rig, victim: Device, generation: int, phase: Phase | str, name: str, struck: list[str]) -> None:
    """Kill the process on a device when its page shows that phase of a later generation; "": when it is a new one."""
    crew = lambda: rig.cluster._hosts[JOB, victim.node]._crew  # noqa: E731
    old = crew().at[victim].pid
    deadline = time.monotonic() + 20.0
    while time.monotonic() < deadline:
        with contextlib.suppress(KeyError, ValueError):  # between two processes; a page that is closed
            seat = crew().at[victim]
            sight = seat.page.look()
            if (seat.pid not in (0, old)) if phase == "" else (sight.generation > generation and sight.phase == phase):
                os.kill(seat.pid, signal.SIGKILL)
                struck.append(name)
                return
        time.sleep(0.0003)


class Failing(MemoryStore):
    """Ends its supervisor right after a commit of a recovery, before anything of it is carried out."""

    rig: Rig
    left = 0

    async def commit(self, term: Term, commit: Commit) -> None:
        await super().commit(term, commit)
        if self.left and any(isinstance(record.state, Reforming) for record in commit.jobs.values()):
            self.left -= 1
            if not self.left:
                supervisor = self.rig.supervisor
                assert supervisor is not None
                supervisor.cancel()
                await asyncio.sleep(60)


def test_supervisor_that_dies_between_any_two_commits_of_a_recovery_is_succeeded(tmp_path: Path) -> None:
    points = 4
    spec = a_job(steps=APART * (points + 1))

    async def scenario() -> None:
        async with a_rig(tmp_path, num_nodes=2) as rig:
            await rig.stop_supervisor()
            rig.store = store = Failing(time.time)
            store.rig = rig
            rig.start_supervisor()
            supervisors = 1
            pids: list[dict[Device, int]] = []

            async def follow() -> None:
                nonlocal supervisors
                while True:
                    task = rig.supervisor
                    assert task is not None
                    await asyncio.wait([task])
                    supervisors += 1
                    rig.start_supervisor(f"number-{supervisors}")

            async def disturb(step: int) -> None:
                if step % APART == 0 and step <= APART * points:
                    pids.append(dict((await store.get(JOB)).pids))
                    store.left = step // APART
                    await rig.kill_rank(step // APART % 4)

            keeper = asyncio.create_task(follow())
            job = await rig.run(spec, disturb)
            keeper.cancel()
            assert isinstance(job.state, Succeeded), job.state
            assert supervisors > points, "one more after each death"
            assert sum(incident.rolled_back for incident in job.incidents) == 0
            assert [incident.attempts for incident in job.incidents] == [1] * points
            for before, after in pairwise(pids):
                assert sum(before[device] == after[device] for device in before) == 3, "survivors keep their processes"
            assert largest_gap(rig.losses, spec) <= 1e-5

    asyncio.run(scenario())
