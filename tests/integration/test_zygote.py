"""A zygote forks ranks that hold nothing but their own, tells how they ended, and leaves nobody behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.domain import codec
from orchestrator.domain.ids import Device, Generation, JobId, NodeId
from orchestrator.domain.requests import OpenHost
from orchestrator.domain.spec import CheckpointSpec, DataSpec, JobSpec, TrainSpec
from worker.keeper import Zygote
from worker.program import load_program
from worker.seat import Seat, open_seat

pytestmark = pytest.mark.timeout(120)

NODE = NodeId("n0")


def an_order(tmp_path: Path) -> OpenHost:
    text = tmp_path / "text.txt"
    text.write_text("all work and no play\n" * 200)
    spec = JobSpec(
        name="t",
        program="causal_lm",
        data=DataSpec(files=(str(text),)),
        train=TrainSpec(steps=10, micro_batches=2, micro_batch_size=1, sequence=16),
        model={"layers": 1, "width": 16, "heads": 2, "ffn": 32},
        checkpoint=CheckpointSpec(every=0),
    )
    return OpenHost(
        job=JobId("j1"),
        node=NODE,
        num_devices=2,
        spec=spec,
        profile=load_program("causal_lm").describe(spec),
        checkpoint_dir=str(tmp_path / "checkpoints"),
        log_dir=str(tmp_path / "logs"),
    )


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def open_files(pid: int) -> list[str]:
    found = []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found.append(str(fd.readlink()).split(":")[0])
    return sorted(found)


def memory_files(pid: int) -> set[int]:
    """Which memfds it has, however often it holds each."""
    files = list(Path(f"/proc/{pid}/fd").iterdir())
    return {file.stat().st_ino for file in files if "memfd" in str(file.readlink())}


async def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.002)


def test_forks_hold_only_their_own_and_their_ends_are_told(tmp_path: Path) -> None:
    async def scenario() -> None:
        heard: list[dict[str, Any]] = []
        ended: list[int] = []

        def hear(message: dict[str, Any], fd: int) -> None:
            heard.append(message)
            if fd >= 0:
                os.close(fd)

        zygote = Zygote(an_order(tmp_path), {}, hear, ended.append)
        zygote.start()
        try:
            await until(lambda: bool(heard))
            assert heard.pop() == {"kind": "warm"}
            at_rest = open_files(zygote.pid)
            for number in range(1, 13):
                seat = fork(zygote, number, tmp_path)
                await until(lambda: len(heard) == 1)
                forked = heard.pop()
                assert (forked["kind"], forked["seat"]) == ("forked", number)
                pid = forked["pid"]
                # Two threads: it has closed what is not its own and begun to obey.
                await until(lambda pid=pid: len(list(Path(f"/proc/{pid}/task").iterdir())) == 2)
                assert open_files(pid).count("socket") == 2  # control and listener: not the zygote's, not another rank's
                assert len(memory_files(pid)) == 3  # its page and its tray's two slots
                assert not [name for name in open_files(pid) if "pidfd" in name]
                os.kill(pid, signal.SIGKILL)
                await until(lambda: len(heard) == 1)
                assert heard.pop() == {"kind": "exited", "pid": pid, "code": -signal.SIGKILL}
                assert seat.page.look().pid == pid  # read from a dead rank
                seat.close()
            await until(lambda: open_files(zygote.pid) == at_rest)
            assert len(list(Path(f"/proc/{zygote.pid}/task").iterdir())) == 1
        finally:
            zygote.kill()
            await until(lambda: not zygote.is_alive)
        assert ended == [-signal.SIGKILL]

    asyncio.run(scenario())


def fork(zygote: Zygote, number: int, tmp_path: Path) -> Seat:
    seat, fds = open_seat(number, Device(NODE, 0), Generation(1), "127.0.0.1", tmp_path / "logs")
    zygote.fork(number, 0, fds)
    for fd in fds:
        os.close(fd)
    return seat


HOST_ALONE = """
    import asyncio, json, sys
    from pathlib import Path
    from orchestrator.domain import codec
    from orchestrator.domain.ids import Device, EffectId, Generation, Term
    from orchestrator.domain.host_events import SeatsPrepared
    from orchestrator.domain.requests import OpenHost, PrepareSeats
    from worker.host import Host

    assert "torch" not in sys.modules and "ray" not in sys.modules

    async def main():
        host, order, after = Host(), codec.loads(OpenHost, Path(sys.argv[1]).read_bytes()), 0
        await host.handle(Term(1), EffectId("1"), order)
        devices = tuple(Device(order.node, index) for index in range(2))
        await host.handle(Term(1), EffectId("2"), PrepareSeats(generation=Generation(1), devices=devices))
        while True:
            for envelope in (await host.poll(Term(1), after, 10.0))[0]:
                after = envelope.number
                if isinstance(envelope.event, SeatsPrepared):
                    print(json.dumps([host.zygote_pid, *envelope.event.pids.values()]), flush=True)

    asyncio.run(main())
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_a_host_that_dies(tmp_path: Path, how: signal.Signals) -> None:
    order = tmp_path / "order.json"
    order.write_bytes(codec.dumps(an_order(tmp_path)))
    command = [sys.executable, "-c", textwrap.dedent(HOST_ALONE), str(order)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as host:
        try:
            assert host.stdout is not None
            pids = json.loads(host.stdout.readline())
            assert len(pids) == 3 and all(map(is_running, pids))
        finally:
            host.send_signal(how)
    deadline = time.monotonic() + 60
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.005)
