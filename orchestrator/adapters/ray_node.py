"""Start Ray's processes for emulated nodes, and nothing else of Ray's: a GCS, and one raylet per node.

`python -m orchestrator.adapters.ray_node` reads an Order from stdin, starts everything at once, writes the pids to stdout
and ends; what it started lives on. `ray start` would take 9 s a node on two cores and leave a dashboard, a log monitor,
an autoscaler and two agents per node running, none of which is used here. All use of Ray's private modules is in this file.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.domain import codec

from .processes import identify
from .ray_environment import NODE_MARK, device_resource, pin_resource, ray_labels

HEAD = "head"
OBJECT_STORE_BYTES = 80_000_000
"""The least Ray takes comfortably; messages are small and travel inline."""
_AGENT = subprocess.list2cmdline(["sh", "-c", "exec sleep 2147483647", "agent"])
"""Ray insists on two agents per node (metrics, runtime environments) and ends the node when one of them ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOrder:
    name: str
    kind: str
    num_devices: int
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """head_port: start a GCS there first, with a raylet that holds no device, for drivers to connect to."""

    address: str
    temp_dir: str
    head_port: int | None
    nodes: tuple[NodeOrder, ...]


def main() -> None:
    order = codec.loads(Order, sys.stdin.read())
    with contextlib.redirect_stdout(sys.stderr):
        pids = start(order)
    found = {name: identify(pid) for name, pid in pids.items()}
    dead = [name for name, identity in found.items() if identity is None or not identity.is_alive]
    if dead:
        sys.exit(f"the raylet of {', '.join(dead)} ended at once; see the logs under {order.temp_dir}")
    print(json.dumps({name: asdict(identity) for name, identity in found.items() if identity}), flush=True)
    # Ray's own exit hooks would end what was just started.
    os._exit(0)


def start(order: Order) -> dict[str, int]:
    """Process ids by name ("gcs" and "head" too, where the head was ordered). Returns once all are registered."""
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    class QuietNode(Node):
        """Ray's own set-up of sessions, folders and the GCS, with our raylet."""

        def start_api_server(self, **_: Any) -> None:
            """None is wanted."""

        def start_raylet(
            self,
            plasma_directory: str,
            fallback_directory: str,
            object_store_memory: int,
            use_valgrind: bool = False,
            use_profiler: bool = False,
        ) -> Any:
            params = self._ray_params
            command = _raylet_command(self, plasma_directory, fallback_directory, object_store_memory)
            with (Path(self._logs_dir) / f"raylet-{params.node_name}.log").open("ab") as log:
                self.raylet = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    env={**os.environ, **(params.env_vars or {})},
                )

    def launch(name: str, node: NodeOrder | None, address: str | None) -> Any:
        resources: dict[str, float] = (
            {} if node is None else {pin_resource(name): 1, device_resource(name): node.num_devices}
        )
        labels = {} if node is None else ray_labels(node.kind, node.num_devices, node.labels)
        sockets = Path(order.temp_dir) / "sockets"
        sockets.mkdir(exist_ok=True)
        params = RayParams(
            node_ip_address="127.0.0.1",
            node_name=name,
            num_cpus=0,
            num_gpus=0,
            memory=1 << 30,
            resources=resources,
            labels=labels,
            object_store_memory=OBJECT_STORE_BYTES,
            gcs_server_port=order.head_port if node is None else None,
            gcs_address=address,
            temp_dir=order.temp_dir,
            raylet_socket_name=str(sockets / f"{name}.raylet"),
            plasma_store_socket_name=str(sockets / f"{name}.store"),
            env_vars={NODE_MARK: name},
            include_dashboard=False,
            include_log_monitor=False,  # type: ignore[arg-type]
            no_monitor=True,
        )
        return QuietNode(params, head=node is None, shutdown_at_exit=False, spawn_reaper=False)

    pids: dict[str, int] = {}
    if order.head_port is not None:
        head = launch(HEAD, None, None)
        pids = {"gcs": head.all_processes["gcs_server"][0].process.pid, HEAD: head.raylet.pid}
    with ThreadPoolExecutor(max_workers=8) as pool:
        launched = pool.map(lambda node: (node.name, launch(node.name, node, order.address)), order.nodes)
        return pids | {name: node.raylet.pid for name, node in launched}


def _raylet_command(node: Any, plasma_directory: str, fallback_directory: str, object_store_memory: int) -> list[str]:
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
    return [services.RAYLET_EXECUTABLE, *_flags(raylet), *(["--head"] if node.is_head() else [])]


def _flags(values: dict[str, str]) -> list[str]:
    return [f"--{name}={value}" for name, value in values.items()]


if __name__ == "__main__":
    main()
