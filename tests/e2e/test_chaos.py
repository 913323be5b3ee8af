"""A short seeded soak on a real local cluster: random faults, nodes lost and grown back, and nobody can tell afterwards."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from api.chaos import Schedule
from api.client import Client
from benchmarks.chaos import soak
from benchmarks.cluster import NODES
from deploy.local import up

pytestmark = pytest.mark.timeout(420)
SEED = int(os.environ.get("EVERSTEP_SEED", "375"))
KINDS = {
    "kill": 8.0, "stop": 1.0, "slow": 1.0, "node_kill": 2.0, "host_kill": 1.0, "zygote_kill": 1.0, "supervisor_kill": 1.0,
    "redis_stall": 1.0, "clock_jump": 1.0,
}  # fmt: skip


def test_a_short_soak_leaves_no_trace(tmp_path: Path) -> None:
    schedule = Schedule.model_validate(
        {
            "seed": SEED,
            "num_faults": 12,
            "rate_per_minute": 60,
            "duration_s": 60,
            "kinds": KINDS,
            "regrow_s": 2,
            "at_once": 1,
        }
    )
    cluster = up(tmp_path, NODES, chaos=True, say=print)
    try:
        with Client(cluster.url, retry_s=60) as client:
            found = soak(client, schedule, exact=True, sequence=32)
    finally:
        cluster.down()
    report = found.report
    print(f"EVERSTEP_SEED={SEED}", report.kinds, report.verdicts, report.points, found.plans, found.largest_gap)
    assert report.num_faults >= 4
    assert set(report.verdicts) <= {"recovered", "harmless", "refused"}, report.faults
    assert (found.samples_lost, found.samples_doubled) == (0, 0)
    assert report.steps_rolled_back == 0
    assert found.curve_equal and found.weights_bit_equal, (found.largest_gap, found.weights_gap)
