"""What a host tells its ranks and what becomes of those that do not obey; processes here are real and train nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

from orchestrator.domain.generation import RankReport
from orchestrator.domain.host_events import RankReported
from orchestrator.domain.ids import Device, Generation, JobId, NodeId, Step
from orchestrator.domain.origin import FromSeed
from orchestrator.domain.requests import CloseGeneration, FormGeneration, KillRank, OpenHost
from tests.builders import a_device, a_plan, a_profile, a_spec
from worker.local_job import LocalJob
from worker.mail import Channel, read_order
from worker.outbox import Outbox
from worker.page.writer import PageWriter
from worker.progress import Phase
from worker.seat import Seat, open_seat
from worker.watch import LOOK_S

ME = a_device(0)
LEAVE_S = 0.1
Scenario = Callable[[Path], Coroutine[Any, Any, None]]


def on_a_loop(scenario: Scenario) -> Callable[[Path], None]:
    @wraps(scenario)
    def run(tmp_path: Path) -> None:
        asyncio.run(scenario(tmp_path))

    return run


class Rank:
    """A process that sleeps, whatever it is told, and the rank's ends of what it shares with its host."""

    def __init__(self, folder: Path) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        self.seat, self.fds = open_seat(1, ME, Generation(1), "127.0.0.1", folder)
        self.seat.take(self.process.pid, os.pidfd_open(self.process.pid))
        self.seat.formed = Generation(1)
        self.page = PageWriter(self.fds[3])
        self.page.phase(Phase.COMPUTE, Generation(1), Step(4))

    def orders(self) -> list[object]:
        ours = Channel(socket.socket(fileno=os.dup(self.fds[0])))
        frames, _ = ours.receive()
        ours.close()
        return [read_order(kind, body) for kind, body in frames]

    async def ended(self) -> int:
        return await asyncio.to_thread(self.process.wait, 30)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.page.close()
        self.seat.close()
        for fd in self.fds:
            os.close(fd)


@asynccontextmanager
async def a_job(folder: Path) -> AsyncIterator[tuple[LocalJob, Rank]]:
    spec = a_spec()
    order = OpenHost(
        job=JobId("job"),
        node=ME.node,
        num_devices=1,
        spec=replace(spec, recovery=replace(spec.recovery, leave_s=LEAVE_S)),
        profile=a_profile(),
        checkpoint_dir=str(folder),
        log_dir=str(folder),
    )
    job = LocalJob(order, {}, "127.0.0.1", Outbox(), grace_s=60.0, end=lambda: None, forsaken=lambda: None)
    rank = Rank(folder)
    job.crew._seats[rank.seat.number] = job.crew._at[ME] = rank.seat
    try:
        yield job, rank
    finally:
        rank.close()


def form(generation: int, *devices: Device) -> FormGeneration:
    return FormGeneration(
        generation=Generation(generation),
        plan=a_plan(devices),
        addresses={},
        restore=FromSeed(),
        committed=Step(0),
    )


def reported(seat: Seat, generation: int) -> RankReported:
    report = RankReport(device=seat.device, generation=Generation(generation), voted=Step(0), answer=None, held=None)
    return RankReported(report=report)


@on_a_loop
async def test_who_does_not_leave_within_its_time_is_killed(tmp_path: Path) -> None:
    async with a_job(tmp_path) as (job, rank):
        job.close_generation(Generation(1))
        assert rank.orders() == [CloseGeneration(generation=Generation(1))]
        assert await rank.ended() == -signal.SIGKILL
        assert rank.seat.doomed == f"did not leave generation 1 within {LEAVE_S:g} s"


@on_a_loop
async def test_who_is_stopped_is_not_waited_for_any_longer(tmp_path: Path) -> None:
    async with a_job(tmp_path) as (job, rank):
        os.kill(rank.process.pid, signal.SIGSTOP)
        job.close_generation(Generation(1))
        assert await rank.ended() == -signal.SIGKILL


@on_a_loop
async def test_who_has_reported_is_left_alone_and_not_told_again(tmp_path: Path) -> None:
    async with a_job(tmp_path) as (job, rank):
        job.close_generation(Generation(1))
        job._take_in(rank.seat, reported(rank.seat, 1))
        job.close_generation(Generation(1))
        await asyncio.sleep(3 * LEAVE_S)
        assert rank.process.poll() is None and not rank.seat.doomed
        assert rank.orders() == [CloseGeneration(generation=Generation(1))]


@on_a_loop
async def test_a_process_that_was_made_for_a_later_generation_owes_no_report(tmp_path: Path) -> None:
    async with a_job(tmp_path) as (job, rank):
        rank.seat.born = Generation(2)
        job.close_generation(Generation(1))
        assert rank.orders() == []


@on_a_loop
async def test_a_form_that_its_close_has_overtaken_is_nothing_and_an_older_one_neither(tmp_path: Path) -> None:
    async with a_job(tmp_path) as (job, rank):
        job.close_generation(Generation(3))
        job._take_in(rank.seat, reported(rank.seat, 3))
        rank.orders()
        job.form(form(3, ME))
        assert rank.seat.formed == 1 and rank.orders() == []
        job.form(form(5, ME))
        job.form(form(4, ME))
        assert rank.seat.formed == 5 and [order.generation for order in rank.orders()] == [5]  # type: ignore[attr-defined]


@on_a_loop
async def test_a_form_for_the_process_that_was_there_before_is_not_its_successors(tmp_path: Path) -> None:
    """What is planned to come from that one's memory, this one does not hold (seed 30408)."""
    async with a_job(tmp_path) as (job, rank):
        job.form(replace(form(2, ME), addresses={ME: "127.0.0.1:1"}))
        assert rank.orders() == [] and rank.seat.formed == 1
        job.form(replace(form(3, ME), addresses={ME: rank.seat.address}))
        assert [order.generation for order in rank.orders() if isinstance(order, FormGeneration)] == [3]


@on_a_loop
async def test_who_has_no_part_in_the_next_generation_ends(tmp_path: Path) -> None:
    async with a_job(tmp_path) as (job, rank):
        job.form(form(2, a_device(1)))
        assert await rank.ended() == -signal.SIGKILL and "no part in generation 2" in rank.seat.doomed


@on_a_loop
async def test_a_kill_that_is_late_hits_nobody(tmp_path: Path) -> None:
    """It was meant for an earlier process on that device, or for one that had not moved."""
    async with a_job(tmp_path) as (job, rank):
        job.rounds.formed(Generation(1), (ME,))
        mark = job.rounds.lookout.sight(ME, rank.seat).mark
        job.kill(KillRank(device=ME, pid=rank.process.pid + 1))
        job.kill(KillRank(device=Device(NodeId("n9"), 0)))
        rank.page.phase(Phase.REDUCE, Generation(1), Step(4))
        job.kill(KillRank(device=ME, pid=rank.process.pid, mark=mark))
        assert rank.process.poll() is None and not rank.seat.doomed
        job.kill(KillRank(device=ME, pid=rank.process.pid, why="it hangs"))
        assert await rank.ended() == -signal.SIGKILL and rank.seat.doomed == "it hangs"


@on_a_loop
async def test_whoever_had_stopped_and_goes_on_is_not_killed_for_it(tmp_path: Path) -> None:
    """It stands where it stood, because it waits for another one."""
    async with a_job(tmp_path) as (job, rank):
        lookout = job.rounds.lookout
        job.rounds.formed(Generation(1), (ME,))
        rank.process.send_signal(signal.SIGSTOP)
        await _looked_until(job, rank, is_guilty=True)
        kill = KillRank(device=ME, pid=rank.process.pid, mark=lookout.sight(ME, rank.seat).mark, why="it has stopped")
        rank.process.send_signal(signal.SIGCONT)
        await _looked_until(job, rank, is_guilty=False)
        assert lookout.sight(ME, rank.seat).mark == kill.mark
        job.kill(kill)
        assert rank.process.poll() is None and not rank.seat.doomed
        rank.process.send_signal(signal.SIGSTOP)
        await _looked_until(job, rank, is_guilty=True)
        job.kill(kill)
        assert await rank.ended() == -signal.SIGKILL and rank.seat.doomed == "it has stopped"


async def _looked_until(job: LocalJob, rank: Rank, *, is_guilty: bool) -> None:
    async with asyncio.timeout(60):
        while job.rounds.lookout.sight(ME, rank.seat).is_guilty is not is_guilty:
            job.rounds.lookout.look(job.crew.at)
            await asyncio.sleep(LOOK_S)
