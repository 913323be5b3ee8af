"""Samples of what is stored and sent about the queue, for golden files and round trips."""

from __future__ import annotations

from dataclasses import replace

from orchestrator.domain.events import Input, PriorityRequested, QuotaRequested
from orchestrator.domain.ids import Device
from orchestrator.domain.job import JobRecord, Pause
from orchestrator.domain.queue import Project, Turn, Waiting, WaitReason

from .samples import AT, JOB, NODE, RECORDS

INPUTS: tuple[Input, ...] = (
    PriorityRequested(job=JOB, priority=5),
    QuotaRequested(project="vision", max_devices=8),
    QuotaRequested(project="vision", max_devices=None),
)
PROJECTS = (Project(name="vision", max_devices=8), Project(name="speech"))
QUEUE = (
    Waiting(
        job=JOB,
        position=1,
        reason=WaitReason.BUSY,
        message="waits for 2 more A100",
        priority=5,
        project="vision",
        least=4,
        since=AT,
    ),
    *(Waiting(job=JOB, position=n, reason=reason, message="") for n, reason in enumerate(WaitReason, 2)),
)
TURN = Turn(
    priority=7,
    yields=frozenset({Device(NODE, 1)}),
    yields_to=JOB,
    cleared=frozenset({Device(NODE, 1)}),
    floor=3,
    asked=frozenset({Device(NODE, 0)}),
    asks_whether=True,
    judged=frozenset({Device(NODE, 0)}),
    infeasible="needs 9 devices, 4 usable",
    wait=WaitReason.INFEASIBLE,
    is_preempted=True,
    queued_s=12.5,
    queued_since=AT,
    held_s=100.0,
    held_since=AT,
    unsaved_until=AT + 60,
)
RECORD: JobRecord = replace(
    RECORDS[-1],
    spec=replace(RECORDS[-1].spec, priority=5, project="vision", start_by_s=60.0, max_runtime_s=3600.0),
    turn=TURN,
    archived_at=AT,
    pause=Pause(preempted="job-2 has a higher priority", ends="it has had its time"),
)
