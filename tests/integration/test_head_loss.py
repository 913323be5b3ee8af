"""Ray's head is lost, in part or with everything around it, or Redis forgets: jobs train on with their processes."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest
from redis import Redis

from api.client import Client
from deploy.keeper import API, KEEPER, SUPERVISOR
from deploy.local import LocalCluster, NodeSpec, status, up
from orchestrator.adapters import ray_environment
from orchestrator.adapters.embedded_redis import EmbeddedRedis
from orchestrator.adapters.processes import identify, marked, wait_for_end
from orchestrator.adapters.ray_environment import CLUSTER_MARK
from orchestrator.adapters.ray_node import GCS, HEAD
from orchestrator.adapters.redis_keys import LEASE
from tests.tiny_job import TinyJob

pytestmark = pytest.mark.timeout(300)
NODES = [NodeSpec("A100", 2), NodeSpec("A100", 1)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    running = up(tmp_path_factory.mktemp("head"), NODES, chaos=True)
    try:
        yield running
    finally:
        running.down()
        assert not marked({CLUSTER_MARK: ray_environment.for_state_dir(running.state_dir).cluster})


@pytest.fixture(scope="module")
def job(cluster: LocalCluster) -> Iterator[TinyJob]:
    with Client(cluster.url, retry_s=30) as client:
        yield TinyJob.start(client, cluster.state_dir)


def kill(cluster: LocalCluster, *names: str) -> dict[str, int]:
    """The pids they had, once they have ended."""
    processes = status(cluster.state_dir)["processes"]
    assert isinstance(processes, dict)
    victims = [found for name in names if (found := identify(processes[name]))]
    for victim in victims:
        victim.send(signal.SIGKILL)
    assert wait_for_end(victims, 30)
    return {name: processes[name] for name in names}


def runs_anew(cluster: LocalCluster, killed: dict[str, int]) -> bool:
    processes = status(cluster.state_dir)["processes"]
    assert isinstance(processes, dict)
    return all(processes[name] not in (None, pid) for name, pid in killed.items())


def sees(client: Client, node: str, wanted: str, within_s: float = 120) -> None:
    deadline = time.monotonic() + within_s
    while {one.id: one.status for one in client.nodes()}.get(node) != wanted:
        assert time.monotonic() < deadline, client.nodes()
        time.sleep(0.05)


def test_gcs_and_head_are_killed_and_started_again_at_the_same_address(cluster: LocalCluster, job: TinyJob) -> None:
    before = job.pids()
    killed = kill(cluster, GCS, HEAD)
    job.trains_on(20)
    job.until(lambda _: runs_anew(cluster, killed))
    # The new ones serve: a node is added through them, used, and its end is seen.
    job.client.add_node("A100", 1)
    sees(job.client, "a100-3", "UP")
    job.trains_where(lambda nodes: "a100-3" in nodes)
    assert before.items() <= job.pids().items()
    job.client.kill_node("a100-3")
    sees(job.client, "a100-3", "LOST")
    job.trains_where(lambda nodes: "a100-3" not in nodes)
    job.trains_on(5)
    assert job.pids() == before
    assert [incident.cause for incident in job.view().incidents] == ["grow", "node_lost"]
    job.assert_every_step_once()


def test_everything_but_the_nodes_is_killed_and_up_takes_them_up(cluster: LocalCluster, job: TinyJob) -> None:
    before, step, incidents = job.pids(), job.view().step, len(job.view().incidents)
    kill(cluster, KEEPER, GCS, HEAD, SUPERVISOR, API, "redis")
    began = time.monotonic()
    again = up(cluster.state_dir, NODES, chaos=True)
    print(f"\nup after the loss of everything but the nodes: {time.monotonic() - began:.1f} s")
    assert again == cluster
    job.until(lambda view: view.step > step + 20)
    assert job.pids() == before and len(job.view().incidents) == incidents
    job.assert_every_step_once()


def test_redis_is_put_back_to_before_a_recovery_while_no_supervisor_lives(cluster: LocalCluster, job: TinyJob) -> None:
    """Last: what its curve had in between is lost with Redis."""
    address = EmbeddedRedis(cluster.state_dir).address
    redis = Redis(host=address.host, port=address.port, password=address.password)
    keys = [key for key in redis.keys("everstep:*") if key != LEASE.encode()]
    with redis.pipeline(transaction=True) as all_at_once:
        for key in keys:
            all_at_once.dump(key)
        copied = {key: value for key, value in zip(keys, all_at_once.execute(), strict=True) if value is not None}
    known = len(job.view().incidents)
    job.client.inject({"kind": "kill", "job": job.id, "rank": 0})
    job.until(lambda view: len(view.incidents) > known and view.incidents[-1].pause_s is not None)
    job.trains_on(5)
    before, step = job.pids(), job.view().step
    killed = kill(cluster, SUPERVISOR)
    with redis.pipeline(transaction=True) as put_back:
        put_back.delete(*redis.keys("everstep:*"))
        for key, value in copied.items():  # those that were to last for a while last for ever
            put_back.restore(key, 0, value)
        put_back.execute()
    job.until(lambda _: runs_anew(cluster, killed))
    job.until(lambda view: view.step > step + 20)
    assert job.pids() == before, "as hosts remember; those that Redis knew of had ended"
    view = job.view()
    assert [incident.cause for incident in view.incidents[known:]] == ["rank_lost"] and not view.incidents[-1].rolled_back
    told = job.client.history(job.id)
    assert [entry.type for entry in told if entry.type == "store_went_back"], [entry.type for entry in told]
