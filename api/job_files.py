"""A spec as the job file that would ask for it: what the API shows of a job, and what a job is submitted again with."""

from __future__ import annotations

import dataclasses
from typing import Any

from orchestrator.domain.codec import encode
from orchestrator.domain.spec import JobSpec


def job_file(spec: JobSpec) -> dict[str, Any]:
    """With every default written out. The codec's class names belong to storage; a program's own settings pass unread."""
    shaped: dict[str, Any] = {}
    for item in dataclasses.fields(spec):
        value = getattr(spec, item.name)
        if dataclasses.is_dataclass(value):
            shaped[item.name] = {part.name: encode(getattr(value, part.name)) for part in dataclasses.fields(value)}
        else:
            shaped[item.name] = encode(value)
    return shaped
