"""What training sees of a save, beside torch.distributed.checkpoint's (DCP) async_save of the same state on the same disk.

A part of benchmarks.checkpoint: real steps of one rank, a real tray, and the host's own dispatch with its saver process.
What training waits for is timed: the call that hands over and, for ours, what is left of the copy before the next update.
The first of either side is not counted; what copying and writing beside them slow steps down by is given apart.

    stall_ratio_to_async_save   seconds that a step waits for our hand-over, over those in async_save's call
    stall_share_of_step         of ten steps' time, where every tenth is saved
    memory_ratio                most memory that saving took, over the state handed over: tray and saver
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import async_save

from orchestrator.domain.generation import Answer
from orchestrator.domain.host_events import HostEvent, ShardSaved
from orchestrator.domain.ids import Device, Generation, JobId, NodeId, Step
from orchestrator.domain.profile import Profile
from orchestrator.domain.requests import OpenHost
from orchestrator.domain.spec import JobSpec
from worker.checkpoint.custody import Custody
from worker.checkpoint.dispatch import Dispatch
from worker.checkpoint.tray import Tray
from worker.loop import Trainer
from worker.reference import run
from worker.state.holdings import KINDS, Holdings

G = Generation(1)
ME = Device(NodeId("n0"), 0)
ROUNDS = 2
QUIET_STEPS = 3
EVERY = 10
SAMPLE_S = 0.02


def stalls(folder: Path, spec: JobSpec, profile: Profile) -> dict[str, float]:
    """Trains until each side has saved ROUNDS + 1 times."""
    beside = _Host(folder / "ours", spec, profile)
    try:
        measured = _Measured(folder, beside)
        with suppress(_Enough):
            run(spec, look=measured.look, snapshots=beside.tray)
        return measured.found()
    finally:
        beside.close()


class _Enough(Exception):
    """Everything has been measured."""


class _Measured:
    """Looks on after each step: some are left alone, then one side saves whenever its last save is on disk."""

    def __init__(self, folder: Path, host: _Host) -> None:
        self._folder = folder
        self._host = host
        self._at = time.perf_counter()
        self._quiet: list[float] = []
        self._busy: list[float] = []
        self._taken: list[float] = []
        self._ours: list[float] = []
        self._theirs: list[float] = []
        self._state_bytes = 0

    def look(self, trainer: Trainer, answer: Answer) -> None:
        now = time.perf_counter()
        held = trainer.holdings
        assert held is not None
        if len(self._taken) > len(self._ours):
            # The call, and what the next step waited for before it changed the state.
            self._ours.append(self._taken[-1] + self._host.tray.waited_s)
        if answer.step > 1:
            (self._busy if self._host.is_busy else self._quiet).append(now - self._at)
        if len(self._ours) <= ROUNDS:
            self._ours_next(held, answer)
        elif not self._host.is_busy:
            self._theirs_next(held, answer.step)
        self._at = time.perf_counter()

    def found(self) -> dict[str, float]:
        ours, theirs, step = median(self._ours[1:]), median(self._theirs[1:]), median(self._quiet)
        return {
            "stall_s": ours,
            "async_save_stall_s": theirs,
            "stall_ratio_to_async_save": ours / theirs,
            "stall_share_of_step": ours / (EVERY * step),
            "step_s": step,
            "step_beside_saver_ratio": median(self._busy) / step if self._busy else 1.0,
            "memory_ratio": self._host.most_bytes / self._state_bytes,
        }

    def _ours_next(self, held: Holdings, answer: Answer) -> None:
        tray = self._host.tray
        if answer.step == 1:
            self._state_bytes = held.state[:, : held.owned].nbytes
            tray.lay_out(held)
        if len(self._quiet) < QUIET_STEPS or self._host.is_busy or tray.is_touching:
            return
        assert tray.is_ready(held, EVERY)
        tray.waited_s = 0.0
        self._taken.append(_timed(lambda: tray.take(held, G, answer)))

    def _theirs_next(self, held: Holdings, step: Step) -> None:
        if not dist.is_initialized():
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        state = {kind: row[: held.owned] for kind, row in zip(KINDS, held.state, strict=True)}
        under_way: list[object] = []
        where = self._folder / "theirs" / str(step)
        self._theirs.append(_timed(lambda: under_way.append(async_save(state, checkpoint_id=where))))
        under_way[0].result()  # type: ignore[attr-defined]
        if len(self._theirs) > ROUNDS:
            dist.destroy_process_group()
            raise _Enough


class _TimedTray(Tray):
    """Adds up what it makes a step wait for."""

    waited_s = 0.0

    def copied(self, *, entry: bool = False) -> None:
        begun = time.perf_counter()
        super().copied(entry=entry)
        self.waited_s += time.perf_counter() - begun


class _Host:
    """A host's side of checkpoints, on a loop of its own in a thread of this process."""

    def __init__(self, folder: Path, spec: JobSpec, profile: Profile) -> None:
        folder.mkdir(parents=True)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="host", daemon=True)
        self._thread.start()
        order = OpenHost(
            job=JobId("job"),
            node=ME.node,
            num_devices=1,
            spec=spec,
            profile=profile,
            checkpoint_dir=str(folder / "checkpoints"),
            log_dir=str(folder / "logs"),
        )
        self._custody = Custody(ME)
        self._dispatch = Dispatch(order, self._hear)
        self._handed = self._written = 0
        fds = tuple(map(os.dup, self._custody.fds))
        self.tray = _TimedTray(fds, ME, torch.device("cpu"), lambda _: self._collect(), lambda _: False)
        self.most_bytes = 0
        self._stop = threading.Event()
        self._sampler = threading.Thread(target=self._sample, name="sampler", daemon=True)
        self._sampler.start()

    @property
    def is_busy(self) -> bool:
        return self._handed > self._written

    def close(self) -> None:
        self._stop.set()
        self._sampler.join()
        asyncio.run_coroutine_threadsafe(self._dispatch.close(), self._loop).result()
        self.tray.close()
        self._loop.call_soon_threadsafe(self._custody.leave)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _collect(self) -> None:
        self._handed += 1
        self._loop.call_soon_threadsafe(self._dispatch.collect, self._custody)

    def _hear(self, event: HostEvent) -> None:
        assert isinstance(event, ShardSaved), event
        self._written += 1

    def _sample(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            tray = sum(os.fstat(fd).st_blocks * 512 for fd in self._custody.fds)
            self.most_bytes = max(self.most_bytes, tray + _private_bytes(self._dispatch.saver_pid))


def _private_bytes(pid: int) -> int:
    """Of a process, without the shared memory that is counted elsewhere; 0 where there is none."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines() if pid else []
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon:", "RssFile:")))


def _timed(do: Callable[[], object]) -> float:
    begun = time.perf_counter()
    do()
    return time.perf_counter() - begun
