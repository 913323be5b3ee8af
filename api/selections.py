"""Which jobs a command to many is meant for."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from orchestrator.domain.errors import Refused
from orchestrator.domain.job import JobRecord, JobStatus
from orchestrator.domain.status import TERMINAL_STATUSES, status_of

from .schemas import Labels, Name, Request, ResizeRequest


class SelectionRequest(Request):
    """Open jobs that are in one of these states, have this name and carry all of these labels; what is left out is any."""

    state: Annotated[list[JobStatus], Field(max_length=20)] = []
    name: Name | None = None
    labels: Labels = {}
    dry_run: bool = False
    """Only say which they are."""

    def require_some(self) -> None:
        """Raises Refused: nobody means every job by leaving everything out."""
        if not (self.state or self.name or self.labels):
            raise Refused("nothing is selected; send state, name or labels")

    def selects(self, record: JobRecord) -> bool:
        status = status_of(record.state)
        return (
            status not in TERMINAL_STATUSES
            and (not self.state or status in self.state)
            and self.name in (None, record.spec.name)
            and self.labels.items() <= record.spec.labels.items()
        )


class ResizeManyRequest(SelectionRequest):
    """And what each of them is to have."""

    resize: ResizeRequest
