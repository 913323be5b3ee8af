"""Two supervisors and two APIs on one Redis, one of each killed at random, again and again: nobody but the log notices."""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from api.client import ApiError, Client, StepView
from deploy.configured import parser, passed_on
from deploy.keeper import API, SUPERVISOR, start_detached, without_ray
from deploy.local import LocalCluster, NodeSpec, up
from deploy.settings import Places
from orchestrator.adapters import ray_environment
from orchestrator.adapters.embedded_redis import free_port
from orchestrator.adapters.processes import ProcessId, marked, wait_for_end
from orchestrator.adapters.ray_environment import CLUSTER_MARK
from tests.tiny_job import TinyJob

pytestmark = pytest.mark.timeout(300)
ROUNDS = 2
RETRY_S = 60.0
MAX_BODY = 100_000


@dataclass
class Service:
    """First of each: kept by the cluster's keeper. Second: kept by this test, as systemd or Kubernetes would."""

    cluster: LocalCluster
    port: int = field(default_factory=free_port)

    @property
    def places(self) -> Places:
        return Places(self.cluster.state_dir)

    @property
    def urls(self) -> tuple[str, str]:
        return self.cluster.url, f"http://127.0.0.1:{self.port}"

    def start_seconds(self) -> None:
        """Those that do not run."""
        environment = ray_environment.for_state_dir(self.cluster.state_dir)
        folder = ["--state-dir", str(self.cluster.state_dir)]
        api = ["deploy.api_server", "--port", str(self.port), *folder]
        supervisor = ["deploy.supervisor_main", "--holder", "second", *folder]
        for name, arguments, env in (
            (f"second-{API}", api, without_ray() | {CLUSTER_MARK: environment.cluster}),
            (f"second-{SUPERVISOR}", supervisor, environment.variables(os.environ)),
        ):
            if self.places.process(name) is None:
                start_detached(self.places, name, [sys.executable, "-m", *arguments], env)

    def both(self, kind: str) -> tuple[ProcessId | None, ProcessId | None]:
        return self.places.process(kind), self.places.process(f"second-{kind}")

    def until_whole(self) -> None:
        """Both of each run, both APIs answer, and a supervisor holds the lease."""
        deadline = time.monotonic() + RETRY_S
        while not (all(self.both(API)) and all(self.both(SUPERVISOR)) and all(map(self._answers, self.urls))):
            assert time.monotonic() < deadline, (self.both(API), self.both(SUPERVISOR))
            time.sleep(0.1)

    def _answers(self, url: str) -> bool:
        with contextlib.suppress(Exception), Client(url, token=self.cluster.token, retry_s=0) as client:
            return set(client.ready().values()) == {"ok"}
        return False


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("replicas")
    (folder / "config.yaml").write_text("log: {format: text}\n")
    asked = parser(None).parse_args(["--config", str(folder / "config.yaml"), "--set", f"api.max_body_bytes={MAX_BODY}"])
    running = Service(up(folder, [NodeSpec("A100", 2)], settings=passed_on(asked)))
    try:
        running.start_seconds()
        yield running
    finally:
        running.cluster.down()  # these too: they carry its mark
        assert not marked({CLUSTER_MARK: ray_environment.for_state_dir(folder).cluster})


class Caller(threading.Thread):
    """Someone who uses one of the APIs all the time; what it raises is kept."""

    def __init__(self, url: str, token: str, job: str) -> None:
        super().__init__(daemon=True)
        self.client, self.job = Client(url, token=token, retry_s=RETRY_S), job
        self.stopping, self.error, self.asked = threading.Event(), "", 0

    def run(self) -> None:
        try:
            while not self.stopping.wait(0.2):
                assert not self.client.job(self.job).is_over
                self.client.resize(self.job, priority=self.asked % 10)
                self.asked += 1
        except Exception as error:  # the test's thread says it
            self.error = f"{type(error).__name__}: {error}"


TOO_LARGE = {
    "name": "too-large",
    "program": "causal_lm",
    "data": {"files": ["{stdlib}"], "max_bytes": 1000},
    "model": {"layers": 2, "width": 32, "heads": 2, "ffn": 64},
    "train": {"steps": 3, "micro_batches": 8, "micro_batch_size": 1, "sequence": 32},
    "parallel": {"min_devices": 64},
}


def test_what_up_was_given_reaches_the_supervisor_and_the_api(service: Service) -> None:
    for name in (API, SUPERVISOR):
        assert not service.places.log(name).read_text().startswith("{"), "the file said text"
    with Client(service.urls[0], token=service.cluster.token) as client, pytest.raises(ApiError) as refused:
        client.submit(TOO_LARGE | {"labels": {"note": "x" * MAX_BODY}})
    assert refused.value.status == 413


def test_one_supervisor_and_one_api_of_two_are_killed_at_random_and_clients_see_retries_at_most(service: Service) -> None:
    seed = int(os.environ.get("EVERSTEP_TEST_SEED", secrets.randbelow(10**6)))
    print(f"\nEVERSTEP_TEST_SEED={seed}")
    chance = random.Random(seed)
    with Client(service.urls[0], token=service.cluster.token, retry_s=RETRY_S) as client:
        job = TinyJob.start(client, service.cluster.state_dir)
        before = job.view()
        pids = job.pids()
        service.until_whole()
        callers = [Caller(url, service.cluster.token, job.id) for url in service.urls]
        heard: list[int] = []
        submitted: list[str] = []
        follower = Client(service.urls[1], token=service.cluster.token, retry_s=RETRY_S)
        steps = (one.step for one in follower.events(job.id) if isinstance(one, StepView))
        following = threading.Thread(target=lambda: heard.extend(steps), daemon=True)
        for thread in (*callers, following):
            thread.start()
        for _ in range(ROUNDS):
            victims = [chance.choice([one for one in service.both(kind) if one]) for kind in (API, SUPERVISOR)]
            for victim in victims:
                victim.send(signal.SIGKILL)
            assert wait_for_end(victims, 30)
            service.start_seconds()
            submitted.append(chance.choice(callers).client.submit(TOO_LARGE).id)  # also to one that is still starting
            job.trains_on(10)
            service.until_whole()
        for caller in callers:
            caller.stopping.set()
            caller.join(RETRY_S)
        assert [caller.error for caller in callers] == ["", ""] and all(caller.asked for caller in callers)
        listed = [one.id for one in client.all_jobs() if one.name == "too-large"]
        assert sorted(listed) == sorted(submitted), "none is lost, none is there twice"
        assert job.pids() == pids and not job.incidents_since(before), "ranks trained on as they were"
        job.cancel()
        following.join(RETRY_S)
        assert heard == list(range(1, len(heard) + 1)) and len(heard) == job.view().step
        job.assert_every_step_once()
        asked = [caller.asked for caller in callers]
        print(f"{asked} changes asked for and {len(heard)} steps over {ROUNDS} rounds")
