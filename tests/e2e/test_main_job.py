"""The whole thing: embedded Redis, Ray with four emulated nodes, supervisor and API as processes of their own.

One cluster serves every test here. One job goes through most of the trouble there is, each blow once the last one has been
recovered from, and is cancelled in the end; several tests look at what became of it. Its curve is the undisturbed one.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from api.client import Client
from api.views import JobView, StepView
from deploy.local import LocalCluster, status, up
from orchestrator.adapters import ray_environment
from orchestrator.adapters.local_nodes import parse_nodes
from orchestrator.adapters.processes import end, marked
from orchestrator.adapters.ray_environment import CLUSTER_MARK, NODE_MARK
from tests.jobs import ENDLESS, EXAMPLE, a_job, gaps, largest_gap
from tests.tiny_job import until_checked

pytestmark = pytest.mark.timeout(600)
NODES = "A100:2,A100:2,H100:2,B200:2"
SLOWLY = {"learning_rate": 3e-4, "min_learning_rate": 3e-4}
"""Rounding stays rounding, also on a machine that trains hundreds of steps while a node starts."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    state_dir = tmp_path_factory.mktemp("everstep")
    running = up(state_dir, parse_nodes(NODES), chaos=True, say=print)
    try:
        yield running
    finally:
        running.down()
        assert not marked({CLUSTER_MARK: ray_environment.for_state_dir(state_dir).cluster}), "left after down"
        assert not [path for path in Path("/dev/shm").iterdir() if "everstep" in path.name]
        assert is_free(int(running.url.rpartition(":")[2]))


def is_free(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) != 0


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[Client]:
    with Client(cluster.url, retry_s=30) as one:
        yield one


def _body(steps: int, **train: object) -> dict[str, object]:
    spec = a_job(steps, **train)
    return {
        "name": spec.name,
        "program": spec.program,
        "data": {"files": list(spec.data.files), "max_bytes": spec.data.max_bytes},
        "model": dict(spec.model),
        "train": {
            name: getattr(spec.train, name)
            for name in ("steps", "micro_batches", "micro_batch_size", "sequence", "seed", "learning_rate",
                         "min_learning_rate", "warmup_steps", "epsilon")
        },
        "parallel": {"tp": 2, "pp": 2},
        "checkpoint": {"every": spec.checkpoint.every},
        "recovery": {"leave_s": spec.recovery.leave_s},
    }  # fmt: skip


def _run(client: Client, steps: int, on_step: Callable[[str, StepView], None] = lambda job, step: None) -> JobView:
    """Submit, do what on_step does at each committed step, return the finished job."""
    until_checked(client)
    job = client.submit(_body(steps, **SLOWLY)).id
    for event in client.events(job):
        if isinstance(event, StepView):
            on_step(job, event)
    return client.wait(job, timeout_s=120)


def _losses(client: Client, job: str) -> dict[int, float]:
    return {step.step: step.loss for step in client.all_metrics(job) if step.loss is not None}


def _pids(job: JobView) -> dict[str, int | None]:
    assert job.plan is not None
    return {seat.device: seat.pid for seat in job.plan.seats}


KILLS, CONTROL = range(8), ("supervisor", "api", "redis")
BLOWS: tuple[int | str, ...] = (*KILLS, *CONTROL, "node", "another node")
"""In this order: each of eight ranks, processes of the control plane, the node of rank 0; then one is added."""
APART, AFTER_CONTROL = 4, 7
"""Steps from a blow, or from the step that was the first after it, to the next one."""


@dataclass
class Story:
    """A job that all of that has happened to, while it trained, and what was left of it."""

    job: JobView
    losses: dict[int, float]
    seen: dict[int | str, JobView]
    """As it was just before each blow."""
    last: JobView
    """As it was just before it was cancelled: some steps after it had grown."""


@dataclass
class Blows:
    """Deals them, one at a time: the next one when steps have been committed after the last one's incident."""

    cluster: LocalCluster
    client: Client
    seen: dict[int | str, JobView] = field(default_factory=dict)
    due: int = APART
    last: JobView | None = None

    def __call__(self, job: str, step: StepView) -> None:
        if step.step < self.due or self.last is not None:
            return
        view = self.client.job(job)
        ended = sum(isinstance(blow, int) or blow == "node" for blow in self.seen)
        if view.status != "RUNNING" or len([one for one in view.incidents if one.pause_s is not None]) < ended:
            return
        if len(self.seen) < len(BLOWS):
            blow = BLOWS[len(self.seen)]
            self.seen[blow] = view
            self._deal(blow, view)
            # Recorded steps may run ahead of what this test has read of them.
            self.due = max(step.step, view.step) + (AFTER_CONTROL if blow in CONTROL else APART)
        elif view.incidents[-1].cause == "grow" and view.incidents[-1].pause_s is not None:
            self.last = view
            self.client.cancel(job)

    def _deal(self, blow: int | str, view: JobView) -> None:
        assert view.plan is not None
        if isinstance(blow, int):
            pid = next(seat.pid for seat in view.plan.seats if seat.rank == blow)
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
        elif blow in CONTROL:
            processes = status(self.cluster.state_dir)["processes"]
            assert isinstance(processes, dict)
            os.kill(processes[blow], signal.SIGKILL)
        elif blow == "node":
            self.client.kill_node(view.plan.seats[0].device.rpartition("/")[0])
        else:
            self.client.add_node("H100", 2)


@pytest.fixture(scope="module")
def story(cluster: LocalCluster) -> Story:
    with Client(cluster.url, retry_s=30) as client:
        blows = Blows(cluster, client)
        job = _run(client, ENDLESS, blows)
        assert blows.last is not None, job.reason
        return Story(job, _losses(client, job.id), blows.seen, blows.last)


def test_every_rank_is_killed_in_turn_and_the_curve_is_the_undisturbed_one(story: Story) -> None:
    assert [incident.cause for incident in story.job.incidents[:8]] == ["rank_lost"] * 8
    assert sum(incident.rolled_back for incident in story.job.incidents) == 0
    found = gaps(story.losses, a_job(ENDLESS, **SLOWLY), len(story.losses))
    print(f"\nlargest gap over {len(found)} steps: {max(found):.1e}")
    assert max(found[: story.seen["node"].step]) <= 1e-5
    assert max(found) <= 1e-4


def test_supervisor_api_and_redis_are_killed_and_no_rank_restarts(story: Story) -> None:
    seen = [story.seen[blow] for blow in (*CONTROL, "node")]
    assert len({(one.generation, len(one.incidents)) for one in seen}) == 1
    assert all(_pids(one) == _pids(seen[0]) for one in seen) and None not in _pids(seen[0]).values()


def test_node_of_rank_0_is_killed_and_one_that_is_added_is_used(story: Story) -> None:
    lost, grown = story.job.incidents[len(story.seen["node"].incidents) :]
    assert lost.cause == "node_lost" and lost.generation == story.seen["node"].generation
    assert grown.cause == "grow" and grown.pause_s is not None
    assert len(_pids(story.last)) == 8 and len(_pids(story.seen["another node"])) < 8


def test_cancel_frees_every_process(story: Story) -> None:
    assert story.job.status == "CANCELLED", story.job.reason
    pids = [pid for pid in _pids(story.last).values() if pid]
    assert len(pids) == 8
    # Their parent was killed with them, so they are reaped by whoever adopts orphans here, a moment later.
    assert not psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=60)[1]


def test_two_nodes_that_hold_both_copies_are_killed_and_the_job_rolls_back(cluster: LocalCluster, client: Client) -> None:
    """Owner and mirror of some interval are gone at once: the newest checkpoint, and the loss is said."""
    killed: list[str] = []

    def disturb(job: str, step: StepView) -> None:
        view = client.job(job)
        if view.status != "RUNNING" or any(one.pause_s is None for one in view.incidents):
            return
        if not killed and view.checkpoint is not None:
            killed.extend(_by_rank(view)[:2])
            _kill_at_once(cluster, killed)
        elif killed and not set(killed) & set(_by_rank(view)) and view.step > view.incidents[-1].committed + APART:
            client.cancel(job)

    for _ in range(4 - _num_up(client)):
        client.add_node("A100", 2)
    deadline = time.monotonic() + 120
    while _num_up(client) < 4:
        assert time.monotonic() < deadline, client.nodes()
        time.sleep(0.2)
    job = _run(client, ENDLESS, disturb)
    assert job.status == "CANCELLED", job.reason
    assert [one.cause for one in job.incidents if "checkpoint of step" in one.source] == ["node_lost"], job.incidents
    losses = _losses(client, job.id)
    assert largest_gap(losses, a_job(ENDLESS, **SLOWLY), len(losses)) <= 1e-4


def _by_rank(job: JobView) -> list[str]:
    """Nodes in the order of their first ranks; each one's state has its other copy on the next."""
    assert job.plan is not None
    seats = sorted(job.plan.seats, key=lambda seat: seat.rank)
    return list(dict.fromkeys(seat.device.rpartition("/")[0] for seat in seats))


def _kill_at_once(cluster: LocalCluster, nodes: list[str]) -> None:
    """Before anything of what the one held can be copied from the other."""
    mark = ray_environment.for_state_dir(cluster.state_dir).cluster
    end([process for node in nodes for process in marked({CLUSTER_MARK: mark, NODE_MARK: node})], grace_s=0)


def _num_up(client: Client) -> int:
    return sum(node.status == "UP" for node in client.nodes())


def test_infeasible_job_waits_with_its_reason(client: Client) -> None:
    body = _body(30)
    body["parallel"] = {"tp": 2, "pp": 4, "dp": 4, "min_devices": 32}
    body["train"] = {**body["train"], "micro_batches": 16}  # type: ignore[dict-item]
    job = client.submit(body).id
    deadline = time.monotonic() + 60
    while "usable" not in (view := client.job(job)).reason and time.monotonic() < deadline:
        time.sleep(0.2)
    assert view.status == "PENDING" and "needs 32 devices" in view.reason
    client.cancel(job)
    assert client.wait(job, timeout_s=60).status == "CANCELLED"


def test_example_file_is_accepted() -> None:
    from api.schemas import load_job_file

    assert load_job_file(EXAMPLE.read_text("utf-8"), "application/yaml").train.steps >= 150
