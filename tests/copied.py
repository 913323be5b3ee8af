"""Samples of what is stored and sent about copies that last, for golden files and round trips."""

from __future__ import annotations

from dataclasses import replace

from orchestrator.domain.copying import Copying
from orchestrator.domain.host_events import CopiesSeen, HostEvent
from orchestrator.domain.ids import Step
from orchestrator.domain.job import JobRecord

from .samples import D0, D1, NODE, RECORDS

COPIES = (
    Copying(device=D0, what="saving", step=Step(40), done_bytes=1 << 30, total_bytes=1 << 32, seconds=4.5),
    Copying(device=D1, what="receiving", step=Step(41), done_bytes=0, total_bytes=12, seconds=2.0),
)
HOST_EVENTS: tuple[HostEvent, ...] = (CopiesSeen(copies=COPIES), CopiesSeen(copies=()))
RECORD: JobRecord = replace(RECORDS[-1], copies={NODE: COPIES})
