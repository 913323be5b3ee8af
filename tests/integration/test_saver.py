"""A host's saver for real: what ranks hand over is written beside training, whatever ends meanwhile, once and whole."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest

from orchestrator.adapters import manifest
from orchestrator.domain.faults import FaultKind, FaultRequested
from orchestrator.domain.host_events import CopiesSeen, RankExited, RankFinished, ShardNotSaved, ShardSaved
from orchestrator.domain.ids import Device, Generation, Step
from orchestrator.domain.origin import FromSeed
from orchestrator.domain.requests import InjectFault
from orchestrator.domain.spec import CheckpointSpec, JobSpec
from tests.hosted import DEVICES, NODES, Supervisor, a_job, is_running, running, supervised
from worker.checkpoint import dispatch, saver
from worker.child import Child

pytestmark = pytest.mark.timeout(120)

ONE = NODES[:1]
MINE = DEVICES[:2]


def saving(tmp_path: Path, *, every: int, steps: int = 100_000) -> JobSpec:
    return replace(a_job(tmp_path, steps=steps), checkpoint=CheckpointSpec(every=every))


def shards(s: Supervisor, generation: int = 1) -> list[tuple[int, Device]]:
    return [(event.step, event.shard.device) for event in s.all(ShardSaved) if event.generation == generation]


async def all_saved(s: Supervisor, step: int, generation: int = 1) -> None:
    """Both ranks' parts of that step are durable and are a checkpoint together."""
    await s.until(lambda: {d for at, d in shards(s, generation) if at == step} == set(MINE))
    path = s.tmp_path / "checkpoints" / manifest.directory_name(Step(step), Generation(generation))
    parts = [e.shard for e in s.all(ShardSaved) if (e.step, e.generation) == (step, generation)]
    assert manifest.commit(path, Step(step), Generation(generation), "hash", 0, parts).step == step


async def saved_or_skipped(s: Supervisor, every: int, last: int) -> set[int]:
    """What was saved, after the last step: each due step was said once by everybody, or has been skipped by all."""
    skipped = [event.step for event in s.all(ShardNotSaved)]
    assert all("faster than the disk" in event.message for event in s.all(ShardNotSaved))
    assert len(skipped) == len(set(skipped)) and last not in skipped
    due = set(range(every, last + 1, every)) - set(skipped)
    await s.until(lambda: {step for step, _ in shards(s)} == due and len(shards(s)) == 2 * len(due))
    return due


def test_snapshots_are_written_by_one_process_that_gives_way_and_ends_with_its_host(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with supervised(saving(tmp_path, every=5, steps=20), tmp_path, ONE) as s:
            host = s.hosts[ONE[0]]
            await running(s, 1)
            await all_saved(s, 5)
            process = psutil.Process(host.saver_pid)
            assert process.nice() == 19 and process.num_threads() == 1
            assert not [name for name in process.environ() if name.startswith("RAY_")]
            assert not [m.path for m in process.memory_maps() if "libtorch" in m.path]
            await s.until(lambda: len(s.all(RankFinished)) == 2)
            for step in await saved_or_skipped(s, 5, 20):
                await all_saved(s, step)
            assert process.is_running()
        assert not is_running(process.pid)

    asyncio.run(scenario())


PROGRAM = """
import os, time
from worker.programs.causal_lm import CausalLM

class Held(CausalLM):
    def build(self, spec, first, last, tp, leaves):
        stage = super().build(spec, first, last, tp, leaves)
        whole = stage.forward
        def forward(x, ids, step):
            while first == 0 and int(step) % 10 == 5 and not os.path.exists(os.path.join({folder!r}, f"to-{{int(step)}}")):
                time.sleep(0.002)
            return whole(x, ids, step)
        stage.forward = forward
        return stage

PROGRAM = Held()
"""
"""Step 5, 15, ... is not made before there is a file of that name: half-way from one snapshot to the next."""


def test_a_saver_killed_at_any_moment_loses_nothing_and_nothing_is_said_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = {point: 10 * number for number, point in enumerate(saver.POINTS, start=1)}
    monkeypatch.setenv(saver.ENVIRONMENT, ",".join(f"{point}:{step}" for point, step in named.items()))
    random, started = Random(5), [0]
    start = dispatch.start

    def counted(*args: Any) -> Child:
        started[0] += 1
        return start(*args)

    monkeypatch.setattr(dispatch, "start", counted)

    rounds = 4
    last = max(named.values()) + 20 * rounds + 10
    (tmp_path / "held.py").write_text(PROGRAM.format(folder=str(tmp_path)))
    monkeypatch.syspath_prepend(str(tmp_path))
    tmp_path.chmod(0o777)  # ranks, which are a user of their own, look for files there and make some
    holds = iter(range(5, last, 10))

    def let_pass(snapshots: int) -> None:
        for _ in range(snapshots):
            (tmp_path / f"to-{next(holds)}").touch()

    async def scenario() -> None:
        # However long savers take to start, there is a step to come that has a snapshot.
        spec = replace(saving(tmp_path, every=10, steps=last), program="held:PROGRAM")
        async with supervised(spec, tmp_path, ONE) as s:
            host = s.hosts[ONE[0]]
            await running(s, 1)
            for number, step in enumerate(named.values(), start=1):
                let_pass(1)
                await all_saved(s, step)
                assert started[0] > 2 * number, "it was killed at this point, once for each of the two snapshots"
            for _ in range(rounds):
                count = len(shards(s))
                let_pass(2)
                await s.until(lambda: len(shards(s)) > count)  # noqa: B023
                await asyncio.sleep(random.uniform(0.0, 0.02))
                if host.saver_pid:
                    os.kill(host.saver_pid, signal.SIGKILL)
            let_pass(1)
            await s.until(lambda: len(s.all(RankFinished)) == 2)
            for step in await saved_or_skipped(s, 10, last):
                await all_saved(s, step)

    asyncio.run(scenario())


def test_a_ranks_death_loses_no_snapshot_that_was_whole_and_saves_none_that_was_not(tmp_path: Path) -> None:
    def killed_at(point: str, step: int) -> InjectFault:
        fault = FaultRequested(fault=FaultKind.KILL, at=point, step=Step(step), id=f"{point}-{step}")
        return InjectFault(fault=fault, device=MINE[1])

    async def scenario() -> None:
        async with supervised(saving(tmp_path, every=10), tmp_path, ONE) as s:
            await s.opened()
            await s.prepare(1)
            # It has told nobody: its host looks for itself.
            await s.send(ONE[0], killed_at("after_snapshot", 10))
            await s.form(1, FromSeed())
            await s.until(lambda: len(s.all(RankExited)) == 1)
            await all_saved(s, 10)
            reports = await s.close(1)
            await s.prepare(2)
            # Nobody mirrors it here, so the job begins again.
            await s.send(ONE[0], killed_at("in_snapshot", 10))
            await s.form(2, FromSeed())
            await s.until(lambda: len(s.all(RankExited)) == 2 and bool(shards(s, 2)))  # the other one's is whole
            await s.close(2)
            await s.prepare(3)
            await s.form(3, FromSeed())
            await all_saved(s, 10, generation=3)
            assert shards(s, 2) == [(10, MINE[0])]
            assert reports[MINE[1]].passed == 10

    asyncio.run(scenario())


def test_a_disk_that_is_full_or_read_only_costs_a_checkpoint_and_no_step(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()

    async def scenario() -> None:
        async with supervised(saving(tmp_path, every=10), tmp_path, ONE) as s:
            host = s.hosts[ONE[0]]

            async def fails(why: str) -> None:
                """From now on; then nothing is wrong any more, and the next one is saved."""
                failed = len(s.all(ShardNotSaved))
                step = max(s.answers())
                await s.until(lambda: any(why in e.message for e in s.all(ShardNotSaved)[failed:]))
                await s.stepped(step + 30)

            async def works() -> None:
                step = 10 + max(s.answers())
                await s.until(lambda: {d for at, d in shards(s) if at > step} == set(MINE))

            await running(s, 1)
            await works()
            resource.prlimit(host.saver_pid, resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
            await fails("File too large")
            resource.prlimit(host.saver_pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            await works()
            if mounted(folder, "size=64k"):
                try:
                    await fails("No space left on device")
                    assert mounted(folder, "remount,size=64m")
                    await works()
                    await s.until(lambda: mounted(folder, "remount,ro"))  # refused while a file is being written
                    await fails("Read-only file system")
                    assert mounted(folder, "remount,rw")
                    await works()
                finally:
                    unmount(folder)
            assert not s.all(RankExited)

    asyncio.run(scenario())


def mounted(folder: Path, options: str) -> bool:
    """A small file system of its own; False where this process may mount none."""
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


def unmount(folder: Path) -> None:
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_training_does_not_wait_for_a_disk_that_does_not_keep_up(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with supervised(saving(tmp_path, every=5), tmp_path, ONE) as s:
            await running(s, 1)
            await all_saved(s, 5)
            stopped = s.hosts[ONE[0]].saver_pid
            os.kill(stopped, signal.SIGSTOP)
            await s.until(lambda: bool(s.all(ShardNotSaved)))
            first = s.all(ShardNotSaved)[0]
            assert first.message.endswith(
                "of 2 ranks still have two snapshots that are not written: they come faster than the disk takes them"
            )
            await s.stepped(first.step + 30)

            def is_seen() -> bool:
                """What waits now; what was told before may be of only one of them. One may be written, and not durable."""
                waiting = s.all(CopiesSeen)[-1].copies if s.all(CopiesSeen) else ()
                return {(one.device, one.what) for one in waiting} == {(device, "saving") for device in MINE} and any(
                    one.done_bytes < one.total_bytes for one in waiting
                )

            await s.until(is_seen)
            before = len(shards(s))
            os.kill(stopped, signal.SIGCONT)
            await s.until(lambda: len(shards(s)) >= before + 6)
            assert s.hosts[ONE[0]].saver_pid == stopped
            # Each step's is everybody's or nobody's.
            skipped = {event.step for event in s.all(ShardNotSaved)}
            assert not skipped & {step for step, _ in shards(s)}
            assert len({event.device for event in s.all(ShardNotSaved)}) == 1, "said once a step, by one for all"

    asyncio.run(scenario())


@pytest.mark.timeout(240)
def test_two_hundred_saves_and_fifty_generations_leave_nothing_behind(tmp_path: Path) -> None:
    def held(pid: int) -> tuple[int, int]:
        """Descriptors, threads."""
        process = psutil.Process(pid)
        return process.num_fds(), process.num_threads()

    async def scenario() -> None:
        before = sorted(Path("/dev/shm").iterdir())
        async with supervised(saving(tmp_path, every=1), tmp_path, ONE) as s:
            await running(s)
            await all_saved(s, 1)
            pids = (*s.pids.values(), s.hosts[ONE[0]].saver_pid)
            early: list[tuple[int, int]] = []
            saved = 0
            for generation in range(1, 51):
                await s.until(lambda: sum(e.generation == generation for e in s.all(ShardSaved)) >= 4)  # noqa: B023
                if generation == 10:
                    # The saver's while it waits: it opens what it writes.
                    early = [min(held(pid) for _ in range(200)) for pid in pids]
                saved += len(shards(s, generation))
                reports = await s.close(generation)
                await s.prepare(generation + 1)
                restore = s.settle(reports)
                await s.form(generation + 1, restore, restore.step)
                await s.ready(generation + 1)
                s.forget_before(generation + 1)
            assert saved >= 200
            await s.until(lambda: all(held(pid) <= then for pid, then in zip(pids, early, strict=True)))
            assert s.hosts[ONE[0]].saver_pid == pids[-1]
        assert sorted(Path("/dev/shm").iterdir()) == before

    asyncio.run(scenario())
