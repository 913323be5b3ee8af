"""A local cluster and one job on it, for as long as a benchmark lasts.

It brings up what `everstep up` brings up, submits through the API, and takes all of it down again, also after an error or
a SIGTERM. What is done to the job meanwhile, and what that shows, is the benchmark's business.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from api.client import Client
from api.client.calls import BEGINNING
from api.views import JobView, PlanView, StepView
from deploy.local import LocalCluster, NodeSpec, up
from orchestrator.adapters.processes import ProcessId, identify, marked
from orchestrator.adapters.ray_environment import CLUSTER_MARK, NODE_MARK, for_state_dir
from orchestrator.domain.ids import Device, NodeId
from orchestrator.domain.plan import Pipeline, Plan, Stage

from .workload import Workload

NODES = (NodeSpec("A100", 2), NodeSpec("A100", 2), NodeSpec("H100", 2), NodeSpec("B200", 2))
START_S = 240.0
_POLL_S = 0.2


class NotMeasured(RuntimeError):
    """Something else happened than what was to be measured."""


def say(line: str) -> None:
    """Progress; results alone go to stdout."""
    print(line, file=sys.stderr, flush=True)


def end_in_good_order() -> None:
    """Have SIGTERM end this process as an error would, so that everything started is ended."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


@contextmanager
def local_cluster(nodes: Sequence[NodeSpec], keep: Path | None = None) -> Iterator[LocalCluster]:
    """keep: where its logs and checkpoints are to stay; by default they go with it."""
    with TemporaryDirectory(prefix="everstep-bench-", ignore_cleanup_errors=True) as state_dir:
        cluster = up(keep or Path(state_dir), nodes, chaos=True, say=say)
        try:
            yield cluster
        finally:
            cluster.down()


def processes_of(cluster: LocalCluster, node: str | None = None) -> tuple[ProcessId, ...]:
    """Every living process of it, or of one of its nodes, ranks included."""
    cluster_mark: dict[str, str | None] = {CLUSTER_MARK: for_state_dir(cluster.state_dir).cluster}
    return marked(cluster_mark | ({} if node is None else {NODE_MARK: node}))


class Job:
    """A job that was submitted, and its committed steps as far as they have been fetched."""

    def __init__(self, client: Client, workload: Workload) -> None:
        self.steps: list[StepView] = []
        self._client = client
        self.id = client.submit(workload.job_file()).id
        self._since = BEGINNING

    def view(self) -> JobView:
        """Raises NotMeasured where it is over: no benchmark's job ever gets to its end."""
        found = self._client.job(self.id)
        if found.is_over:
            failure = found.failure.message if found.failure else found.reason
            raise NotMeasured(f"the job is {found.status} at step {found.step}: {failure}")
        return found

    def wait(self, until: Callable[[JobView], bool], what: str, timeout_s: float = START_S) -> JobView:
        """The first view of which `until` is true. Raises NotMeasured."""
        deadline = time.monotonic() + timeout_s
        while not until(found := self.view()):
            if time.monotonic() > deadline:
                raise NotMeasured(
                    f"{what}: not within {timeout_s:g} s; the job is {found.status} at step {found.step}: {found.reason}"
                )
            time.sleep(_POLL_S)
        return found

    def wait_for_step(self, step: int) -> JobView:
        return self.wait(lambda found: found.status == "RUNNING" and found.step >= step, f"step {step}")

    def fetch(self) -> list[StepView]:
        """Every committed step so far, oldest first."""
        while page := self._client.metrics(self.id, self._since, 10_000):
            self.steps += page
            self._since = page[-1].id
        return self.steps


def ranks_of(view: JobView) -> dict[int, ProcessId]:
    """The living training processes of the running generation, by rank. Raises NotMeasured where one is missing."""
    seats = view.plan.seats if view.plan is not None else ()
    found = {seat.rank: identify(seat.pid) for seat in seats if seat.pid is not None}
    living = {rank: process for rank, process in found.items() if process is not None}
    if not seats or len(living) != len(seats):
        raise NotMeasured(
            f"{len(living)} of the plan's {len(seats)} ranks have a living process; wait until it is re-formed"
        )
    return living


def plan_of(view: PlanView) -> Plan:
    """The plan behind its view, for a peer that runs the same one."""
    seats = sorted(view.seats, key=lambda seat: seat.rank)
    depths = [1 + max(seat.stage for seat in seats if seat.pipeline == p) for p in range(view.dp)]

    def stage(pipeline: int, number: int) -> Stage:
        members = [seat for seat in seats if (seat.pipeline, seat.stage) == (pipeline, number)]
        first, last = members[0].layers
        return Stage(first=first, last=last, devices=tuple(_device(seat.device) for seat in members))

    return Plan(
        pipelines=tuple(
            Pipeline(stages=tuple(stage(p, s) for s in range(depth)), micro_batches=view.micro_batches[p])
            for p, depth in enumerate(depths)
        )
    )


def _device(name: str) -> Device:
    node, _, index = name.rpartition("/")
    return Device(NodeId(node), int(index))
