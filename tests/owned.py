"""Samples of what is stored and sent about who submitted a job and who asked what of it: golden files and round trips."""

from __future__ import annotations

from dataclasses import replace

from orchestrator.domain.access import Submitter
from orchestrator.domain.events import (
    CancelRequested,
    CheckpointNow,
    Input,
    JobSubmitted,
    PauseRequested,
    PriorityRequested,
    ResizeRequested,
    ResumeRequested,
)
from orchestrator.domain.job import JobRecord
from orchestrator.domain.size import Size
from orchestrator.domain.state import Cancelled, JobState, Stopping

from .samples import AT, JOB, NODE, RECORDS, SPEC

BY = Submitter(id="tok-0123456789ab", name="ci")
INPUTS: tuple[Input, ...] = (JobSubmitted(job=JOB, spec=SPEC, at=AT, by=BY),)
ASKED: tuple[Input, ...] = (
    CancelRequested(job=JOB, by="ci"),
    CheckpointNow(job=JOB, by="ci"),
    ResizeRequested(job=JOB, size=Size(target=4), by="ci"),
    PauseRequested(job=JOB, by="ci"),
    ResumeRequested(job=JOB, by="ci"),
    PriorityRequested(job=JOB, priority=3, by="ci"),
)
STATES: tuple[JobState, ...] = (
    Cancelled(at=AT, by="ci"),
    Stopping(outcome=Cancelled(at=AT, by="ci"), open_hosts=frozenset({NODE})),
)
RECORD: JobRecord = replace(RECORDS[-1], by=BY)
