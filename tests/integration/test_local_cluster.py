"""`deploy.local`: everything comes up, what dies is started again, and nothing is left when it goes down.

Run with -s to see what was measured.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from api.client.credentials import headers_for
from deploy.keeper import API, KEEPER, SUPERVISOR
from deploy.local import LocalCluster, NodeSpec, down, status, up
from deploy.settings import Places
from orchestrator.adapters import ray_environment
from orchestrator.adapters.embedded_redis import EmbeddedRedis
from orchestrator.adapters.local_nodes import LocalNodes
from orchestrator.adapters.processes import ProcessId, marked, wait_for_end
from orchestrator.adapters.ray_environment import CLUSTER_MARK
from orchestrator.adapters.ray_node import GCS
from orchestrator.domain.errors import Conflict
from orchestrator.domain.ids import NodeId

pytestmark = pytest.mark.timeout(420)


@pytest.fixture(scope="module")
def state_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("local")
    yield directory
    down(directory)
    assert left_of(directory) == ()


@pytest.fixture(scope="module")
def cluster(state_dir: Path) -> LocalCluster:
    said: list[str] = []
    running = up(state_dir, [NodeSpec("A100", 2)], say=said.append)
    print("", *said, sep="\n")
    return running


def left_of(state_dir: Path) -> tuple[ProcessId, ...]:
    return marked({CLUSTER_MARK: ray_environment.for_state_dir(state_dir).cluster})


def get(url: str, timeout_s: float = 20, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    asked = urllib.request.Request(url, data, {"Content-Type": "application/json", **headers_for(url)})
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(asked, timeout=timeout_s) as answer:
        return json.load(answer)


def seconds_until_ready(cluster: LocalCluster, within_s: float = 120) -> float:
    began = time.monotonic()
    while time.monotonic() - began < within_s:
        try:
            get(f"{cluster.url}/readyz")
            return time.monotonic() - began
        except (OSError, ValueError):
            time.sleep(0.05)
    pytest.fail(f"not ready within {within_s} s")


def process_of(state_dir: Path, name: str) -> ProcessId:
    match name:
        case "redis":
            process = EmbeddedRedis(state_dir).process
        case "gcs":
            process = LocalNodes(state_dir).head(GCS)
        case _:
            process = Places(state_dir).process(name)
    assert process is not None, f"{name} does not run"
    return process


def process_within(state_dir: Path, name: str, within_s: float = 120) -> ProcessId:
    """It may just be started again."""
    deadline = time.monotonic() + within_s
    while True:
        try:
            return process_of(state_dir, name)
        except AssertionError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_up_is_ready_and_says_where(cluster: LocalCluster, state_dir: Path) -> None:
    assert get(f"{cluster.url}/readyz")["status"] == "ok"
    assert [node["kind"] for node in get(f"{cluster.url}/api/v1/nodes")] == ["A100"]
    server = json.loads((state_dir / "server.json").read_text())
    assert server["url"] == cluster.url and server["pid"] == process_of(state_dir, KEEPER).pid
    running = status(state_dir)
    assert None not in running["processes"].values() and None not in running["nodes"].values()  # type: ignore[attr-defined]
    again = up(state_dir, [NodeSpec("A100", 2)])
    assert again == cluster


@pytest.mark.parametrize("name", [API, SUPERVISOR, "redis"])
def test_what_is_killed_is_started_again(cluster: LocalCluster, state_dir: Path, name: str) -> None:
    seconds_until_ready(cluster)
    victim = process_of(state_dir, name)
    victim.send(signal.SIGKILL)
    assert wait_for_end([victim], 30)
    began = time.monotonic()
    replaced = process_within(state_dir, name)
    assert replaced.pid != victim.pid
    # The lease outlives the supervisor that held it, so readiness alone would not show a new one.
    print(f"\n{name} killed -> another after {time.monotonic() - began:.2f} s, ready after", end=" ")
    print(f"{seconds_until_ready(cluster) + time.monotonic() - began:.2f} s")


def test_api_ends_within_seconds_while_a_stream_is_open(cluster: LocalCluster, state_dir: Path) -> None:
    seconds_until_ready(cluster)
    text = state_dir / "text.txt"
    text.write_text("some words to learn from\n" * 400)
    job = {
        "name": "waits",
        "program": "causal_lm",
        "data": {"files": [str(text)]},
        "model": {"layers": 2, "width": 32, "heads": 2, "ffn": 64},
        "train": {"steps": 5, "micro_batches": 8, "micro_batch_size": 1, "sequence": 32},
        "parallel": {"tp": 1, "pp": 1, "dp": 8},
    }
    id = get(f"{cluster.url}/api/v1/jobs", body=job)["id"]
    host, port = cluster.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as reader:
        reader.sendall(
            f"GET /api/v1/jobs/{id}/events HTTP/1.1\r\nHost: {host}\r\nAccept: text/event-stream\r\n"
            f"Authorization: Bearer {cluster.token}\r\n\r\n".encode()
        )
        seen = b""
        while b"submitted" not in seen:
            more = reader.recv(4096)
            assert more, seen
            seen += more
        api = process_of(state_dir, API)
        began = time.monotonic()
        api.send(signal.SIGTERM)
        assert wait_for_end([api], 30), "it still holds on to the stream"
        print(f"\nAPI with an open stream ended after {time.monotonic() - began:.2f} s")
    seconds_until_ready(cluster)


def test_node_is_added_while_the_head_is_away(cluster: LocalCluster, state_dir: Path) -> None:
    """Whoever brings the head back must not wait for the start of a node, which waits for the head."""
    seconds_until_ready(cluster)
    head = process_within(state_dir, GCS)
    head.send(signal.SIGKILL)
    assert wait_for_end([head], 30)
    began = time.monotonic()
    name = cluster.add_node("H100", 1)
    print(f"\nGCS killed -> a node is added after {time.monotonic() - began:.2f} s")
    assert LocalNodes(state_dir).is_alive(NodeId(name))
    assert process_of(state_dir, GCS) != head
    cluster.kill_node(name)


def test_node_is_added_and_killed(cluster: LocalCluster, state_dir: Path) -> None:
    seconds_until_ready(cluster)
    name = cluster.add_node("H100", 1)
    assert name == "h100-2"
    cluster.kill_node(name)
    deadline = time.monotonic() + 90
    while {node["id"]: node["status"] for node in get(f"{cluster.url}/api/v1/nodes")}.get(name) not in ("LOST", None):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_machine_joins_leaves_when_told_and_is_lost_when_killed(
    cluster: LocalCluster, state_dir: Path, tmp_path: Path
) -> None:
    """As its user does it: `everstep join` in a process that is sent signals, on the machine of the cluster itself."""
    seconds_until_ready(cluster)
    nodes = LocalNodes(state_dir)
    address, token = nodes.registry().address, nodes.environment.token_file
    command = [sys.executable, "-m", "api.cli", "join", address, "--token-file", str(token), "--kind", "H100"]
    command += ["--devices", "2", "--name", "guest", "--state-dir", str(tmp_path)]
    for way in (signal.SIGTERM, signal.SIGKILL):
        guest = subprocess.Popen(command)
        try:
            seen = node_within(
                cluster,
                "guest",
                lambda view: view is not None and (view["status"], view["admission"]) == ("UP", "admitted"),
            )
            assert (seen["kind"], seen["num_devices"]) == ("H100", 2) and "a sum of" in seen["checked"]
            guest.send_signal(way)
            assert guest.wait(120) == (0 if way is signal.SIGTERM else -way)
            node_within(cluster, "guest", lambda view: view is None or view["status"] == "LOST")
        finally:
            guest.kill()
            guest.wait()
            LocalNodes(tmp_path).stop()


def node_within(cluster: LocalCluster, node: str, is_so: Callable[[Any], bool], within_s: float = 120) -> Any:
    """The node once it is as wanted; None where it is wanted to be gone."""
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        view = next((one for one in get(f"{cluster.url}/api/v1/nodes") if one["id"] == node), None)
        if is_so(view):
            return view
        time.sleep(0.1)
    pytest.fail(f"{node} is {view} after {within_s} s")


def test_down_stops_what_it_started_and_nothing_else_and_up_takes_up_the_jobs(
    cluster: LocalCluster, state_dir: Path
) -> None:
    jobs = [job["id"] for job in get(f"{cluster.url}/api/v1/jobs")["jobs"]]
    assert jobs
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], cwd=state_dir) as bystander:
        try:
            began = time.monotonic()
            cluster.down()
            print(f"\ndown: {time.monotonic() - began:.2f} s")
            assert left_of(state_dir) == ()
            assert bystander.poll() is None
        finally:
            bystander.kill()
    assert not (state_dir / "server.json").exists()
    assert not ray_environment.for_state_dir(state_dir).temp_dir.exists()
    cluster.down()  # again: no error
    began = time.monotonic()
    second = up(state_dir, [NodeSpec("A100", 2)])
    print(f"up with one node: {time.monotonic() - began:.2f} s")
    assert [job["id"] for job in get(f"{second.url}/api/v1/jobs")["jobs"]] == jobs


def test_up_after_everything_was_killed_cleans_up_and_starts(cluster: LocalCluster, state_dir: Path) -> None:
    """Nodes that live are taken up instead: test_head_loss.py."""
    before = left_of(state_dir)
    killed = [process_of(state_dir, name) for name in (KEEPER, SUPERVISOR, "redis")]
    killed += [node.raylet for node in LocalNodes(state_dir).registry().nodes.values()]
    for process in killed:
        process.send(signal.SIGKILL)
    assert wait_for_end(killed, 30)
    said: list[str] = []
    running = up(state_dir, [NodeSpec("A100", 2)], say=said.append)
    assert "of an earlier cluster are still here" in said[0]
    seconds_until_ready(running)
    assert not set(before) & set(left_of(state_dir))


def test_taken_port_is_said_in_words_and_nothing_is_left(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(Conflict, match="taken by another program"):
        up(tmp_path, [NodeSpec("A100", 1)], port=taken.getsockname()[1])
    assert left_of(tmp_path) == ()
