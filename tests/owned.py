"""Samples of what is stored about a job whose submitter is known, for golden files and round trips."""

from __future__ import annotations

from dataclasses import replace

from orchestrator.domain.access import Submitter
from orchestrator.domain.events import Input, JobSubmitted
from orchestrator.domain.job import JobRecord

from .samples import AT, JOB, RECORDS, SPEC

BY = Submitter(id="tok-0123456789ab", name="ci")
INPUTS: tuple[Input, ...] = (JobSubmitted(job=JOB, spec=SPEC, at=AT, by=BY),)
RECORD: JobRecord = replace(RECORDS[-1], by=BY)
