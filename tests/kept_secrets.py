"""Samples of what is stored and sent about a job that names secrets, for golden files and round trips."""

from __future__ import annotations

from dataclasses import replace

from orchestrator.domain.job import JobRecord
from orchestrator.domain.requests import HostRequest, OpenHost

from .samples import JOB, NODE, PROFILE, RECORDS

SPEC = replace(RECORDS[-1].spec, secrets={"HF_TOKEN": "hf-token"})
REQUESTS: tuple[HostRequest, ...] = (
    OpenHost(
        job=JOB,
        node=NODE,
        num_devices=2,
        spec=SPEC,
        profile=PROFILE,
        checkpoint_dir="/state/c",
        log_dir="/state/l",
        secrets_dir="/state/secrets",
    ),
)
RECORD: JobRecord = replace(RECORDS[-1], spec=SPEC)
