"""Samples of what is stored and sent where numbers are doubted, for golden files and round trips."""

from __future__ import annotations

from dataclasses import replace

from orchestrator.domain.events import HostSaid, Input, ReleaseRequested
from orchestrator.domain.generation import Disagrees, NotFinite, RankReport, Settlement
from orchestrator.domain.host_events import HostEvent, SelfTested
from orchestrator.domain.ids import Rank, Step
from orchestrator.domain.quarantine import Quarantine, Standing
from orchestrator.domain.requests import HostRequest, SelfTest

from .samples import AT, D0, D2, JOB, NODE, REPORT, SETTLEMENT

REQUESTS: tuple[HostRequest, ...] = (SelfTest(device=D0),)
HOST_EVENTS: tuple[HostEvent, ...] = (SelfTested(device=D0, passed=False, message="3 elements are wrong"),)
INPUTS: tuple[Input, ...] = (
    ReleaseRequested(node=NODE),
    *(HostSaid(job=JOB, node=NODE, event=event) for event in HOST_EVENTS),
)
REPORTS: tuple[RankReport, ...] = (
    replace(REPORT, found=Disagrees(rank=Rank(1), about="state")),
    replace(REPORT, found=NotFinite(step=Step(42), micro_batches=(0, 3))),
)
SETTLEMENTS: tuple[Settlement, ...] = (replace(SETTLEMENT, holders=(), is_distrusted=True),)
QUARANTINES: tuple[Quarantine, ...] = (
    Quarantine(device=D0, reason=f"{D0} and its mirror {D2} disagree", since=AT, job=JOB, tester=JOB),
    Quarantine(
        device=D2,
        reason="rank 2 differs",
        since=AT,
        job=JOB,
        strikes=2,
        standing=Standing.HELD,
        said="passed",
    ),
)
