"""The supervisor's process: chooses the adapters and serves until it is told to stop.

Several may run on one Redis: one holds the lease, the others wait for it. Each needs a name of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time

import structlog

from api.config import Config
from orchestrator.adapters.checkpoints import FolderCheckpoints
from orchestrator.adapters.joined_nodes import JoinedNodes, Providers
from orchestrator.adapters.local_nodes import LocalNodes
from orchestrator.adapters.mailbox import Mailbox
from orchestrator.adapters.plan_process import PlanProcess
from orchestrator.adapters.probe_process import SubprocessProber
from orchestrator.adapters.ray_cluster import RayCluster
from orchestrator.adapters.redis_store import RedisStore
from orchestrator.adapters.saboteur import LocalSaboteur
from orchestrator.adapters.secret_folder import FOLDER, SecretFolder
from orchestrator.domain.attic import DAY_S, Retention
from orchestrator.domain.errors import Unavailable
from orchestrator.supervisor.acting import World
from orchestrator.supervisor.run import Supervisor

from . import configured, garbage, logs, metrics
from .metrics import MeteredCluster, MeteredStore
from .settings import Places

FLAGS = ("supervisor.holder", "ray.address")
NODES_S = 60.0
IGNORES_KINDS = "EVERSTEP_IGNORES_KINDS"
"""Where this is set, plans are made as if all devices were alike: benchmarks compare with that."""
log = structlog.get_logger()


def main() -> None:
    config = configured.resolved(configured.parser(__doc__, FLAGS, "everstep supervisor").parse_args()).config
    logs.configure(config.log, "supervisor")
    configured.tell_jobs(config)
    # Any other exception out of here is the last word in this process's log; the keeper starts another one.
    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(serve(config))
    log.info("supervisor_stopped")
    # Ray's exit hooks have nothing left to do and take seconds to find out.
    os._exit(0)


async def serve(config: Config) -> None:
    state_dir = config.root
    nodes = LocalNodes(state_dir)
    address = config.ray.address or await _until_started(nodes)
    redis = configured.redis_address(config)
    store = RedisStore(redis)
    cluster = RayCluster(address, configured.ray_environment(config), is_alive=nodes.is_alive)
    await cluster.start()
    _stop_on_signals()
    planner = PlanProcess(ignores_kinds=bool(os.environ.get(IGNORES_KINDS)))
    await planner.start()
    world = World(
        store=MeteredStore(store),
        cluster=MeteredCluster(cluster),
        provider=Providers(nodes, JoinedNodes(Mailbox(address))),
        prober=SubprocessProber(secrets=SecretFolder(state_dir / FOLDER)),
        planner=planner,
        checkpoints=FolderCheckpoints(str(state_dir)),
        saboteur=LocalSaboteur(redis),
    )
    # The one that `everstep up` starts keeps its name, so that its successor need not wait for the lease.
    holder = config.supervisor.holder or f"{socket.gethostname()}:{state_dir}"
    kept = config.supervisor
    retention = Retention(kept_s=kept.keep_days * DAY_S, kept_jobs=kept.keep_jobs, archived_s=kept.archive_days * DAY_S)
    supervisor = Supervisor(
        world=world, root=str(state_dir), holder=holder, checks=True, retention=retention, rows=config.rows
    )
    if config.supervisor.metrics_port is not None:
        metrics.serve(config.supervisor.metrics_host, config.supervisor.metrics_port, Places(state_dir))
    garbage.settle()
    log.info("supervisor_started", pid=os.getpid(), ray=address)
    homeless = asyncio.create_task(_stop_when_homeless(cluster, _this_task()))
    try:
        await supervisor.serve()
    finally:
        log.info("supervisor_stopping")
        homeless.cancel()
        await planner.close()
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
