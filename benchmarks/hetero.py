"""A mixed and a changing cluster: how near a job comes to the speed its devices add up to, and what a new size costs.

    python -m benchmarks.hetero --json [--parts bound,scale] [--seconds 20]

Devices are processors that stand for A100s, H100s and B200s: a layer takes the time it would there, by dense bf16 rates
(train.emulated_layer_s), so that many ranks fit two cores. bound: wall-clock rate over the sum of the devices' rates.
scale: 6 -> 8 -> 4 -> 8 ranks while the job trains, each pause as the job's ledger has it; then the same job undisturbed.
The last line of output is one JSON object; what was not measured is null.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from statistics import median
from typing import Any

from api.client import Client
from api.client.errors import ClientError
from api.views import IncidentView, JobView
from deploy.local import NodeSpec
from orchestrator.domain.cluster import speed_of
from orchestrator.domain.errors import EverstepError

from .cluster import NODES, Job, NotMeasured, end_in_good_order, local_cluster, say
from .soak import curve_gaps
from .trial import incidents_after, last_incident
from .workload import Workload

PARTS = ("bound", "scale")
SIZES = (8, 4, 8)
FIRST = 6
QUIET_STEPS = 12
LAYER_S = 0.02
LAYERS = 8
NODES_MIXED = (NodeSpec("A100", 1), NodeSpec("A100", 1), NodeSpec("H100", 1), NodeSpec("B200", 1))


class Emulated(Workload):
    """Compute that takes the time it would on the devices stood for; tp 1, and the rest as the planner likes."""

    def job_file(self) -> dict[str, Any]:
        body = super().job_file()
        body["train"] |= {"emulated_layer_s": LAYER_S}
        return body | {"parallel": {"tp": 1}}


class Scaled(Workload):
    """dp alone changes, so that every size has the same bits."""

    def job_file(self) -> dict[str, Any]:
        body = super().job_file()
        body["train"] |= {"exact": "best_effort"}
        return body | {"parallel": {"tp": 2, "pp": 1, "max_devices": FIRST}}


def main() -> int:
    asked = _arguments()
    end_in_good_order()
    found: dict[str, Any] = dict.fromkeys(("share_of_bound", "scale_pause_s", "curve_equal", "bytes_moved_share"))
    missed = {}
    for part in asked.parts:
        try:
            found |= bound(asked.seconds) if part == "bound" else scale()
        except (NotMeasured, ClientError, EverstepError) as error:
            missed[f"{part}_missed"] = str(error)
            say(f"{part}: {error}")
    print(json.dumps(found | missed), flush=True)
    return 1 if missed else 0


def bound(seconds: float) -> dict[str, Any]:
    """Of the rate that all devices' speeds add up to; communication, bubbles and updates are what is missing."""
    work = Emulated(name="hetero", width=64, degrees=(1, 1, 1), layers=LAYERS, sequence=32, micro_batches=24)
    with local_cluster(NODES_MIXED) as cluster, Client(cluster.url, retry_s=60) as client:
        job = Job(client, work)
        view = job.wait(lambda one: one.status == "RUNNING" and one.step >= QUIET_STEPS, f"step {QUIET_STEPS}")
        kinds = {node.id: node.kind for node in client.nodes()}
        least = int(seconds / (view.typical_step_s or 1.0)) + 4
        view = job.wait_for_step(view.step + least)
        step_s = median(step.seconds for step in job.fetch()[-least:] if step.seconds is not None)
    speed = sum(speed_of(kinds[node]) for node in kinds)
    least_s = work.micro_batches * _layers_of(view) * LAYER_S / speed
    assert view.plan is not None
    say(f"bound: {view.plan.summary}, steps of {step_s:.3f} s, {least_s:.3f} s by the sum of all rates")
    return {"share_of_bound": round(least_s / step_s, 4), "step_s": round(step_s, 4), "bound_s": round(least_s, 4)}


def scale() -> dict[str, Any]:
    work = Scaled(name="scale", width=64, degrees=(2, 1, 1), micro_batches=12)
    pauses: list[float] = []
    shares: list[float] = []
    with local_cluster(NODES) as cluster, Client(cluster.url, retry_s=60) as client:
        job = Job(client, work)
        before = job.wait_for_step(QUIET_STEPS)
        _require(before, FIRST)
        for size in SIZES:
            client.resize(job.id, target=size, max_devices=0)
            one = _resized(job, before, size)
            pauses.append(round(one.pause_s or 0.0, 4))
            shares.append(round(one.moved_elements / (3 * (before.num_params or 1)), 4))
            say(f"scale: to {size} ranks, pause {one.pause_s:.3f} s, {one.moved_elements} elements moved in it")
            before = job.wait_for_step(job.view().step + QUIET_STEPS)
            _require(before, size)
        client.cancel(job.id)
        ended = client.wait(job.id, 120)
        steps = list(client.all_metrics(job.id))
        body = work.job_file()
        body["train"]["steps"] = ended.step
        twin = client.wait(client.submit(body).id, 600)
        gaps = curve_gaps(steps, list(client.all_metrics(twin.id)), ended.step)
    return {
        "scale_pause_s": pauses,
        "scale_moved_share": shares,
        "curve_equal": len(gaps) >= ended.step and max(gaps) == 0.0,
        "steps_rolled_back": sum(one.rolled_back for one in ended.incidents),
    }


def _resized(job: Job, before: JobView, size: int) -> IncidentView:
    """The one incident that the change of size is. Raises NotMeasured where there is another."""
    seen = last_incident(before)

    def is_done(view: JobView) -> bool:
        new = incidents_after(view, seen)
        return bool(new) and new[-1].pause_s is not None and view.plan is not None and len(view.plan.seats) == size

    (one, *more) = incidents_after(job.wait(is_done, f"{size} ranks"), seen)
    if more or one.cause not in ("grow", "shrink"):
        raise NotMeasured(f"something else happened on the way to {size} ranks: {one.message}")
    return one


def _require(view: JobView, size: int) -> None:
    if view.plan is None or len(view.plan.seats) != size:
        raise NotMeasured(f"the job runs on {len(view.plan.seats) if view.plan else 0} devices, {size} were wanted")


def _layers_of(view: JobView) -> int:
    """Of the program: the model's own and those at both ends."""
    assert view.plan is not None
    return max(seat.layers[1] for seat in view.plan.seats)


def _parts(text: str) -> Sequence[str]:
    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in PARTS]:
        raise argparse.ArgumentTypeError(f"there is no part {', '.join(unknown)}; choose from {', '.join(PARTS)}")
    return names


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.hetero", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="the JSON line is printed in any case")
    parser.add_argument("--parts", type=_parts, default=list(PARTS), help=f"some of {','.join(PARTS)}")
    parser.add_argument("--seconds", type=float, default=20.0, help="of training that are measured")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
