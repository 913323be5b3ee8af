"""A mixed and a changing cluster: how near a job comes to the speed its devices add up to, and what changes cost.

    python -m benchmarks.hetero --json [--parts bound,uniform,straggler,scale] [--steps 6]

Devices are processors that stand for A100s, H100s and B200s: a layer takes the time it would there, by dense bf16 rates
(train.emulated_layer_s), so that many ranks fit two cores. The last line of output is one JSON object; what was not
measured is null.

bound      wall-clock rate over the sum of the devices' rates: share_of_bound
uniform    the same jobs under plans that take all devices for alike: ratio_to_uniform
straggler  a rank killed (bytes_moved_share: of all that is held), then a device slowed 2x: straggler_recovered_share and
           straggler_steps, until steps take no more than what is left of all rates would need at the efficiency of before
scale      6 -> 8 -> 4 -> 8 ranks while the job trains, each pause as the job's ledger has it; then the same job undisturbed

Emulated layers take the place of real ones: what a processor computes meanwhile is part of that time. What remains of a
step (reducing, mirroring, voting, updating: a tenth of a second of these two cores) does not shrink with the devices
that are stood for, as it would there, so layers are long enough that it is a few per cent: LAYER_S.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

from api.client import Client
from api.client.errors import ClientError
from api.views import IncidentView, JobView
from deploy.local import NodeSpec
from deploy.supervisor_main import IGNORES_KINDS
from orchestrator.domain.cluster import speed_of
from orchestrator.domain.errors import EverstepError

from .cluster import NODES, Job, NotMeasured, end_in_good_order, local_cluster, say
from .soak import curve_gaps
from .trial import incidents_after, last_incident
from .workload import Workload

PARTS = ("bound", "uniform", "straggler", "scale")
KEYS = (
    "share_of_bound",
    "ratio_to_uniform",
    "straggler_recovered_share",
    "straggler_steps",
    "scale_pause_s",
    "curve_equal",
    "bytes_moved_share",
)
SIZES = (8, 4, 8)
FIRST = 6
QUIET_STEPS = 12
WARM_STEPS = 3
LAYERS = 8
LAYER_S = 0.08
"""Of an A100. Steps take 4 s then, in which what devices do not do for each other takes 0.1 to 0.2 s."""
NODES_MIXED = (NodeSpec("A100", 1), NodeSpec("A100", 1), NodeSpec("H100", 1), NodeSpec("B200", 1))
NODES_HALF = (NodeSpec("A100", 1), NodeSpec("A100", 1), NodeSpec("H100", 1), NodeSpec("H100", 1))
NODES_ALIKE = (NodeSpec("A100", 1),) * 4
SLOWED = 2.0
MOST_STEPS = 40
"""After which a device that was slowed counts as never made up for."""
RECOVERED = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Emulated(Workload):
    """Compute that takes the time it would on the devices stood for; tp 1, and the rest as the planner likes."""

    layer_s: float

    def job_file(self) -> dict[str, Any]:
        body = Workload.job_file(self)
        body["train"] |= {"emulated_layer_s": self.layer_s}
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
    found: dict[str, Any] = dict.fromkeys(KEYS)
    missed = {}
    measures = {"bound": bound, "uniform": uniform, "straggler": straggler, "scale": scale}
    for part in asked.parts:
        try:
            found |= measures[part](asked.steps)
        except (NotMeasured, ClientError, EverstepError) as error:
            missed[f"{part}_missed"] = str(error)
            say(f"{part}: {error}")
    print(json.dumps(found | missed), flush=True)
    return 1 if missed else 0


# --- how fast a mixed cluster is -----------------------------------------------------------------------------------------


def bound(steps: int) -> dict[str, Any]:
    """Of the rate that all devices' speeds add up to; communication, bubbles and updates are what is missing."""
    # So many ids that whole ones can be shared out within a per cent of the rates.
    work = _emulated("hetero", micro_batches=62, layer_s=LAYER_S)
    with local_cluster(NODES_MIXED) as cluster, Client(cluster.url, retry_s=60) as client:
        step_s, view = _step_s(client, work, steps)
    least_s = work.micro_batches * _layers_of(view) * LAYER_S / sum(speed_of(node.kind) for node in NODES_MIXED)
    say(f"bound: steps of {step_s:.3f} s, {least_s:.3f} s by the sum of all rates")
    return {"share_of_bound": round(least_s / step_s, 4), "step_s": round(step_s, 4), "bound_s": round(least_s, 4)}


def uniform(steps: int) -> dict[str, Any]:
    """How many times faster a plan is that knows its kinds, on A100 and H100 half and half, and with B200s."""
    work = _emulated("uniform", micro_batches=24, layer_s=0.06)
    ratios = {}
    for name, nodes in (("a_h", NODES_HALF), ("a_h_b", NODES_MIXED)):
        with local_cluster(nodes) as cluster, Client(cluster.url, retry_s=60) as client:
            mine_s, _ = _step_s(client, work, steps)
        with _kinds_ignored(), local_cluster(nodes) as cluster, Client(cluster.url, retry_s=60) as client:
            uniform_s, view = _step_s(client, work, steps)
        if view.plan is None or len({len(ids) for ids in view.plan.micro_batches}) > 1:
            raise NotMeasured(f"the plan that was to take devices for alike does not: {view.plan}")
        say(f"uniform: {name}: steps of {mine_s:.3f} s, {uniform_s:.3f} s where devices are taken for alike")
        ratios[name] = round(uniform_s / mine_s, 3)
    return {"ratio_to_uniform": ratios}


def _emulated(name: str, micro_batches: int, layer_s: float) -> Emulated:
    return Emulated(
        name=name,
        width=64,
        degrees=(1, 1, 1),
        layers=LAYERS,
        sequence=32,
        micro_batches=micro_batches,
        layer_s=layer_s,
    )


def _step_s(client: Client, work: Emulated, steps: int) -> tuple[float, JobView]:
    """Median of so many steps of a job that is over then."""
    job = Job(client, work)
    view = job.wait(lambda one: one.status == "RUNNING" and one.step >= WARM_STEPS, f"step {WARM_STEPS}")
    view = job.wait_for_step(view.step + steps)
    found = median(step.seconds for step in job.fetch()[-steps:] if step.seconds is not None)
    assert view.plan is not None
    shares = " ".join(str(len(ids)) for ids in view.plan.micro_batches)
    say(f"{work.name}: {view.plan.summary}, micro-batches {shares}: {view.plan.reason}")
    client.cancel(job.id)
    client.wait(job.id, 120)
    return found, view


@contextmanager
def _kinds_ignored() -> Iterator[None]:
    os.environ[IGNORES_KINDS] = "1"
    try:
        yield
    finally:
        del os.environ[IGNORES_KINDS]


# --- what happens to it --------------------------------------------------------------------------------------------------


def straggler(steps: int) -> dict[str, Any]:
    """A killed rank's state is all that moves; then one device of four takes twice as long."""
    work = _emulated("straggler", micro_batches=28, layer_s=0.02)
    with local_cluster(NODES_ALIKE) as cluster, Client(cluster.url, retry_s=60) as client:
        job = Job(client, work)
        before = job.wait_for_step(WARM_STEPS)
        client.inject({"kind": "kill", "job": job.id, "rank": 1})
        after = job.wait(lambda view: _is_over(view, last_incident(before)), "the killed rank's successor")
        moved = incidents_after(after, last_incident(before))[-1].moved_elements
        assert after.plan is not None
        num_ranks = len(after.plan.seats)
        # Two hold each interval, so what all hold is twice the state.
        share = moved / ((1 + work.mirrors) * (after.num_params or 1))
        say(f"straggler: {moved} elements moved for one of {num_ranks} ranks, {share:.4f} of what all hold")
        view = job.wait_for_step(after.step + WARM_STEPS + steps)
        even_s = median(step.seconds for step in job.fetch()[-steps:] if step.seconds is not None)
        best_s = even_s * num_ranks / (num_ranks - 1 + 1 / SLOWED)
        slowed = last_incident(view)
        client.inject({"kind": "slow", "job": job.id, "rank": 2, "factor": SLOWED, "duration_s": 3000})
        job.wait(lambda _: _begun_at(client, job.id) > 0, "the slowdown")
        first = _begun_at(client, job.id)
        view = job.wait_for_step(first + MOST_STEPS)
        # The first of a generation has no beginning that was seen: as long as can be.
        took = [step.seconds or 99.0 for step in job.fetch() if first <= step.step <= first + MOST_STEPS]
        changes = incidents_after(view, slowed)
    for one in changes:
        say(f"straggler: {one.message}; pause {one.pause_s} s")
    if sum(one.rolled_back for one in changes) or any(one.cause != "balance" for one in changes):
        raise NotMeasured(f"something else happened: {[one.message for one in changes]}")
    end_s = median(took[-10:])
    good = [number for number in range(len(took) - 2) if best_s / median(took[number : number + 3]) >= RECOVERED]
    say(f"straggler: steps of {even_s:.3f} s, at best {best_s:.3f} s, {max(took):.3f} s at worst, {end_s:.3f} s in the end")
    return {
        "bytes_moved_share": round(share, 4),
        "straggler_recovered_share": round(best_s / end_s, 4),
        "straggler_steps": good[0] if good else None,
        "straggler_best_s": round(best_s, 4),
        "straggler_step_s": [round(one, 3) for one in took],
    }


def _begun_at(client: Client, job: str) -> int:
    """The step from which the device has been slow; 0 before that."""
    return next((one.step or 0 for one in client.faults(job) if one.kind == "slow" and one.carried_out_at), 0)


def _is_over(view: JobView, seen: int) -> bool:
    new = incidents_after(view, seen)
    return bool(new) and new[-1].pause_s is not None


def scale(_: int) -> dict[str, Any]:
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
        return _is_over(view, seen) and view.plan is not None and len(view.plan.seats) == size

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
    parser.add_argument("--steps", type=int, default=6, help="of each job that are measured")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
