"""A real local cluster: nodes that start, are added and are killed; hosts that are opened, found again and lost.

Run with -s to see what was measured.
"""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import subprocess
import sys
import textwrap
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from orchestrator.adapters.local_nodes import LocalNodes, NodeSpec
from orchestrator.adapters.processes import identify, marked, wait_for_end
from orchestrator.adapters.ray_cluster import RayCluster
from orchestrator.adapters.ray_environment import CLUSTER_MARK, NODE_MARK, pin_resource
from orchestrator.domain.cluster import Node, NodeStatus
from orchestrator.domain.errors import NotFound, StaleTerm
from orchestrator.domain.host_events import HostFailed, HostOpened, SeatsPrepared
from orchestrator.domain.ids import Device, EffectId, Generation, JobId, NodeId, Term
from orchestrator.domain.requests import CloseHost, OpenHost, PrepareSeats
from orchestrator.domain.spec import DataSpec
from orchestrator.ports import HostGone, HostUnreachable
from tests.tiny_model import a_spec
from worker.programs.causal_lm import PROGRAM

pytestmark = pytest.mark.timeout(180)

T = TypeVar("T")
JOB = JobId("job-1")
A, H = NodeId("a100-1"), NodeId("h100-1")
TERM = Term(3)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalNodes]:
    local = LocalNodes(tmp_path_factory.mktemp("cluster"))
    began = time.monotonic()
    try:
        local.start([NodeSpec("A100", 2), NodeSpec("H100", 2)])
        print(f"\nhead and two nodes up: {time.monotonic() - began:.2f} s")
        yield local
    finally:
        began = time.monotonic()
        local.stop()
        print(f"\ndown: {time.monotonic() - began:.2f} s")
    assert marked({CLUSTER_MARK: local.environment.cluster}) == ()
    assert not local.environment.temp_dir.exists()


def on(nodes: LocalNodes, test: Callable[[RayCluster], Awaitable[None]]) -> None:
    """A supervisor's life: connect, do, let go."""

    async def whole() -> None:
        cluster = RayCluster(nodes.registry().address, nodes.environment, is_alive=nodes.is_alive)
        await cluster.start()
        assert CLUSTER_MARK not in os.environ, "or all that this process starts would go down with the cluster"
        try:
            await test(cluster)
        finally:
            await cluster.close()

    asyncio.run(whole())


def an_opening(node: NodeId, tmp_path: Path, job: JobId = JOB) -> OpenHost:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 40)
    spec = replace(a_spec(), data=DataSpec(files=(str(text),)))
    return OpenHost(
        job=job,
        node=node,
        num_devices=2,
        spec=spec,
        profile=PROGRAM.describe(spec),
        checkpoint_dir=str(tmp_path / "checkpoints"),
        log_dir=str(tmp_path / "logs"),
    )


async def open_host(cluster: RayCluster, node: NodeId, tmp_path: Path, job: JobId = JOB) -> None:
    await patiently(lambda: cluster.call(job, node, TERM, EffectId(f"open-{node}"), an_opening(node, tmp_path, job)))


async def patiently(ask: Callable[[], Awaitable[T]], within_s: float = 90) -> T:
    """As a supervisor asks: again where there was no answer, which is no evidence of anything."""
    async with asyncio.timeout(within_s):
        while True:
            try:
                return await ask()
            except HostUnreachable as error:
                print(error)
                await asyncio.sleep(0.2)


async def until(
    cluster: RayCluster, node: NodeId, wanted: type, job: JobId = JOB, term: Term = TERM, within_s: float = 90
) -> object:
    after = 0
    async with asyncio.timeout(within_s):
        while True:
            for envelope in await patiently(partial(cluster.poll, job, node, term, after, after, 0.5)):
                after = envelope.number
                assert not isinstance(envelope.event, HostFailed), envelope.event
                if isinstance(envelope.event, wanted):
                    return envelope.event


async def holds(is_so: Callable[[], bool], within_s: float = 60) -> None:
    async with asyncio.timeout(within_s):
        while not is_so():  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def seen(cluster: RayCluster, done: Callable[[dict[NodeId, Node]], bool], within_s: float = 90) -> float:
    began = time.monotonic()
    async with asyncio.timeout(within_s):
        while True:
            if done({node.id: node for node in await cluster.nodes()}):
                return time.monotonic() - began
            await asyncio.sleep(0.02)


def test_nodes_are_seen_with_their_kind_and_devices(nodes: LocalNodes) -> None:
    async def test(cluster: RayCluster) -> None:
        found = {node.id: node for node in await cluster.nodes()}
        assert {id: (node.kind, node.num_devices, node.status) for id, node in found.items()} == {
            A: ("A100", 2, NodeStatus.UP),
            H: ("H100", 2, NodeStatus.UP),
        }

    on(nodes, test)


def test_nothing_listens_beyond_loopback(nodes: LocalNodes) -> None:
    ours = {process.pid for process in marked({CLUSTER_MARK: nodes.environment.cluster})}
    listening = [
        connection
        for connection in psutil.net_connections("inet")
        if connection.pid in ours and connection.status == psutil.CONN_LISTEN
    ]
    assert listening, "Ray does listen"
    assert {connection.laddr.ip.removeprefix("::ffff:") for connection in listening} == {"127.0.0.1"}


def test_nobody_without_the_token_is_let_in(nodes: LocalNodes) -> None:
    program = f"""
        import os
        os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="0" * 64, RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0")
        import ray
        ray.init(address="{nodes.registry().address}", _temp_dir="{nodes.environment.temp_dir}")
        print("LET IN")
    """
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=clean,
    ) as tried:
        assert tried.stdout is not None and tried.stderr is not None
        complained = ""
        # It would go on trying for a minute; what it says when it is let in ends the wait, too.
        while not (is_refused := "unauthenticated" in complained.lower()) and (line := tried.stderr.readline()):
            complained += line
        tried.kill()
        said = tried.stdout.read()
    assert "LET IN" not in said
    assert is_refused, complained[-2000:]
    assert nodes.environment.token_file.stat().st_mode & 0o777 == 0o600


def test_host_opens_answers_is_found_again_and_closes(nodes: LocalNodes, tmp_path: Path) -> None:
    async def first_supervisor(cluster: RayCluster) -> None:
        began = time.monotonic()
        await open_host(cluster, A, tmp_path)
        print(f"\nOpenHost answered: {time.monotonic() - began:.2f} s")
        await open_host(cluster, A, tmp_path)  # again: the same host
        await until(cluster, A, HostOpened)
        print(f"zygote warm: {time.monotonic() - began:.2f} s")
        took = []
        for _ in range(100):
            before = time.perf_counter()
            await patiently(lambda: cluster.poll(JOB, A, TERM, 1_000, 0, 0.0))
            took.append((time.perf_counter() - before) * 1000)
        print(f"poll: median {statistics.median(took):.2f} ms, p95 {sorted(took)[94]:.2f} ms")
        took = []
        for number in range(30):
            before = time.perf_counter()
            request = PrepareSeats(generation=Generation(0), devices=())
            await patiently(partial(cluster.call, JOB, A, TERM, EffectId(f"call-{number}"), request))
            took.append((time.perf_counter() - before) * 1000)
        print(f"call: median {statistics.median(took):.2f} ms, p95 {sorted(took)[28]:.2f} ms")

    async def second_supervisor(cluster: RayCluster) -> None:
        began = time.monotonic()
        events = await patiently(lambda: cluster.poll(JOB, A, Term(TERM + 1), 0, 0, 0.5))
        print(f"\nfound again: {time.monotonic() - began:.2f} s")
        assert any(isinstance(envelope.event, HostOpened) for envelope in events), "not acknowledged, so told again"
        with pytest.raises(StaleTerm):
            await patiently(lambda: cluster.poll(JOB, A, TERM, 0, 0, 0.0))
        with pytest.raises(StaleTerm):
            request = PrepareSeats(generation=Generation(1), devices=())
            await patiently(lambda: cluster.call(JOB, A, TERM, EffectId("late"), request))
        before = len(marked({CLUSTER_MARK: nodes.environment.cluster, NODE_MARK: A}))
        await patiently(lambda: cluster.call(JOB, A, Term(TERM + 1), EffectId("close"), CloseHost()))
        with pytest.raises(HostGone):
            await patiently(lambda: cluster.poll(JOB, A, Term(TERM + 1), 0, 0, 0.1))
        await cluster.call(JOB, A, Term(TERM + 1), EffectId("close-2"), CloseHost())  # no host: no error
        await holds(lambda: len(marked({CLUSTER_MARK: nodes.environment.cluster, NODE_MARK: A})) < before)

    on(nodes, first_supervisor)
    on(nodes, second_supervisor)


def test_killed_host_process_is_gone_at_once_and_another_can_be_opened(nodes: LocalNodes, tmp_path: Path) -> None:
    async def test(cluster: RayCluster) -> None:
        job = JobId("job-2")
        await open_host(cluster, H, tmp_path, job)
        await until(cluster, H, HostOpened, job)
        waiting = asyncio.create_task(cluster.poll(job, H, TERM, 1_000, 0, 10.0))
        await asyncio.sleep(0.2)
        os.kill(host_pid(cluster, job, H), signal.SIGKILL)
        began = time.perf_counter()
        with pytest.raises(HostGone):
            await waiting
        print(f"\nhost process killed -> HostGone: {(time.perf_counter() - began) * 1000:.1f} ms")
        with pytest.raises(HostGone):
            request = PrepareSeats(generation=Generation(1), devices=())
            await patiently(lambda: cluster.call(job, H, TERM, EffectId("x"), request))
        await asyncio.sleep(0.5)
        await open_host(cluster, H, tmp_path, job)
        await until(cluster, H, HostOpened, job)
        await patiently(lambda: cluster.call(job, H, TERM, EffectId("close"), CloseHost()))

    on(nodes, test)


def test_stopped_host_is_unreachable_and_comes_back(nodes: LocalNodes, tmp_path: Path) -> None:
    async def test(cluster: RayCluster) -> None:
        job = JobId("job-3")
        await open_host(cluster, H, tmp_path, job)
        pid = host_pid(cluster, job, H)
        os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(HostUnreachable):
                await cluster.poll(job, H, TERM, 0, 0, 0.2)
        finally:
            os.kill(pid, signal.SIGCONT)
        await until(cluster, H, HostOpened, job)
        await patiently(lambda: cluster.call(job, H, TERM, EffectId("close"), CloseHost()))

    on(nodes, test)


def test_host_that_is_not_placed_in_time_is_given_up_and_asked_for_anew(nodes: LocalNodes, tmp_path: Path) -> None:
    """Here because another actor has all of the node: what matters is that Ray has the host nowhere."""
    job = JobId("job-5")

    async def test(cluster: RayCluster) -> None:
        import ray

        occupant = await asyncio.to_thread(occupy, H)
        hasty = RayCluster(nodes.registry().address, nodes.environment, open_s=2.0)
        with pytest.raises(HostUnreachable):
            await hasty.call(job, H, TERM, EffectId("hasty"), an_opening(H, tmp_path, job))
        with pytest.raises(HostGone):
            await patiently(lambda: hasty.poll(job, H, TERM, 0, 0, 0.0))
        ray.kill(occupant)
        await open_host(cluster, H, tmp_path, job)
        await patiently(lambda: cluster.call(job, H, TERM, EffectId("close"), CloseHost()))

    on(nodes, test)


def occupy(node: NodeId) -> Any:
    """An actor that leaves no room for a host there, once it is there."""
    import ray

    class Occupant:
        def is_here(self) -> bool:
            return True

    actor = ray.remote(num_cpus=0, resources={pin_resource(node): 1})(Occupant).remote()
    assert ray.get(actor.is_here.remote(), timeout=60)
    return actor


def test_node_is_added_and_killed_with_everything_on_it(nodes: LocalNodes, tmp_path: Path) -> None:
    async def test(cluster: RayCluster) -> None:
        job = JobId("job-4")
        began = time.monotonic()
        node = await nodes.add("B200", 2)
        print(f"\nnode added: {time.monotonic() - began:.2f} s")
        assert node == "b200-1"
        await seen(cluster, lambda found: node in found and found[node].status is NodeStatus.UP)
        await open_host(cluster, node, tmp_path, job)
        await until(cluster, node, HostOpened, job)
        seats = PrepareSeats(generation=Generation(1), devices=(Device(node, 0), Device(node, 1)))
        await patiently(lambda: cluster.call(job, node, TERM, EffectId("seats"), seats))
        prepared = await until(cluster, node, SeatsPrepared, job)
        assert isinstance(prepared, SeatsPrepared)
        ranks = [identify(pid) for pid in prepared.pids.values()]
        waiting = asyncio.create_task(cluster.poll(job, node, TERM, 1_000, 0, 30.0))
        await asyncio.sleep(0.2)
        began = time.perf_counter()
        killing = asyncio.create_task(nodes.kill(node))
        with pytest.raises(HostGone):
            await waiting
        print(f"node kill asked for -> HostGone: {(time.perf_counter() - began) * 1000:.1f} ms")
        await killing
        print(f"node kill, whole: {(time.perf_counter() - began) * 1000:.1f} ms")
        assert marked({CLUSTER_MARK: nodes.environment.cluster, NODE_MARK: node}) == ()
        assert wait_for_end([rank for rank in ranks if rank], 30.0), "ranks were left behind"
        lost_s = await seen(cluster, lambda found: found[node].status is NodeStatus.LOST)
        print(f"node kill done -> LOST in nodes(): {lost_s * 1000:.1f} ms")
        with pytest.raises(HostGone):
            await open_host(cluster, node, tmp_path, job)
        await cluster.call(job, node, TERM, EffectId("close"), CloseHost())
        with pytest.raises(NotFound):
            await nodes.kill(NodeId("no-such-node"))

    on(nodes, test)


def test_killed_node_is_noticed_without_its_provider(nodes: LocalNodes) -> None:
    """As on machines of others, where Ray's own table is all there is."""

    async def test() -> None:
        cluster = RayCluster(nodes.registry().address, nodes.environment)
        await cluster.start()
        try:
            node = await nodes.add("A100", 1)
            await seen(cluster, lambda found: node in found)
            await nodes.kill(node)
            lost_s = await seen(cluster, lambda found: found[node].status is NodeStatus.LOST)
            print(f"\nnode killed -> LOST by Ray's table alone: {lost_s:.2f} s")
        finally:
            await cluster.close()

    asyncio.run(test())


def test_an_idle_cluster_has_few_processes(nodes: LocalNodes) -> None:
    """Once what the tests before it have ended is gone."""
    most = 1 + 3 * (1 + len(nodes.registry().nodes))
    asyncio.run(holds(lambda: len(marked({CLUSTER_MARK: nodes.environment.cluster})) <= most))


def host_pid(cluster: RayCluster, job: JobId, node: NodeId) -> int:
    import ray

    from orchestrator.adapters.host_wire import Place
    from orchestrator.domain import codec

    line = cluster._lines[job, node]
    return codec.loads(Place, ray.get(line.actor.place.remote())).pid
