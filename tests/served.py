"""The API on a real loopback port, in a thread of the test process, over a desk that the test plays."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import uvicorn

from api.app import create_app
from api.settings import ApiSettings
from orchestrator.adapters.plan_thread import ThreadForeseer
from orchestrator.adapters.probe_process import SubprocessProber
from orchestrator.domain.ids import Generation
from orchestrator.domain.state import Running
from orchestrator.ports import Keyring

from .desk import PlayedDesk, a_plan, first_generation

JOB = "job-1"


@dataclass
class Served:
    desk: PlayedDesk
    url: str
    server: uvicorn.Server
    thread: threading.Thread
    state_dir: Path

    def stop(self) -> None:
        """Ask it to end as SIGTERM does; fails where it does not."""
        self.server.should_exit = True
        self.thread.join(30)
        assert not self.thread.is_alive(), "the server did not end"

    def write_log(self, job: str, device: str, text: str) -> Path:
        folder = self.state_dir / "jobs" / job / "logs"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{device.replace('/', '-')}.log"
        path.write_text(text)
        return path


@contextmanager
def serve(
    state_dir: Path,
    *,
    port: int = 0,
    desk: PlayedDesk | None = None,
    chaos: bool = True,
    keyring: Keyring | None = None,
    **changes: Any,
) -> Iterator[Served]:
    """changes: of the settings. Without a keyring nobody is asked who they are."""
    desk = desk or PlayedDesk()
    quick = ApiSettings(state_dir=state_dir, chaos=chaos, version="1.2.3", idle_check_s=0.05, ping_s=0.3)
    app = create_app(desk, replace(quick, **changes), ThreadForeseer(SubprocessProber()), keyring)
    config = uvicorn.Config(app, host="127.0.0.1", port=port, log_level="critical", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)

    async def live() -> None:
        desk.loop = asyncio.get_running_loop()
        await server.serve()

    thread = threading.Thread(target=lambda: asyncio.run(live()), name="api", daemon=True)
    thread.start()
    eventually(lambda: server.started)
    bound = server.servers[0].sockets[0].getsockname()[1]
    served = Served(desk, f"http://127.0.0.1:{bound}", server, thread, state_dir)
    try:
        yield served
    finally:
        served.stop()


def eventually(is_so: Callable[[], bool], within_s: float = 30.0) -> None:
    deadline = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < deadline, f"not within {within_s} s"
        time.sleep(0.01)


def running(served: Served, steps: int = 0) -> None:
    """JOB trains, and has committed so many."""
    plan = a_plan()
    served.desk.add(JOB)
    served.desk.become(JOB, Running(generation=Generation(1), plan=plan), "running", "trains", **first_generation(plan))
    for number in range(steps):
        served.desk.step(JOB, loss=5.0 - number)
