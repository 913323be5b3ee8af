"""The one place that says how this project's processes speak to Ray: where, with which token, and what is turned off.

Nothing is left to Ray's defaults: those follow whatever ran last on a machine, and a cluster started on a clean home is
open to everybody. The variables must be set before ray is imported.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from orchestrator.domain.errors import Conflict

from .processes import write_private

NAMESPACE = "everstep"
STORAGE_KEYS = f"RAY{NAMESPACE}*"
"""Where the GCS keeps its tables in Redis."""
CLUSTER_MARK, NODE_MARK = "EVERSTEP_CLUSTER", "EVERSTEP_NODE"
"""Inherited by every process of a cluster, and of a node: how they are found when they must go."""
WORKER_MODULE = f"{__package__}.ray_worker"
"""Imported in the main thread of every worker process before it is Ray's."""

KIND_LABEL, DEVICES_LABEL = "everstep.kind", "everstep.devices"
_OWN_LABELS = "everstep.label."
"""Before the name of each label that users know."""

_SETTINGS = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_memory_monitor_refresh_ms": "0",  # hosts judge out-of-memory themselves
    # Ray ends whatever it has declared dead, so its patience is longer than the longest isolation a host survives by
    # default: silence is no evidence. A node that ended is known within a second, see reach.py.
    "RAY_health_check_period_ms": "10000",
    "RAY_health_check_failure_threshold": "90",
    # The same the other way round: nobody ends because the GCS is away, and everybody finds it soon when it is back.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "86400",
    "RAY_gcs_failover_worker_reconnect_timeout": "900",
    "RAY_gcs_grpc_max_reconnect_backoff_ms": "500",
    "RAY_worker_niceness": "0",  # 15 otherwise: hosts and ranks would run behind everything else on the machine
    # Nobody reads these, and each costs every node some of its CPU.
    "RAY_task_events_report_interval_ms": "0",
    "RAY_enable_timeline": "0",
    "RAY_event_stats": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_emit_main_service_metrics": "0",
    "RAY_metrics_report_interval_ms": "3600000",
    "RAY_BACKEND_LOG_LEVEL": "warning",
    # Timers of five to ten times a second in every raylet, for objects, idle workers, files and memory that are not there:
    # no object is ever stored, and a host is the only worker of its node. Together a third of what Ray costs a machine.
    "RAY_raylet_check_gc_period_milliseconds": "60000",
    "RAY_object_manager_timer_freq_ms": "60000",
    "RAY_object_manager_rpc_threads_num": "1",
    "RAY_local_fs_monitor_interval_ms": "60000",
    "RAY_kill_idle_workers_interval_ms": "5000",
    "RAY_raylet_report_resources_period_milliseconds": "500",  # a device that becomes free is seen that much later
    "RAY_gcs_pull_resource_loads_period_milliseconds": "60000",  # for an autoscaler
    "RAY_io_context_monitor_probe_interval_ms": "10000",
    "RAY_core_worker_internal_heartbeat_ms": "5000",
    "RAY_report_worker_backlog_interval_ms": "60000",
    "RAY_gcs_redis_heartbeat_interval_milliseconds": "500",
    # Despite its name: without it Ray replaces 127.0.0.1 by the machine's outer address and listens there.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RayEnvironment:
    """Of one cluster. temp_dir is short: Ray puts Unix sockets there, whose paths hold 107 bytes."""

    cluster: str
    token_file: Path
    temp_dir: Path

    def variables(self, base: Mapping[str, str], node: str | None = None) -> dict[str, str]:
        """`base` with everything Ray must know, and the marks."""
        kept = {name: value for name, value in base.items() if not name.startswith("RAY_")}
        marks = {CLUSTER_MARK: self.cluster} | ({NODE_MARK: node} if node else {})
        return kept | _SETTINGS | {"RAY_AUTH_TOKEN_PATH": str(self.token_file)} | marks

    def apply(self) -> None:
        """To this process, unmarked: it is a visitor, and so is what it starts."""
        for name in [name for name in os.environ if name.startswith("RAY_")]:
            del os.environ[name]
        os.environ.update({name: value for name, value in self.variables({}).items() if name != CLUSTER_MARK})


def storage_variables(redis: str, password: str | None) -> dict[str, str]:
    """For a GCS that keeps its tables in this Redis (host:port), under keys of its own."""
    login = {"FLAGS_redis_password": password} if password else {}
    return {"RAY_REDIS_ADDRESS": redis, "RAY_external_storage_namespace": NAMESPACE} | login


def for_state_dir(state_dir: Path) -> RayEnvironment:
    """The same for every process under one state directory; touches no disk."""
    state_dir = state_dir.resolve()
    digest = hashlib.sha256(str(state_dir).encode()).hexdigest()[:10]
    root = Path(tempfile.gettempdir())
    if len(str(root)) > 12:
        root = Path("/tmp")
    return RayEnvironment(
        cluster=digest, token_file=state_dir / "ray" / "token", temp_dir=root / f"everstep-{os.getuid()}-{digest}"
    )


def prepare(environment: RayEnvironment) -> None:
    """Make the token, once, and the folder for sockets. Raises Conflict where that belongs to somebody else."""
    environment.token_file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not environment.token_file.exists():
        write_private(environment.token_file, secrets.token_hex(32))
    environment.temp_dir.mkdir(mode=0o700, exist_ok=True)
    found = environment.temp_dir.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise Conflict(f"{environment.temp_dir} is not a folder only you can enter; remove it")


def ray_labels(kind: str, num_devices: int, labels: Mapping[str, str]) -> dict[str, str]:
    """What Ray is told of a node."""
    own = {f"{_OWN_LABELS}{name}": value for name, value in labels.items()}
    return {KIND_LABEL: kind, DEVICES_LABEL: str(num_devices), **own}


def own_labels(found: Mapping[str, str]) -> dict[str, str]:
    """Those that users know among what Ray says of a node."""
    return {name.removeprefix(_OWN_LABELS): value for name, value in found.items() if name.startswith(_OWN_LABELS)}


def pin_resource(node: str) -> str:
    """Of which a node has 1: what is asked for a little of must run there."""
    return f"everstep-node-{node}"


def device_resource(node: str) -> str:
    """Of which a node has as many as devices."""
    return f"everstep-devices-{node}"
