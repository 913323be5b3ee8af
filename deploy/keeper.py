"""Keeps Redis, Ray's head, the supervisor and the API running: starts each again when it dies, until told to stop.

Stopping it stops nothing else; `deploy.local down` does that. It decides nothing about jobs and nodes.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.adapters import ray_environment
from orchestrator.adapters.embedded_redis import EmbeddedRedis
from orchestrator.adapters.local_nodes import LocalNodes
from orchestrator.adapters.processes import ProcessId, identify, write_pid
from orchestrator.adapters.ray_environment import CLUSTER_MARK
from orchestrator.adapters.ray_node import GCS, HEAD
from orchestrator.domain.errors import EverstepError

from .settings import Places

SUPERVISOR, API, KEEPER = "supervisor", "api", "keeper"
FIRST_WAIT_S, LONGEST_WAIT_S = 0.1, 5.0
"""Before one that keeps dying is started again: doubled each time, forgotten once it has lived for a while."""
STEADY_S = 10.0


@dataclass(slots=True)
class Kept:
    """A process that is to run; `find` knows one that runs already, `start` starts one once `is_wanted`."""

    name: str
    find: Callable[[], ProcessId | None]
    start: Callable[[], ProcessId | None]
    is_wanted: Callable[[], bool] = lambda: True
    wait_s: float = FIRST_WAIT_S
    started_at: float = 0.0
    due_at: float = 0.0
    watched: ProcessId | None = None
    pidfd: int = field(default=-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--state-dir", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--chaos", action="store_true", help="let users cause faults on purpose")
    parser.add_argument("settings", nargs="*", help="after --: what the supervisor and the API are started with")
    asked = parser.parse_args()
    places = Places(asked.state_dir.resolve())
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    with contextlib.suppress(KeyboardInterrupt):
        keep(kept_processes(places, asked.port, asked.chaos, asked.settings))


def kept_processes(places: Places, port: int, chaos: bool = False, settings: Sequence[str] = ()) -> list[Kept]:
    environment = ray_environment.for_state_dir(places.state_dir)
    plain = without_ray() | {CLUSTER_MARK: environment.cluster}
    redis = EmbeddedRedis(places.state_dir)
    # Last, and as settings: what was decided once for all of them is said more strongly than a file or --set of the user's.
    decided = ("--set", f"state_dir={places.state_dir}")

    def start_redis() -> ProcessId | None:
        redis.start(plain)
        return redis.process

    def launch(name: str, env: dict[str, str], module: str, *more: str) -> Callable[[], ProcessId | None]:
        return lambda: start_detached(places, name, [sys.executable, "-m", module, *settings, *decided, *more], env)

    nodes = LocalNodes(places.state_dir)

    def kept_head(name: str) -> Kept:
        def restart() -> ProcessId | None:
            # A GCS ends with its Redis, and without it would end again.
            return nodes.restart_head(name, redis.start(plain))

        return Kept(name, lambda: nodes.head(name), restart, is_wanted=lambda: nodes.has_head(name))

    api = launch(API, plain, "deploy.api_server", "--set", f"api.port={port}", "--set", f"api.chaos={str(chaos).lower()}")
    supervisor = launch(SUPERVISOR, environment.variables(os.environ), "deploy.supervisor_main")
    return [
        Kept("redis", lambda: redis.process, start_redis),
        Kept(SUPERVISOR, lambda: places.process(SUPERVISOR), supervisor),
        Kept(API, lambda: places.process(API), api),
        kept_head(GCS),
        kept_head(HEAD),
    ]


def keep(kept: list[Kept]) -> None:
    """Never returns by itself."""
    poller = select.poll()
    while True:
        now = time.monotonic()
        for one in kept:
            if one.watched is None and now >= one.due_at:
                _start(one, now)
                if one.pidfd >= 0:
                    poller.register(one.pidfd, select.POLLIN)
        due = [one.due_at - time.monotonic() for one in kept if one.watched is None]
        ended = {fd for fd, _ in poller.poll(max(0, int(min(due) * 1000) + 1) if due else None)}
        for one in kept:
            if one.pidfd in ended:
                poller.unregister(one.pidfd)
                _bury(one, time.monotonic())


def _start(one: Kept, now: float) -> None:
    if not one.is_wanted():
        one.due_at = now + FIRST_WAIT_S  # it has not failed, and is not to be waited for longer each time
        return
    try:
        one.watched = one.find() or one.start()
    except (OSError, EverstepError) as error:
        print(f"{one.name} could not be started: {error}", file=sys.stderr, flush=True)
        one.watched = None
    one.started_at = now
    if one.watched is not None:
        with contextlib.suppress(ProcessLookupError):
            one.pidfd = os.pidfd_open(one.watched.pid)
            print(f"{one.name} runs as {one.watched.pid}", file=sys.stderr, flush=True)
            return
    _bury(one, now)


def _bury(one: Kept, now: float) -> None:
    if one.watched is not None:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(one.watched.pid, os.WNOHANG)
    if one.pidfd >= 0:
        os.close(one.pidfd)
    one.wait_s = FIRST_WAIT_S if now - one.started_at > STEADY_S else min(2 * one.wait_s, LONGEST_WAIT_S)
    if one.watched is not None:
        print(f"{one.name} has ended; starting another in {one.wait_s:g} s", file=sys.stderr, flush=True)
    one.due_at = now + one.wait_s
    one.watched, one.pidfd = None, -1


def start_detached(places: Places, name: str, command: list[str], env: dict[str, str]) -> ProcessId | None:
    """In a session of its own, with a log and a pid file; None where it ended at once."""
    with places.log(name).open("ab") as log:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, env=env)
    identity = identify(child.pid)
    if identity is not None:
        write_pid(places.pid_file(name), identity)
    return identity


def without_ray() -> dict[str, str]:
    """The environment for a process that has nothing to do with Ray and should have no way to it."""
    return {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}


if __name__ == "__main__":
    main()
