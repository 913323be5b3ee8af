"""Many jobs at once: what a filter selects is counted first, then cancelled, paused, resumed or resized."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Annotated

from fastapi import APIRouter, Depends

from orchestrator.domain.errors import Refused
from orchestrator.domain.events import (
    CancelRequested,
    Command,
    PauseRequested,
    PriorityRequested,
    ResizeRequested,
    ResumeRequested,
)
from orchestrator.domain.job import JobRecord
from orchestrator.ports import Desk

from .. import views
from ..access import ThePrincipal
from ..deps import TheDesk, body_of, document
from ..schemas import ResizeRequest
from ..selections import ResizeManyRequest, SelectionRequest

router = APIRouter(prefix="/api/v1", tags=["jobs"])
PAGE = 200
NAMED = 100
"""Of those selected, so many are named in the answer."""
TheSelection = Annotated[SelectionRequest, Depends(body_of(SelectionRequest))]


@router.post("/jobs:cancel", status_code=202, openapi_extra=document(SelectionRequest))
async def cancel_many(desk: TheDesk, principal: ThePrincipal, wanted: TheSelection) -> views.BulkView:
    """Cancel every open job that the filter selects; with `dry_run`, only say which those are."""
    return await _to_each(desk, wanted, lambda job: (CancelRequested(job=job.id, by=principal.name),), "cancelled")


@router.post("/jobs:pause", status_code=202, openapi_extra=document(SelectionRequest))
async def pause_many(desk: TheDesk, principal: ThePrincipal, wanted: TheSelection) -> views.BulkView:
    """Pause every open job that the filter selects; with `dry_run`, only say which those are."""
    return await _to_each(desk, wanted, lambda job: (PauseRequested(job=job.id, by=principal.name),), "paused")


@router.post("/jobs:resume", status_code=202, openapi_extra=document(SelectionRequest))
async def resume_many(desk: TheDesk, principal: ThePrincipal, wanted: TheSelection) -> views.BulkView:
    """Resume every open job that the filter selects; with `dry_run`, only say which those are."""
    return await _to_each(desk, wanted, lambda job: (ResumeRequested(job=job.id, by=principal.name),), "resumed")


@router.post("/jobs:resize", status_code=202, openapi_extra=document(ResizeManyRequest))
async def resize_many(
    desk: TheDesk, principal: ThePrincipal, wanted: Annotated[ResizeManyRequest, Depends(body_of(ResizeManyRequest))]
) -> views.BulkView:
    """Change the size or priority of every open job that the filter selects; one that may not have it stays as it is."""
    wanted.resize.require_some()
    return await _to_each(desk, wanted, lambda job: _resized(job, wanted.resize, principal.name), "resized")


def _resized(record: JobRecord, wanted: ResizeRequest, by: str) -> Sequence[Command]:
    """Raises Refused where its bounds contradict what is wanted."""
    size = wanted.changed(record.wanted_size)
    sized = (ResizeRequested(job=record.id, size=size, by=by),) if wanted.is_of_size else ()
    if wanted.priority is None:
        return sized
    return (PriorityRequested(job=record.id, priority=wanted.priority, by=by), *sized)


async def _to_each(
    desk: Desk, wanted: SelectionRequest, commands: Callable[[JobRecord], Sequence[Command]], done: str
) -> views.BulkView:
    wanted.require_some()
    jobs: list[str] = []
    refused: list[str] = []
    count = 0
    async for record in _selected(desk, wanted):
        try:
            asked = commands(record)
        except Refused as error:
            refused.append(f"{record.id}: {error.message}")
            continue
        count += 1
        if len(jobs) < NAMED:
            jobs.append(record.id)
        for command in () if wanted.dry_run else asked:
            await desk.command(command)
    how = "would be" if wanted.dry_run else "are being" if count != 1 else "is being"
    not_all = f"; {len(refused)} cannot be, the first because {refused[0]}" if refused else ""
    message = f"{count} job{'' if count == 1 else 's'} {how} {done}{not_all}"
    return views.BulkView(
        count=count, jobs=tuple(jobs), dry_run=wanted.dry_run, message=message, refused=tuple(refused[:NAMED])
    )


async def _selected(desk: Desk, wanted: SelectionRequest) -> AsyncIterator[JobRecord]:
    """Newest first; one that is submitted meanwhile is not among them."""
    cursor: str | None = None
    while True:
        page = await desk.list(PAGE, cursor)
        for record in page.jobs:
            if wanted.selects(record):
                yield record
        cursor = page.next_cursor
        if cursor is None:
            return
