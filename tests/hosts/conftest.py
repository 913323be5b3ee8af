"""One cluster for all tests here: four machines as network namespaces, Ray's head and everything else in this one; a job
for each file.

Where namespaces are not to be had the tests are skipped, and the end of the test run says so and why.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from api.client import Client
from deploy.local import LocalCluster, NodeSpec, up
from orchestrator.adapters import ray_environment
from orchestrator.adapters.processes import marked
from orchestrator.adapters.ray_environment import CLUSTER_MARK
from tests.tiny_job import TinyJob

from .machines import Machines
from .rig import ROOT, NoRig, Rig

HOSTS = 4
_skipped: list[str] = []


@pytest.fixture(scope="package")
def rig() -> Iterator[Rig]:
    try:
        built = Rig.build(HOSTS)
    except NoRig as reason:
        _skipped.append(str(reason))
        pytest.skip(f"no hosts to test on: {reason}")
    try:
        yield built
    finally:
        built.remove()
        assert built.leftovers() == []


@pytest.fixture(scope="package")
def cluster(rig: Rig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    state_dir = tmp_path_factory.mktemp("hosts")
    specs = [NodeSpec("A100", 2, address=rig.address(one), prefix=rig.prefix(one)) for one in range(1, HOSTS + 1)]
    running = up(state_dir, specs, address=rig.address(ROOT), chaos=True)
    try:
        yield running
    finally:
        running.down()
        assert not marked({CLUSTER_MARK: ray_environment.for_state_dir(state_dir).cluster}), "left after down"


@pytest.fixture(scope="module")
def job(cluster: LocalCluster, request: pytest.FixtureRequest) -> Iterator[TinyJob]:
    """A file's JOB says how it differs from a tiny one."""
    with Client(cluster.url, retry_s=30) as client:
        running = TinyJob.start(client, cluster.state_dir, **getattr(request.module, "JOB", {}))
        try:
            yield running
        finally:
            running.cancel()


@pytest.fixture
def machines(rig: Rig, cluster: LocalCluster, job: TinyJob) -> Iterator[Machines]:
    """All joined again afterwards; the job must train on then, and every step must have been counted once."""
    found = Machines(rig, cluster, job)
    try:
        yield found
    finally:
        found.heal()
    job.trains_on(3, within_s=90)
    job.assert_every_step_once()
    assert sum(incident.rolled_back for incident in job.view().incidents) == 0, "committed steps were lost"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for reason in _skipped:
        terminalreporter.write_line(f"HOSTS TESTS WERE SKIPPED: {reason}", yellow=True, bold=True)
