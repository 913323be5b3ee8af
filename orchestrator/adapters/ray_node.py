"""Start Ray's processes for emulated nodes, and nothing else of Ray's: a GCS, and one raylet per node.

`python -m orchestrator.adapters.ray_node` reads an Order from stdin, starts everything at once, writes the pids to stdout
and ends; what it started lives on. `ray start` would take 9 s a node on two cores and leave a dashboard, a log monitor,
an autoscaler and two agents per node running, none of which is used here. All use of Ray's private modules is in this file.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from orchestrator.domain import codec

from .processes import ProcessId, identify
from .ray_environment import NODE_MARK, WORKER_MODULE, device_resource, pin_resource, ray_labels

GCS, HEAD = "gcs", "head"
OBJECT_STORE_BYTES = 80_000_000
"""The least Ray takes comfortably; messages are small and travel inline."""
_AGENT = subprocess.list2cmdline(["sh", "-c", "exec sleep 2147483647", "agent"])
"""Ray insists on two agents per node (metrics, runtime environments) and ends the node when one of them ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOrder:
    """address: where it listens and is reached. prefix: words before its raylet's command, to run it elsewhere."""

    name: str
    kind: str
    num_devices: int
    address: str
    prefix: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadOrder:
    """A GCS on `port`, and a raylet that holds no device, for drivers to connect to.

    redis: host:port of where the GCS keeps its tables, "" for its memory. variables: for the GCS alone, how to log in there
    among them: everybody may read a command line, and user code runs below the raylets.
    """

    address: str
    port: int
    redis: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """gcs: the GCS's host:port. head: to be started first, where it does not run yet."""

    gcs: str
    temp_dir: str
    head: HeadOrder | None
    nodes: tuple[NodeOrder, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A process and the command that made it, from which another like it is made without this module."""

    process: ProcessId
    command: tuple[str, ...]


def main() -> None:
    order = codec.loads(Order, sys.stdin.read())
    with contextlib.redirect_stdout(sys.stderr):
        commands = start(order)
    found = {name: (identify(pid), command) for name, (pid, command) in commands.items()}
    dead = [name for name, (identity, _) in found.items() if identity is None or not identity.is_alive]
    if dead:
        sys.exit(f"the raylet of {', '.join(dead)} ended at once; see the logs under {order.temp_dir}")
    started = {name: Started(process=identity, command=command) for name, (identity, command) in found.items() if identity}
    print(codec.dumps(Report(started=started)).decode(), flush=True)
    # Ray's own exit hooks would end what was just started.
    os._exit(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What the program writes to stdout: by node, and "gcs" and "head" where the head was ordered."""

    started: Mapping[str, Started]


def start(order: Order) -> dict[str, tuple[int, tuple[str, ...]]]:
    """Process ids and commands by name. Returns once all are registered."""
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    class QuietNode(Node):
        """Ray's own set-up of sessions and folders, with our GCS and our raylet."""

        def __init__(self, params: Any, prefix: tuple[str, ...]) -> None:
            self.prefix = prefix
            self.gcs: tuple[int, tuple[str, ...]] | None = None
            self.made: tuple[int, tuple[str, ...]] | None = None
            super().__init__(params, head=not params.gcs_address, shutdown_at_exit=False, spawn_reaper=False)

        def start_api_server(self, **_: Any) -> None:
            """None is wanted."""

        def start_gcs_server(self) -> None:
            assert order.head is not None
            command = _gcs_command(self, order.head)
            process = self._launch(command, GCS, order.head.variables)
            self.gcs = (process.pid, command)
            # Where Ray looks for it while it waits for an answer.
            self.all_processes["gcs_server"] = [SimpleNamespace(process=process)]
            self._gcs_address = order.gcs

        def start_raylet(
            self,
            plasma_directory: str,
            fallback_directory: str,
            object_store_memory: int,
            use_valgrind: bool = False,
            use_profiler: bool = False,
        ) -> None:
            raylet = _raylet_command(self, plasma_directory, fallback_directory, object_store_memory)
            command = (*self.prefix, *raylet)
            self.made = (self._launch(command, f"raylet-{self._ray_params.node_name}", {}).pid, command)

        def _launch(self, command: tuple[str, ...], name: str, variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
            env = {**os.environ, NODE_MARK: str(self._ray_params.node_name), **variables}
            return launch_detached(command, Path(self._logs_dir) / f"{name}.log", env)

    def launch(name: str, address: str, node: NodeOrder | None) -> Any:
        resources: dict[str, float] = (
            {} if node is None else {pin_resource(name): 1, device_resource(name): node.num_devices}
        )
        labels = {} if node is None else ray_labels(node.kind, node.num_devices, node.labels)
        sockets = Path(order.temp_dir) / "sockets"
        sockets.mkdir(exist_ok=True)
        params = RayParams(
            node_ip_address=address,
            node_name=name,
            num_cpus=0,
            num_gpus=0,
            memory=1 << 30,
            resources=resources,
            labels=labels,
            object_store_memory=OBJECT_STORE_BYTES,
            gcs_server_port=order.head.port if node is None and order.head else None,
            gcs_address=None if node is None else order.gcs,
            temp_dir=order.temp_dir,
            raylet_socket_name=str(sockets / f"{name}.raylet"),
            plasma_store_socket_name=str(sockets / f"{name}.store"),
            include_dashboard=False,
            include_log_monitor=False,  # type: ignore[arg-type]
            no_monitor=True,
        )
        return QuietNode(params, node.prefix if node else ())

    commands: dict[str, tuple[int, tuple[str, ...]]] = {}
    if order.head is not None:
        head = launch(HEAD, order.head.address, None)
        commands = {GCS: head.gcs, HEAD: head.made}
    with ThreadPoolExecutor(max_workers=8) as pool:
        launched = pool.map(lambda node: (node.name, launch(node.name, node.address, node)), order.nodes)
        return commands | {name: node.made for name, node in launched}


def launch_detached(command: Sequence[str], log: Path, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    with log.open("ab") as out:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True, env=dict(env)
        )


def another(command: tuple[str, ...]) -> tuple[str, ...]:
    """The command of a raylet that takes the place of one that ended: Ray wants it to have an id of its own."""
    return tuple(f"--node_id={secrets.token_hex(28)}" if word.startswith("--node_id=") else word for word in command)


def _gcs_command(node: Any, head: HeadOrder) -> tuple[str, ...]:
    """As Ray's services.start_gcs_server builds it."""
    import ray
    from ray._private import services

    config: str = services.serialize_config(node._config)  # type: ignore[no-untyped-call]
    flags = {
        "log_dir": node._logs_dir,
        "config_list": config,
        "gcs_server_port": str(head.port),
        "metrics-agent-port": "-1",
        "node-ip-address": head.address,
        "session-name": node.session_name,
        "ray-commit": ray.__commit__,
        "session-dir": node._session_dir,
        "node-id": node._node_id,
    }
    if head.redis:
        host, _, port = head.redis.rpartition(":")
        flags |= {"redis_address": host, "redis_port": port, "redis_enable_ssl": "false", "fromenv": "redis_password"}
    return (services.GCS_SERVER_EXECUTABLE, *_flags(flags))


def _raylet_command(node: Any, plasma_directory: str, fallback_directory: str, object_store_memory: int) -> tuple[str, ...]:
    """As Ray's services.start_raylet builds it, less logs, agents and other languages."""
    from ray._private import services

    params, spec = node._ray_params, node.get_resource_and_label_spec()
    common = {"gcs-address": node.gcs_address, "session-name": node.session_name, "cluster-id": node.cluster_id.hex()}
    worker = {
        "node-ip-address": params.node_ip_address,
        "node-manager-port": "RAY_NODE_MANAGER_PORT_PLACEHOLDER",
        "object-store-name": params.plasma_store_socket_name,
        "raylet-name": params.raylet_socket_name,
        "redis-address": "None",
        "metrics-agent-port": "-1",
        "runtime-env-agent-port": "0",
        "logging-rotate-bytes": str(1 << 24),
        "logging-rotate-backup-count": "1",
        "temp-dir": node.temp_dir,
        "webui": "",
        "worker-preload-modules": WORKER_MODULE,
        **common,
    }
    worker_command = [sys.executable, params.setup_worker_path, params.worker_path, *_flags(worker)]
    raylet = {
        "raylet_socket_name": params.raylet_socket_name,
        "store_socket_name": params.plasma_store_socket_name,
        "object_manager_port": "0",
        "min_worker_port": "0",
        "max_worker_port": "0",
        "node_manager_port": "0",
        "node_id": node._node_id,
        "node_ip_address": params.node_ip_address,
        "maximum_startup_concurrency": "2",
        "num_prestart_python_workers": "0",
        "static_resource_list": ",".join(f"{name},{amount}" for name, amount in spec.to_resource_dict().items()),
        "python_worker_command": subprocess.list2cmdline([*worker_command, "RAY_WORKER_DYNAMIC_OPTION_PLACEHOLDER"]),
        "java_worker_command": "",
        "cpp_worker_command": "",
        "native_library_path": services.DEFAULT_NATIVE_LIBRARY_PATH,
        "temp_dir": node.temp_dir,
        "session_dir": node._session_dir,
        "log_dir": node._logs_dir,
        "resource_dir": node._runtime_env_dir,
        # Ports nobody unprivileged can listen on; -1 says there are no metrics.
        "metrics-agent-port": "-1",
        "metrics_export_port": "1",
        "runtime_env_agent_port": "1",
        "dashboard_agent_listen_port": "1",
        "dashboard_agent_command": _AGENT,
        "runtime_env_agent_command": _AGENT,
        "object_store_memory": str(object_store_memory),
        "plasma_directory": plasma_directory,
        "fallback_directory": fallback_directory,
        "ray-debugger-external": "0",
        "labels": json.dumps(spec.labels),
        "node-name": params.node_name,
        **common,
    }
    return (services.RAYLET_EXECUTABLE, *_flags(raylet), *(["--head"] if node.is_head() else []))


def _flags(values: dict[str, str]) -> list[str]:
    return [f"--{name}={value}" for name, value in values.items()]


if __name__ == "__main__":
    main()
