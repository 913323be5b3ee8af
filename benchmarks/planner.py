"""How fast the planner plans, how near its predictions are to measured runs, and how far from the best its plans are.

    plan_s              seconds, the median of several, placed on named devices: 3 kinds x 32 and x 256 devices (OPT-350M,
                        four micro-batch sizes), and 24,576 of 4 kinds (Llama-3-70B)
    peak_mb             most memory that Python held while it planned the largest
    replan_ms           one node of those 3,072 lost: with the answer ready, and without (prices of layers are kept);
                        the worst of all classes of nodes
    mape                vtrain_left_out: constants fitted on the other model sizes; gh200: link constants on the other rows
    top3_regret         how much slower than the best measured run the best of the model's top three is; mean over model
                        sizes, each left out of calibration. top3_regret_worst: of the worst of them
    optimality_gap_max  over small clusters, of the search against every plan there is

Measured rows are read from `--data` (beside the repository, `../shared/data`); without them those figures are null.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from statistics import fmean, median
from typing import Any

from orchestrator.domain.kinds import KINDS
from orchestrator.planner.ask import Ask, Batch, Planned
from orchestrator.planner.calibrate import Bounds, Run, fit, mean_error, predict
from orchestrator.planner.constants import Constants
from orchestrator.planner.machines import Machines, NodeGroup, machines
from orchestrator.planner.model import Shape, of_shape
from orchestrator.planner.placement import place
from orchestrator.planner.replan import Current, Index, Outlook, replan
from orchestrator.planner.search import Benches, search, three

from .planner_data import OPT_350M, Row, gh200, vtrain
from .planner_gap import worst_gap

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
LLAMA_70B = Shape(
    layers=80,
    hidden=8192,
    heads=64,
    kv_heads=8,
    ffn=28_672,
    gated=True,
    tied=False,
    vocabulary=128_256,
    sequence=4096,
)
OF_A_CLUSTER: Bounds = {
    "product_share": (0.5, 1.0),
    "memory_share": (0.4, 1.0),
    "kernel_s": (1e-5, 1e-4),
    "link_latency_s": (3e-6, 6e-5),
    "network_share": (0.3, 0.95),
    "exposed_share": (0.1, 1.6),
}
OF_LINKS: Bounds = {
    "network_share": (0.05, 1.0),
    "network_latency_s": (1e-6, 1e-2),
    "neighbour_factor": (0.1, 10.0),
    "exposed_share": (0.1, 10.0),
}
ROUNDS = 7


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, nothing else")
    parser.add_argument("--data", type=Path, default=DATA)
    asked = parser.parse_args()
    found = figures(asked.data)
    print(json.dumps(found) if asked.json else json.dumps(found, indent=2))
    return 0


def figures(data: Path) -> dict[str, Any]:
    small, medium, large = _opt(32), _opt(256), _llama()
    found: dict[str, Any] = {
        "plan_s": {
            "k3x32": _seconds(lambda: _placed(small())),
            "k3x256": _seconds(lambda: _placed(medium())),
            "n24576": _seconds(lambda: _placed(large())),
        },
        "peak_mb": _peak_mb(lambda: _placed(large())),
        "replan_ms": _replanned(large()),
        "optimality_gap_max": worst_gap(),
    }
    return found | (_accuracy(data) if data.exists() else {"mape": None, "top3_regret": None, "top3_regret_worst": None})


# --- speed ---------------------------------------------------------------------------------------------------------------


def _opt(devices: int) -> Callable[[], Ask]:
    kinds = ("A100-40", "V100", "H100")

    def ask() -> Ask:
        cluster = _cluster({kind: devices for kind in kinds})
        batches = tuple(Batch(samples=size, micro_batches=1024 // size) for size in (1, 2, 4, 8))
        return Ask(model=of_shape(OPT_350M), machines=cluster, batches=batches, recompute=(False, True), uneven=True)

    return ask


def _llama() -> Callable[[], Ask]:
    def ask() -> Ask:
        cluster = _cluster({"B200": 4096, "H100": 8192, "A100": 8192, "V100": 4096})
        batches = tuple(Batch(samples=size, micro_batches=8192 // size) for size in (1, 2))
        return Ask(model=of_shape(LLAMA_70B), machines=cluster, batches=batches, recompute=(False, True), uneven=True)

    return ask


def _cluster(devices: dict[str, int]) -> Machines:
    return machines([NodeGroup(kind=KINDS[kind], nodes=count // 8, devices=8) for kind, count in devices.items()])


def _placed(ask: Ask) -> None:
    found = search(ask)
    assert isinstance(found, Planned), found
    place(found.best, ask.machines)


def _seconds(work: Callable[[], None]) -> float:
    taken = []
    for _ in range(ROUNDS):
        gc.collect()
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return median(taken)


def _peak_mb(work: Callable[[], None]) -> float:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1] / 1e6
    finally:
        tracemalloc.stop()


def _replanned(ask: Ask) -> dict[str, float]:
    benches = Benches()
    found = search(ask, benches)
    assert isinstance(found, Planned)
    current = Current(proposal=found.best, plan=place(found.best, ask.machines), machines=ask.machines)
    index, outlook = Index.of(current), Outlook(ask=ask, benches=benches)
    nodes = {machine.key: machine.node for machine in ask.machines.nodes}

    def worst() -> float:
        taken: list[float] = []
        for node in nodes.values():
            rounds = []
            for _ in range(ROUNDS):
                gc.collect()
                began = time.perf_counter()
                replan(current, outlook, nodes=(node,), index=index)
                rounds.append(time.perf_counter() - began)
            taken.append(median(rounds))
        return max(taken) * 1e3

    cold = worst()
    outlook.prepare()
    return {"precomputed": worst(), "cold": cold}


# --- accuracy ------------------------------------------------------------------------------------------------------------


def _accuracy(data: Path) -> dict[str, Any]:
    rows = vtrain(data, "multi_node.csv")
    errors: list[float] = []
    regrets: list[float] = []
    for size in sorted({row.billions for row in rows}):
        constants = fit([row.run for row in rows if row.billions != size], Constants(), OF_A_CLUSTER, rounds=12)
        left_out = [row for row in rows if row.billions == size]
        errors.extend(abs(predict(row.run, constants) / row.run.seconds - 1) for row in left_out)
        regrets.extend(_regrets(left_out, constants))
    return {
        "mape": {"vtrain_left_out": fmean(errors), "gh200": _gh200_error(data)},
        "top3_regret": fmean(regrets),
        "top3_regret_worst": max(regrets),
    }


def _regrets(rows: Sequence[Row], constants: Constants) -> list[float]:
    """By number of devices: the best measured of the model's three, over the best measured."""
    found = []
    for _, group in groupby(sorted(rows, key=_asked), key=_asked):
        ranked = sorted(
            ((predict(row.run, constants), (row.run.tp, row.run.dp, len(row.run.bounds)), row.run) for row in group),
            key=lambda one: one[0],
        )
        kept = three([(seconds, shape, run.samples) for seconds, shape, run in ranked])
        best = min(run.seconds for _, _, run in ranked)
        found.append(min(ranked[index][2].seconds for index in kept) / best - 1)
    return found


def _asked(row: Row) -> tuple[int, int]:
    return row.devices, row.run.batch


def _gh200_error(data: Path) -> float:
    """Each row by constants fitted on the others."""
    runs, measured = gh200(data)
    start = Constants(network_share=0.4, neighbour_factor=1.0)
    errors = []
    for left_out in runs:
        others: list[Run] = [run for run in runs if run is not left_out]
        constants = fit(others, start, OF_LINKS, rounds=12, measured=measured)
        errors.append(mean_error([left_out], constants, measured))
    return fmean(errors)


if __name__ == "__main__":
    sys.exit(main())
