"""Samples of what is stored and sent about sizes and cordons, for golden files and round trips."""

from __future__ import annotations

from dataclasses import replace

from orchestrator.domain.cordon import Cordon
from orchestrator.domain.events import CordonRequested, Input, ResizeRequested, UncordonRequested
from orchestrator.domain.job import JobRecord
from orchestrator.domain.size import Size

from .samples import AT, JOB, NODE, OTHER, RECORDS

SIZE = Size(min_devices=2, max_devices=8, target=6)
INPUTS: tuple[Input, ...] = (
    ResizeRequested(job=JOB, size=SIZE),
    CordonRequested(node=NODE, drain=True, remove=True, deadline_s=30.0),
    UncordonRequested(node=NODE),
)
CORDONS = (
    Cordon(node=NODE, since=AT, drains=True, removes=True, deadline=AT + 30, is_empty=True, removed_at=AT + 5),
    Cordon(node=OTHER, since=AT),
)
RECORD: JobRecord = replace(RECORDS[-1], size=SIZE)
