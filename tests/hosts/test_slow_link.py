"""A machine behind a slow link joins a job: what it needs is copied over that link while the job trains.

The link carries what a newcomer is told of each step and little more, as it must: training over it needs as much.
"""

from __future__ import annotations

import time
from statistics import median

import pytest

from api.views import EventView
from tests.tiny_job import TinyJob

from .machines import Machines

pytestmark = pytest.mark.timeout(400)
JOB = {
    "program": "tests.slow_model:PROGRAM",
    "model": {"layers": 2, "width": 128, "heads": 2, "ffn": 256},
    # As many for the busiest of six ranks as of eight: growing makes no step shorter.
    "train": {"steps": 1_000_000, "micro_batches": 18, "micro_batch_size": 1, "sequence": 32},
}
"""Steps of a second, because each begins with naps, and most of a megabyte of gradients for two newcomers in each."""
MARGIN = 1.2
"""How much more than those gradients the link carries: the copy is three times as large, and takes fifteen steps or so."""
FRAMING = 1.05


def test_a_copy_over_a_slow_link_takes_seconds_and_the_pause_a_blink(machines: Machines, job: TinyJob) -> None:
    machines.all_train()
    before, node = job.view(), sorted(job.nodes())[-1]
    host = machines.host_of(node)
    machines.kill(node)
    job.trains_on(5)
    machines.slow(host, 8)
    newcomer = machines.start(host)
    began = _until_said(job, "joining", newcomer, 1, within_s=120)
    step_s = median(step.seconds for step in list(job.client.all_metrics(job.id))[-4:] if step.seconds)
    mbit = MARGIN * FRAMING * 4 * began.data["elements"] / step_s * 8 / 1e6
    machines.slow(host, mbit)
    ended = _until_said(job, "joined", newcomer, 2, within_s=120)
    # What follows are steps, in which every rank needs all parameters: over this link each would take ten times as long.
    machines.heal()
    machines.all_train()
    job.trains_on(2)
    grown = job.incidents_since(before)[-1]
    copy_s = (ended.at - began.at).total_seconds()
    print(
        f"\n{began.data['elements']} elements at {mbit:.1f} Mbit/s beside steps of {step_s:.1f} s: copied in {copy_s:.1f} s"
    )
    print(f"pause {grown.pause_s} s {dict(grown.phases)}, after {ended.step - began.step} steps")
    assert copy_s >= 5 and ended.step - began.step >= 3, "steps went on"
    assert grown.cause == "grow" and grown.pause_s is not None and grown.pause_s < copy_s / 10, "nobody waited for the copy"


def _until_said(job: TinyJob, kind: str, node: str, times: int, within_s: float) -> EventView:
    """The last of so many that name the node."""
    deadline = time.monotonic() + within_s
    while len(said := [one for one in _events(job, kind) if node in one.message + str(one.data)]) < times:
        assert time.monotonic() < deadline, f"{kind} of {node} was said {len(said)} times: {job.view().reason}"
        time.sleep(0.02)
    return said[-1]


def _events(job: TinyJob, kind: str) -> list[EventView]:
    return [one for one in job.client.history(job.id) if isinstance(one, EventView) and one.type == kind]
