"""How long a killed rank or node stops training: SIGKILL at a random instant, again and again, in one job of eight ranks.

    python -m benchmarks.recovery --json --trials 10 [--kind rank|node] [--skip-peers]

The pause is the wall time from the kill to the next committed step of a new generation, less one undisturbed median step.
Everything is read from outside: instants of commits from the API, phases from the job's ledger. torchrun restarts a job of
the same model beside it, measured alike. The last line of output is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory

from api.client import Client
from api.views import IncidentView, JobView, SeatView, StepView
from deploy.local import LocalCluster, NodeSpec
from orchestrator.domain import codec

from .cluster import NODES, Job, NotMeasured, end_in_good_order, local_cluster, ranks_of, say
from .stats import medians_by_name, quantile
from .torchrun_recovery import torchrun_pauses
from .workload import Workload, recovery_workload

QUIET_STEPS = 12
"""Undisturbed steps before each kill."""
RECOVER_S = 120.0
PEER_TRIALS = 3
SPARE = NodeSpec("H100", 2)
"""One more than the job needs where whole nodes are killed: the pause is measured to full strength."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """One kill, in seconds. step_s: median of the undisturbed steps before it."""

    step_s: float
    kill_to_commit_s: float
    commit_to_commit_s: float
    supervisor_s: float
    """What the supervisor itself recorded as the pause."""
    rolled_back: int
    phases: dict[str, float]

    @property
    def pause_s(self) -> float:
        return self.kill_to_commit_s - self.step_s


class Victims:
    """Picks and kills; the kind is that of the benchmark."""

    def __init__(self, kind: str, cluster: LocalCluster, client: Client, random: Random) -> None:
        self._kind = kind
        self._cluster = cluster
        self._client = client
        self._random = random

    @property
    def nodes(self) -> tuple[NodeSpec, ...]:
        return nodes_for(self._kind)

    def kill(self, view: JobView, after_s: float) -> tuple[float, str]:
        """Kill one after `after_s`: the instant just before (wall clock, s), and whom."""
        assert view.plan is not None
        ranks, seat = ranks_of(view), self._random.choice(view.plan.seats)
        time.sleep(after_s)
        killed_at = time.time()
        if self._kind == "rank":
            ranks[seat.rank].send(signal.SIGKILL)
            return killed_at, f"rank {seat.rank}"
        self._cluster.kill_node(_node(seat))
        return killed_at, f"node {_node(seat)}"

    def replace(self) -> None:
        """Add a node for each that was killed, and wait until the cluster has them all."""
        missing = len(self.nodes) - self._up()
        for _ in range(missing):
            self._cluster.add_node(SPARE.kind, SPARE.num_devices)
        deadline = time.monotonic() + RECOVER_S
        while self._up() < len(self.nodes):
            if time.monotonic() > deadline:
                raise NotMeasured(f"{self._up()} of {len(self.nodes)} nodes are up after {RECOVER_S:g} s")
            time.sleep(0.2)

    def _up(self) -> int:
        return sum(node.status == "UP" for node in self._client.nodes())


def nodes_for(kind: str) -> tuple[NodeSpec, ...]:
    return NODES if kind == "rank" else (*NODES, SPARE)


def main() -> int:
    asked = _arguments()
    end_in_good_order()
    seed = asked.seed if asked.seed is not None else Random().randrange(1 << 31)
    say(f"--seed {seed}")
    random, workload = Random(seed), recovery_workload()
    recoveries = _measure(asked.kind, asked.trials, workload, random)
    peers: dict[str, float] = {}
    if not asked.skip_peers:
        # After the cluster has gone: a peer's pause is not to be lengthened by what is not its own.
        pauses = _peer(workload, random)
        peers["torchrun_s"] = round(median(pauses), 4)
    result = _result(asked.kind, recoveries) | {"peers": peers, "seed": seed}
    if not asked.json:
        _show(recoveries)
    print(json.dumps(result), flush=True)
    return 0


def _measure(kind: str, trials: int, workload: Workload, random: Random) -> list[Recovery]:
    found = []
    with local_cluster(nodes_for(kind)) as cluster, Client(cluster.url) as client:
        job, victims = Job(client, workload), Victims(kind, cluster, client, random)
        job.wait_for_step(QUIET_STEPS)
        for number in range(trials):
            victims.replace()
            found.append(_trial(job, victims, random, f"kill {number + 1} of {trials}"))
    return found


def _trial(job: Job, victims: Victims, random: Random, title: str) -> Recovery:
    base = job.view().step
    before = job.wait_for_step(base + QUIET_STEPS)
    if before.plan is None or before.plan.generation != before.generation:
        raise NotMeasured(f"generation {before.generation} is not the one that runs; the job is {before.status}")
    typical = before.typical_step_s or 0.0
    killed_at, whom = victims.kill(before, random.uniform(0.0, typical))
    after = job.wait(lambda view: _is_recovered(view, before), f"recovery of {whom}", RECOVER_S)
    one = _recovery(job.fetch(), before, after.incidents[len(before.incidents) :], killed_at)
    say(f"{title}: {whom}, pause {one.pause_s:.3f} s of steps of {one.step_s:.3f} s, {_in_words(one.phases)}")
    return one


def _is_recovered(view: JobView, before: JobView) -> bool:
    new = view.incidents[len(before.incidents) :]
    return bool(new) and view.status == "RUNNING" and all(incident.pause_s is not None for incident in new)


def _recovery(steps: Sequence[StepView], before: JobView, incidents: Sequence[IncidentView], killed_at: float) -> Recovery:
    undisturbed = [step for step in steps if step.generation == before.generation and step.at.timestamp() <= killed_at]
    back = next((step for step in steps if step.generation > before.generation), None)
    if back is None or not undisturbed:
        raise NotMeasured(f"generation {before.generation} has no commit before or none after the kill")
    at = back.at.timestamp()
    step_s = median(step.seconds for step in undisturbed[-QUIET_STEPS:] if step.seconds is not None)
    return Recovery(
        step_s=step_s,
        kill_to_commit_s=at - killed_at,
        commit_to_commit_s=at - undisturbed[-1].at.timestamp(),
        supervisor_s=sum(incident.pause_s or 0.0 for incident in incidents),
        rolled_back=sum(incident.rolled_back for incident in incidents),
        # The ledger begins where a host noticed; how long that took only the killer knows.
        phases={"notice": incidents[0].at.timestamp() - killed_at, **incidents[-1].phases},
    )


def _peer(workload: Workload, random: Random) -> list[float]:
    with TemporaryDirectory(prefix="everstep-bench-peers-") as name:
        spec = Path(name) / "spec.json"
        spec.write_bytes(codec.dumps(workload.spec()))
        return torchrun_pauses(spec, workload.micro_batches, PEER_TRIALS, QUIET_STEPS, random)


def _result(kind: str, recoveries: Sequence[Recovery]) -> dict[str, object]:
    pauses = [one.pause_s for one in recoveries]
    figures = {
        "median_s": median(pauses),
        "p95_s": quantile(pauses, 0.95),
        "max_s": max(pauses),
        "trials": len(pauses),
        "phases": {name: round(seconds, 4) for name, seconds in medians_by_name([r.phases for r in recoveries]).items()},
        # With the step that is run again, and from commit to commit: also what was computed in vain before the kill.
        "with_rerun_step_median_s": median(one.kill_to_commit_s for one in recoveries),
        "commit_to_commit_median_s": median(one.commit_to_commit_s - one.step_s for one in recoveries),
        "supervisor_median_s": median(one.supervisor_s for one in recoveries),
    }
    rounded = {name: round(figure, 4) if isinstance(figure, float) else figure for name, figure in figures.items()}
    return {
        f"{kind}_kill": rounded,
        "steps_lost": sum(one.rolled_back for one in recoveries),
        "step_s": round(median(one.step_s for one in recoveries), 4),
    }


def _show(recoveries: Sequence[Recovery]) -> None:
    print("pause    +rerun   commit-commit  phases")
    for one in recoveries:
        lost = one.commit_to_commit_s - one.step_s
        print(f"{one.pause_s:6.3f}   {one.kill_to_commit_s:6.3f}   {lost:13.3f}  {_in_words(one.phases)}")


def _in_words(phases: dict[str, float]) -> str:
    return ", ".join(f"{name} {seconds * 1000:.0f} ms" for name, seconds in phases.items())


def _node(seat: SeatView) -> str:
    return seat.device.rpartition("/")[0]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.recovery", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print the JSON line and nothing before it")
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--kind", choices=("rank", "node"), default="rank", help="what is killed")
    parser.add_argument("--skip-peers", action="store_true")
    parser.add_argument("--seed", type=int, help="of whom and when; another one every time by default")
    asked = parser.parse_args()
    if asked.trials < 1:
        parser.error(f"--trials is {asked.trials}, at least 1 is needed; raise it")
    return asked


if __name__ == "__main__":
    sys.exit(main())
