"""A short seeded soak on a real local cluster: random faults, nodes lost and grown back, the job made smaller and larger
and its stages cut anew meanwhile, and nobody can tell afterwards.
"""

from __future__ import annotations

import os
from pathlib import Path
from random import Random

import pytest

from api.chaos import Schedule
from api.client import Client
from api.client.chaos import draw
from benchmarks.resizes import DRAIN
from benchmarks.soak import ALL_KINDS, SHAPES, UNNOTICED, soak
from deploy.local import up

pytestmark = pytest.mark.timeout(420)
SEED = int(os.environ.get("EVERSTEP_SEED", "255"))
NUM_FAULTS = 9
SCRIPT = (4, 8, DRAIN, 6)
"""Devices of two pipelines that are as deep as they allow."""


def test_a_short_soak_leaves_no_trace(tmp_path: Path) -> None:
    shape = SHAPES["recut"]
    cluster = up(tmp_path, shape.nodes, chaos=True, say=print)
    try:
        with Client(cluster.url, retry_s=60) as client:
            found = soak(client, schedule(SEED), shape, SCRIPT, exact=True, sequence=32)
    finally:
        cluster.down()
    report = found.report
    print(f"EVERSTEP_SEED={SEED}", report.kinds, report.verdicts, report.points, found.resized, found.plans, report.goodput)
    assert report.num_faults >= 4, "something was done to it"
    assert found.resized.changes == len(SCRIPT) and found.resized.recuts >= 2, "and its stages held other layers"
    assert len(found.plans) > 1
    assert set(report.verdicts) <= UNNOTICED, report.faults
    assert (found.samples_lost, found.samples_doubled) == (0, 0)
    assert found.curve_equal and found.weights_bit_equal, (found.largest_gap, found.weights_gap)
    if "bit_flip" not in report.kinds:  # which cannot be undone from memory that is not believed
        assert report.steps_rolled_back == 0


def schedule(seed: int) -> Schedule:
    """A node first, then whatever the seed draws, two at a time."""
    random, of_all = Random(seed), Schedule(kinds=dict(ALL_KINDS))
    drawn = [draw(random, of_all, "job").model_dump(exclude_defaults=True, exclude={"job"}) for _ in range(NUM_FAULTS - 1)]
    return Schedule(seed=seed, faults=({"kind": "node_kill", "seed": seed}, *drawn), regrow_s=2, at_once=2)
