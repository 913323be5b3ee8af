"""The supervisor's process: chooses the adapters of a local cluster and serves until it is told to stop."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from pathlib import Path

import structlog

from orchestrator.adapters.checkpoints import FolderCheckpoints
from orchestrator.adapters.embedded_redis import EmbeddedRedis
from orchestrator.adapters.local_nodes import LocalNodes
from orchestrator.adapters.plan_process import ThreadPlanner
from orchestrator.adapters.probe_process import SubprocessProber
from orchestrator.adapters.ray_cluster import RayCluster
from orchestrator.adapters.redis_store import RedisStore
from orchestrator.adapters.saboteur import LocalSaboteur
from orchestrator.domain.errors import Unavailable
from orchestrator.supervisor.acting import World
from orchestrator.supervisor.run import Supervisor

NODES_S = 60.0
IGNORES_KINDS = "EVERSTEP_IGNORES_KINDS"
"""Where this is set, plans are made as if all devices were alike: benchmarks compare with that."""
log = structlog.get_logger()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--state-dir", type=Path, required=True)
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
    )
    # Any other exception out of here is the last word in this process's log; the keeper starts another one.
    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(serve(parser.parse_args().state_dir.resolve()))
    log.info("supervisor_stopped")
    # Ray's exit hooks have nothing left to do and take seconds to find out.
    os._exit(0)


async def serve(state_dir: Path) -> None:
    nodes = LocalNodes(state_dir)
    address = await _until_started(nodes)
    store = RedisStore(EmbeddedRedis(state_dir).address)
    cluster = RayCluster(address, nodes.environment, is_alive=nodes.is_alive)
    await cluster.start()
    _stop_on_signals()
    world = World(
        store=store,
        cluster=cluster,
        provider=nodes,
        prober=SubprocessProber(),
        planner=ThreadPlanner(ignores_kinds=bool(os.environ.get(IGNORES_KINDS))),
        checkpoints=FolderCheckpoints(str(state_dir)),
        saboteur=LocalSaboteur(EmbeddedRedis(state_dir).address),
    )
    # One supervisor per state directory is started here, so its name may stay: a successor need not wait for the lease.
    supervisor = Supervisor(world=world, root=str(state_dir), holder=f"{socket.gethostname()}:{state_dir}", checks=True)
    log.info("supervisor_started", pid=os.getpid(), ray=address)
    homeless = asyncio.create_task(_stop_when_homeless(cluster, _this_task()))
    try:
        await supervisor.serve()
    finally:
        log.info("supervisor_stopping")
        homeless.cancel()
        await cluster.close()
        await store.close()


def _stop_on_signals() -> None:
    """After Ray has connected, which installs handlers of its own that end the process where it stands."""
    serving = _this_task()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, serving.cancel)


async def _stop_when_homeless(cluster: RayCluster, serving: asyncio.Task[None]) -> None:
    """A driver cannot change its raylet; the keeper starts a supervisor that has the new one."""
    await cluster.homeless.wait()
    log.warning("ray_head_replaced", remedy="this supervisor ends, and its successor connects to the new head")
    serving.cancel()


def _this_task() -> asyncio.Task[None]:
    task = asyncio.current_task()
    assert task is not None
    return task


async def _until_started(nodes: LocalNodes) -> str:
    """The address of the GCS: this process is started while nodes are, and imports meanwhile."""
    deadline = time.monotonic() + NODES_S
    while not (address := nodes.registry().address):
        if time.monotonic() > deadline:
            raise Unavailable(f"no nodes were started within {NODES_S:g} s; see the log of up")
        await asyncio.sleep(0.05)
    return address


if __name__ == "__main__":
    main()
