"""Many jobs at once: what a filter selects is counted first, then cancelled, paused or resumed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Annotated

from fastapi import APIRouter, Depends

from orchestrator.domain.events import CancelRequested, Command, PauseRequested, ResumeRequested
from orchestrator.domain.ids import JobId
from orchestrator.domain.job import JobRecord
from orchestrator.ports import Desk

from .. import views
from ..deps import TheDesk, body_of, document
from ..selections import SelectionRequest

router = APIRouter(prefix="/api/v1", tags=["jobs"])
PAGE = 200
NAMED = 100
"""Of those selected, so many are named in the answer."""
TheSelection = Annotated[SelectionRequest, Depends(body_of(SelectionRequest))]


@router.post("/jobs:cancel", status_code=202, openapi_extra=document(SelectionRequest))
async def cancel_many(desk: TheDesk, wanted: TheSelection) -> views.BulkView:
    """Cancel every open job that the filter selects; with `dry_run`, only say which those are."""
    return await _to_each(desk, wanted, lambda job: CancelRequested(job=job), "cancelled")


@router.post("/jobs:pause", status_code=202, openapi_extra=document(SelectionRequest))
async def pause_many(desk: TheDesk, wanted: TheSelection) -> views.BulkView:
    """Pause every open job that the filter selects; with `dry_run`, only say which those are."""
    return await _to_each(desk, wanted, lambda job: PauseRequested(job=job), "paused")


@router.post("/jobs:resume", status_code=202, openapi_extra=document(SelectionRequest))
async def resume_many(desk: TheDesk, wanted: TheSelection) -> views.BulkView:
    """Resume every open job that the filter selects; with `dry_run`, only say which those are."""
    return await _to_each(desk, wanted, lambda job: ResumeRequested(job=job), "resumed")


async def _to_each(desk: Desk, wanted: SelectionRequest, command: Callable[[JobId], Command], done: str) -> views.BulkView:
    wanted.require_some()
    jobs: list[str] = []
    count = 0
    async for record in _selected(desk, wanted):
        count += 1
        if len(jobs) < NAMED:
            jobs.append(record.id)
        if not wanted.dry_run:
            await desk.command(command(record.id))
    how = "would be" if wanted.dry_run else "are being" if count != 1 else "is being"
    message = f"{count} job{'' if count == 1 else 's'} {how} {done}"
    return views.BulkView(count=count, jobs=tuple(jobs), dry_run=wanted.dry_run, message=message)


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
