"""Short seeded soaks on a real local cluster: random faults, nodes lost and grown back, jobs made larger and smaller and
their stages cut anew meanwhile, and nobody can tell afterwards.
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

pytestmark = pytest.mark.timeout(600)
SEED = int(os.environ.get("EVERSTEP_SEED", "255"))
SOAKS = {"recut": (9, (4, 8, DRAIN, 6)), "tp2xpp2": (14, (4, 8))}
"""By shape: the number of faults, and what is asked meanwhile: numbers of devices, all of which the shape can use."""


@pytest.mark.parametrize("name", SOAKS)
def test_a_short_soak_leaves_no_trace(tmp_path: Path, name: str) -> None:
    shape, (num_faults, script) = SHAPES[name], SOAKS[name]
    cluster = up(tmp_path, shape.nodes, chaos=True, say=print)
    try:
        with Client(cluster.url, retry_s=60) as client:
            found = soak(client, schedule(SEED, num_faults), shape, script, exact=True, sequence=32)
    finally:
        cluster.down()
    report = found.report
    print(f"EVERSTEP_SEED={SEED}", report.kinds, report.verdicts, report.points, found.resized, found.plans, report.goodput)
    assert report.num_faults >= 4, "something was done to it"
    assert found.resized.changes == len(script), "and it was made larger and smaller"
    assert name != "recut" or found.resized.recuts >= 2, "and its stages held other layers"
    assert len(found.plans) > 1
    assert set(report.verdicts) <= UNNOTICED, report.faults
    assert (found.samples_lost, found.samples_doubled) == (0, 0)
    assert found.curve_equal and found.weights_bit_equal, (found.largest_gap, found.weights_gap)
    if "bit_flip" not in report.kinds:  # which cannot be undone from memory that is not believed
        assert report.steps_rolled_back == 0


def schedule(seed: int, num_faults: int) -> Schedule:
    """A node first, then whatever the seed draws, two at a time."""
    random, of_all = Random(seed), Schedule(kinds=dict(ALL_KINDS))
    drawn = [draw(random, of_all, "job").model_dump(exclude_defaults=True, exclude={"job"}) for _ in range(num_faults - 1)]
    return Schedule(seed=seed, faults=({"kind": "node_kill", "seed": seed}, *drawn), regrow_s=2, at_once=2)
