"""A whole local cluster: `python -m deploy.local up|down|status --state-dir D [--nodes A100:2,H100:2] [--port 0]`.

up starts an embedded Redis, Ray with emulated nodes, the supervisor, the API and a keeper that restarts what dies, each in
a session of its own, and returns once everything is ready. down stops all of that and nothing else. Jobs and checkpoints
stay in the state directory and are taken up by the next up.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from api.client.credentials import forget_server, note_server
from orchestrator.adapters.embedded_redis import EmbeddedRedis, free_port, is_taken
from orchestrator.adapters.local_nodes import LOOPBACK, LocalNodes, NodeSpec, parse_nodes
from orchestrator.adapters.processes import ProcessId, end, exclusively, marked
from orchestrator.adapters.ray_environment import CLUSTER_MARK
from orchestrator.domain.errors import Conflict, EverstepError, Unavailable
from orchestrator.domain.ids import NodeId
from worker.confinement import may_show_views

from . import configured
from .keeper import API, KEEPER, SUPERVISOR, start_detached, without_ray
from .owner import own_token
from .settings import Places, Server

__all__ = ["LocalCluster", "NodeSpec", "down", "up"]

FLAGS = ("local.nodes", "api.port", "local.address", "api.chaos")
_NO_VIEWS = (
    "root has no right to mount here (CAP_SYS_ADMIN): jobs that need what lies in closed folders are refused; "
    "chmod a+x those, or run jobs as root with --set jobs.user=service"
)
READY_S = 90.0
STOP_S = 6.0
"""For the supervisor to let go of its lease and for the API to end its streams."""
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class LocalCluster:
    """A running cluster; any process may hold one of these for the same state directory."""

    url: str
    state_dir: Path

    @property
    def token(self) -> str:
        """Its owner's."""
        return own_token(self.state_dir)

    def kill_node(self, name: str) -> None:
        """Every process of it, at once. Raises NotFound."""
        LocalNodes(self.state_dir).kill_now(NodeId(name))

    def add_node(self, kind: str, num_devices: int = 2, labels: Mapping[str, str] | None = None) -> str:
        return asyncio.run(LocalNodes(self.state_dir).add(kind, num_devices, labels))

    def down(self) -> None:
        down(self.state_dir)


def up(
    state_dir: Path,
    nodes: Sequence[NodeSpec],
    *,
    port: int = 0,
    address: str = LOOPBACK,
    chaos: bool = False,
    settings: Sequence[str] = (),
    say: Say = lambda _: None,
) -> LocalCluster:
    """Ready when this returns; where it runs already, that one. Raises EverstepError, having stopped what it started.

    Nodes that outlived everything else (their head, the keeper) are taken up as they are, with the jobs that train there.
    address: where Ray's head listens, for nodes that are not on loopback; Redis and the API stay there. chaos:
    users may cause faults on purpose. settings: flags that the supervisor and the API are started with.
    """
    places = Places(state_dir.resolve())
    places.create()
    with exclusively(places.lock):
        server = Server.read(places.server)
        if server and places.process(KEEPER):
            say(f"already running at {server.url}")
            return LocalCluster(server.url, places.state_dir)
        if server and _living_nodes(places):
            return _take_up(places, server, chaos, settings, say)
        if left := _processes(places):
            say(f"{len(left)} processes of an earlier cluster are still here; stopping them first")
        _stop(places)
        try:
            return _start(places, nodes, port, address, chaos, settings, say)
        except BaseException:
            _stop(places)
            raise


def down(state_dir: Path, say: Say = lambda _: None) -> None:
    """Idempotent. Raises Unavailable where something does not end."""
    places = Places(state_dir.resolve())
    if not places.state_dir.exists():
        say(f"nothing was ever started from {places.state_dir}")
        return
    places.create()
    with exclusively(places.lock):
        count = len(_processes(places))
        _stop(places)
        say(f"stopped {count} processes" if count else "nothing was running")


def status(state_dir: Path) -> dict[str, object]:
    """What runs, by name."""
    places = Places(state_dir.resolve())
    server = Server.read(places.server) if places.process(KEEPER) else None
    redis = EmbeddedRedis(places.state_dir).process
    registry = LocalNodes(places.state_dir).registry()
    return {
        "url": server.url if server else None,
        "processes": {
            **{name: _pid(places.process(name)) for name in (KEEPER, SUPERVISOR, API)},
            "redis": _pid(redis),
            **{name: _pid(process if process.is_alive else None) for name, process in registry.head.items()},
        },
        "nodes": {name: _pid(node.raylet if node.raylet.is_alive else None) for name, node in registry.nodes.items()},
    }


# --- up -------------------------------------------------------------------------------------------------------------------


def _start(
    places: Places,
    specs: Sequence[NodeSpec],
    port: int,
    address: str,
    chaos: bool,
    settings: Sequence[str],
    say: Say,
) -> LocalCluster:
    began = time.monotonic()
    if port and is_taken(port):
        raise Conflict(f"port {port} is taken by another program; choose another, or 0 for any")
    port = port or free_port()
    nodes, redis = LocalNodes(places.state_dir), EmbeddedRedis(places.state_dir)
    storage = redis.start(without_ray() | {CLUSTER_MARK: nodes.environment.cluster})
    say(f"redis      ready after {time.monotonic() - began:.1f} s")
    _start_keeper(places, port, chaos, settings)
    nodes.start(specs, address=address, storage=storage)
    say(f"nodes      {', '.join(nodes.registry().nodes) or 'none'} after {time.monotonic() - began:.1f} s")
    if address != LOOPBACK:
        say(f"machines   join by: everstep join {nodes.registry().address} --token-file {nodes.environment.token_file}")
    return _serve(places, f"http://{LOOPBACK}:{port}", len(specs), began, say)


def _take_up(places: Places, server: Server, chaos: bool, settings: Sequence[str], say: Say) -> LocalCluster:
    """Everything but the nodes anew: what they say to the head is kept in Redis, and they know its address."""
    began, living = time.monotonic(), _living_nodes(places)
    say(f"{', '.join(living)} still run; taking them up")
    EmbeddedRedis(places.state_dir).start(without_ray() | {CLUSTER_MARK: LocalNodes(places.state_dir).environment.cluster})
    _start_keeper(places, int(server.url.rpartition(":")[2]), chaos, settings)
    return _serve(places, server.url, len(living), began, say)


def _start_keeper(places: Places, port: int, chaos: bool, settings: Sequence[str]) -> None:
    command = [sys.executable, "-m", "deploy.keeper", "--state-dir", str(places.state_dir), "--port", str(port)]
    command += ["--chaos"] if chaos else []
    command += ["--", *settings]
    cluster = LocalNodes(places.state_dir).environment.cluster
    start_detached(places, KEEPER, command, without_ray() | {CLUSTER_MARK: cluster})


def _serve(places: Places, url: str, num_nodes: int, began: float, say: Say) -> LocalCluster:
    _until_ready(places, url, num_nodes, began, say)
    keeper = places.process(KEEPER)
    assert keeper is not None  # looked at in _until_ready
    Server(url=url, pid=keeper.pid, state_dir=str(places.state_dir)).write(places.server)
    note_server(url, places.state_dir)
    _, code = _get(f"{url}/api/v1/session/codes", places, "POST")
    if isinstance(code, dict) and "path" in code:
        say(f"dashboard  {url}{code['path']}  (signs a browser in, once, within ten minutes; again: everstep login)")
    return LocalCluster(url, places.state_dir)


def _living_nodes(places: Places) -> list[str]:
    return [name for name, node in LocalNodes(places.state_dir).registry().nodes.items() if node.raylet.is_alive]


def _until_ready(places: Places, url: str, num_nodes: int, began: float, say: Say) -> None:
    deadline, problem = time.monotonic() + READY_S, "the API does not answer"
    while time.monotonic() < deadline:
        if places.process(KEEPER) is None:
            raise Unavailable(f"the keeper ended: {places.last_words(KEEPER)}")
        ready, body = _get(f"{url}/readyz")
        if not ready:
            problem = str(body.get("detail", body)) if isinstance(body, dict) else str(body)
        else:
            _, listed = _get(f"{url}/api/v1/nodes", places)
            seen, unknown = _looked_at(listed if isinstance(listed, list) else [], say)
            if seen >= num_nodes and not unknown:
                say(f"supervisor and API ready after {time.monotonic() - began:.1f} s: {url}")
                return
            problem = f"{seen} of {num_nodes} nodes are known to the supervisor and {unknown} are being checked"
        time.sleep(0.05)
    words = "; ".join(f"{name}: {places.last_words(name)}" for name in (KEEPER, SUPERVISOR, API))
    raise Unavailable(f"not ready after {READY_S:g} s: {problem}. Last words: {words}")


def _looked_at(nodes: Sequence[Mapping[str, object]], say: Say) -> tuple[int, int]:
    """How many nodes are up, and how many of them are being checked."""
    here = [node for node in nodes if node.get("status") == "UP"]
    unknown = sum(node.get("admission") not in ("admitted", "refused") for node in here)
    for node in here if not unknown else ():
        if node.get("admission") == "refused":
            say(f"{node.get('id')} is refused: {node.get('admission_reason')}")
    return len(here), unknown


def _get(url: str, places: Places | None = None, method: str = "GET") -> tuple[bool, object]:
    """Whether it was answered with success, and the JSON of the answer or what went wrong. places: whose token is shown."""
    headers = {"Authorization": f"Bearer {own_token(places.state_dir)}"} if places else {}
    try:
        asked = urllib.request.Request(url, headers=headers, method=method)
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(asked, timeout=2) as answer:
            return True, json.load(answer)
    except urllib.error.HTTPError as error:
        try:
            return False, json.load(error)
        except ValueError:
            return False, str(error)
    except (OSError, ValueError) as error:
        return False, str(error)


# --- down -----------------------------------------------------------------------------------------------------------------


def _stop(places: Places) -> None:
    """First who would start others again, then who uses others, then the others."""
    if (server := Server.read(places.server)) is not None:
        forget_server(server.url)
    places.server.unlink(missing_ok=True)
    for names in ((KEEPER,), (API, SUPERVISOR)):
        if not end([process for name in names if (process := places.process(name))], STOP_S):
            raise Unavailable(f"{' and '.join(names)} do not end; look at what blocks them")
        for name in names:
            places.pid_file(name).unlink(missing_ok=True)
    LocalNodes(places.state_dir).stop()
    EmbeddedRedis(places.state_dir).stop()
    if left := _processes(places):
        end(left, grace_s=0)
    if left := _processes(places):
        raise Unavailable(f"processes {[process.pid for process in left]} do not end; look at what blocks them")


def _processes(places: Places) -> tuple[ProcessId, ...]:
    return marked({CLUSTER_MARK: LocalNodes(places.state_dir).environment.cluster})


def _pid(process: ProcessId | None) -> int | None:
    return process.pid if process else None


def main() -> int:
    parser = configured.parser("A local cluster with emulated nodes.", FLAGS, "everstep")
    parser.add_argument("action", choices=("up", "down", "status"))
    parser.add_argument("--json", action="store_true", help="what runs then, machine-readable; words go to stderr")
    asked = parser.parse_args()
    config = configured.resolved(asked).config
    say = partial(print, file=sys.stderr) if asked.json else print
    try:
        if asked.action == "up":
            local, api = config.local, config.api
            configured.tell_jobs(config)
            nodes = parse_nodes(local.nodes)
            if config.jobs.user == "own" and os.geteuid() == 0 and not may_show_views():
                say(_NO_VIEWS)
            passed = configured.passed_on(asked)
            up(config.root, nodes, port=api.port, address=local.address, chaos=api.chaos, settings=passed, say=say)
        elif asked.action == "down":
            down(config.root, say=say)
        if asked.json or asked.action == "status":
            print(json.dumps(status(config.root), indent=2))
    except EverstepError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
