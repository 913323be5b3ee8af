"""Which jobs a command to many is meant for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field

from orchestrator.domain.errors import Refused
from orchestrator.domain.job import JobRecord
from orchestrator.domain.state import JobStatus
from orchestrator.domain.status import TERMINAL_STATUSES, status_of

from .schemas import Labels, Name, Request, ResizeRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which jobs a list is to show; what is left out is any. since, until: of when they were submitted, wall clock.
    user: the name or the id of the token they were submitted with."""

    states: tuple[JobStatus, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    name: str | None = None
    project: str | None = None
    since: float | None = None
    until: float | None = None
    user: str | None = None

    def has(self, record: JobRecord) -> bool:
        return (
            (not self.states or status_of(record.state) in self.states)
            and self.labels.items() <= record.spec.labels.items()
            and self.name in (None, record.spec.name)
            and self.project in (None, record.spec.project)
            and (self.user is None or (record.by is not None and record.by.is_called(self.user)))
            and (self.since is None or record.created_at >= self.since)
            and (self.until is None or record.created_at < self.until)
        )


class SelectionRequest(Request):
    """Open jobs that are in one of these states, have this name, are of this project and carry all of these labels; what is
    left out is any."""

    state: Annotated[list[JobStatus], Field(max_length=20)] = []
    name: Name | None = None
    project: Name | None = None
    labels: Labels = {}
    dry_run: bool = False
    """Only say which they are."""

    def require_some(self) -> None:
        """Raises Refused: nobody means every job by leaving everything out."""
        if not (self.state or self.name or self.project or self.labels):
            raise Refused("nothing is selected; send state, name, project or labels")

    def selects(self, record: JobRecord) -> bool:
        status = status_of(record.state)
        return (
            status not in TERMINAL_STATUSES
            and (not self.state or status in self.state)
            and self.name in (None, record.spec.name)
            and self.project in (None, record.spec.project)
            and self.labels.items() <= record.spec.labels.items()
        )


class ResizeManyRequest(SelectionRequest):
    """And what each of them is to have."""

    resize: ResizeRequest
