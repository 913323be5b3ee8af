"""Samples of what is stored and sent about pauses, for golden files and round trips."""

from __future__ import annotations

from dataclasses import replace

from orchestrator.domain.events import Input, PauseRequested, ResumeRequested
from orchestrator.domain.ids import Device, Generation, Step
from orchestrator.domain.job import JobRecord, Pause
from orchestrator.domain.requests import HostRequest, SaveSoon
from orchestrator.domain.state import JobState, Paused, Stopping

from .samples import AT, JOB, NODE, RECORDS

INPUTS: tuple[Input, ...] = (PauseRequested(job=JOB), ResumeRequested(job=JOB))
STATES: tuple[JobState, ...] = (Paused(at=AT), Stopping(outcome=Paused(at=AT), open_hosts=frozenset({NODE})))
REQUESTS: tuple[HostRequest, ...] = (SaveSoon(generation=Generation(3), device=Device(NODE, 1), rests=True),)
PAUSE = Pause(told=Generation(3), step=Step(7), failed=Step(6), why="no space left", resumes=True)
RECORD: JobRecord = replace(RECORDS[-1], pause=PAUSE)
