"""Jobs: submit, list, look at, resize, pause, resume, cancel."""

from __future__ import annotations

import hashlib
import time
from dataclasses import replace
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from pydantic import AwareDatetime, Field

from orchestrator.domain.access import Principal
from orchestrator.domain.codec import dumps
from orchestrator.domain.errors import Conflict, NotFound
from orchestrator.domain.events import (
    CancelRequested,
    HistoryEntry,
    PauseRequested,
    PriorityRequested,
    ResizeRequested,
    ResumeRequested,
)
from orchestrator.domain.ids import JobId
from orchestrator.domain.job import JobRecord
from orchestrator.domain.spec import JobSpec
from orchestrator.domain.state import JobStatus, Probing, Queued, Running
from orchestrator.domain.status import TERMINAL_STATUSES, status_of
from orchestrator.ports import Desk, Sort

from .. import projections, views
from ..access import ThePrincipal
from ..deps import TheDesk, TheJobId, TheKey, TheMatch, body_of, document, etag, get_text, parse
from ..ids import OWN_IDS, is_own_id, new_job_id
from ..live import Lookout
from ..problems import Problem, conflict, invalid
from ..schemas import JobFile, ResizeRequest, read
from ..selections import Wanted

router = APIRouter(prefix="/api/v1/jobs", tags=["jobs"])
REPLAYED = "Idempotency-Replayed"
MAX_LIMIT = 200
BEGINNING = "0"
HISTORY_AT_ONCE = 1000
MAX_COUNTED = 10_000
MAX_PAGES = 50
"""A filtered list looks at this many pages at most; it may then be short, or empty, and still have a next cursor."""


@router.post("", status_code=201, openapi_extra=document(JobFile))
async def submit(
    request: Request,
    response: Response,
    desk: TheDesk,
    principal: ThePrincipal,
    key: TheKey,
    text: Annotated[str, Depends(get_text)],
) -> views.SubmittedView:
    """Record a job. The same Idempotency-Key with the same job answers 200 and the first job; with another job, 422."""
    spec, now = _spec(read(JobFile, parse(text, request)), principal), time.time()
    try:
        job, is_new = await desk.submit(
            new_job_id(now), spec, now, key and _kept(principal, key), _hash(spec), principal.submitter
        )
    except Conflict as error:
        detail = f"Idempotency-Key {key!r} was used for another job; send a new key"
        raise Problem(422, "key-reused", detail) from error
    shown = projections.submitted(await desk.get(job))
    response.headers["Location"] = shown.url
    if not is_new:
        response.status_code = 200
        response.headers[REPLAYED] = "true"
    return shown


@router.put("/{job_id}", status_code=201, openapi_extra=document(JobFile))
async def submit_as(
    job_id: Annotated[str, Path(max_length=63)],
    request: Request,
    response: Response,
    desk: TheDesk,
    principal: ThePrincipal,
    text: Annotated[str, Depends(get_text)],
) -> views.SubmittedView:
    """Record a job under an id of your own. The same job again answers 200 and changes nothing; another job, 409."""
    if not is_own_id(job_id):
        raise invalid("job_id", job_id, f"must be {OWN_IDS}", OWN_IDS)
    job, spec = JobId(job_id), _spec(read(JobFile, parse(text, request)), principal)
    try:
        response.status_code = 200 if await desk.get(job) else 201
    except NotFound:
        response.status_code = 201
    try:
        await desk.submit(job, spec, time.time(), None, _hash(spec), principal.submitter)
    except Conflict as error:
        raise conflict(f"{job} is another job's id already; choose another one") from error
    shown = projections.submitted(await desk.get(job))
    response.headers["Location"] = shown.url
    if response.status_code == 200:
        response.headers[REPLAYED] = "true"
    return shown


def _spec(job_file: JobFile, principal: Principal) -> JobSpec:
    """Raises Refused."""
    spec = job_file.to_spec()
    if "project" not in job_file.model_fields_set and principal.projects:
        return replace(spec, project=principal.projects[0])
    return spec


def _hash(spec: JobSpec) -> str:
    """Of what was asked, not of how it was written: a key survives a change of format or whitespace."""
    return hashlib.sha256(dumps(spec)).hexdigest()


def _kept(principal: Principal, key: str) -> str:
    """Of a key: people put all kinds of things into one."""
    return hashlib.sha256(f"{principal.id}:{key}".encode()).hexdigest()


@router.get("")
async def list_jobs(
    desk: TheDesk,
    limit: Annotated[int, Query(ge=1, le=MAX_LIMIT)] = 50,
    cursor: Annotated[str | None, Query(min_length=1, max_length=200)] = None,
    state: Annotated[list[JobStatus] | None, Query(description="Only jobs in one of these states.")] = None,
    label: Annotated[
        list[Annotated[str, Field(pattern=r"^[^=]+=.*$", max_length=320)]] | None,
        Query(description="NAME=VALUE: only jobs that carry it; all of them, where it is repeated."),
    ] = None,
    name: Annotated[str | None, Query(max_length=63, description="Only jobs that are called so.")] = None,
    project: Annotated[str | None, Query(max_length=63, description="Only jobs of this project.")] = None,
    since: Annotated[AwareDatetime | None, Query(description="Only jobs submitted at or after this; RFC 3339.")] = None,
    until: Annotated[AwareDatetime | None, Query(description="Only jobs submitted before this; RFC 3339.")] = None,
    user: Annotated[
        str | None, Query(max_length=200, description="Only jobs submitted with the token of this name or id.")
    ] = None,
    sort: Annotated[
        Sort, Query(description="By finished_at: only jobs that are over. A cursor is of one order.")
    ] = Sort.NEWEST,
    total: Annotated[bool, Query(description="Count those of all pages, too; that takes looking at each.")] = False,
) -> views.JobPage:
    """Newest first where nothing else is asked for; `next_cursor` is null on the last page."""
    wanted = Wanted(
        states=tuple(state or ()),
        labels=dict(one.split("=", 1) for one in label or ()),
        name=name,
        project=project,
        since=since.timestamp() if since else None,
        until=until.timestamp() if until else None,
        user=user,
    )
    counted, is_whole = await _count(desk, wanted, sort) if total else (None, True)
    found: list[JobRecord] = []
    for _ in range(MAX_PAGES):
        # Never more than are still wanted, so that the desk's cursor is exactly where this page ends.
        page = await desk.list(limit - len(found), cursor, sort)
        found.extend(record for record in page.jobs if wanted.has(record))
        cursor = page.next_cursor
        if cursor is None or len(found) == limit:
            break
    line = {one.job: one for one in await desk.queue()}
    return views.JobPage(
        jobs=tuple(projections.summary(record, line.get(record.id)) for record in found),
        next_cursor=cursor,
        total=counted,
        total_is_whole=is_whole,
    )


async def _count(desk: Desk, wanted: Wanted, sort: Sort) -> tuple[int, bool]:
    """How many jobs are so, and whether all were looked at."""
    if wanted == Wanted() and not sort.is_of_finished and (known := await desk.count()) is not None:
        return known, True
    found, cursor = 0, None
    for _ in range(MAX_COUNTED // MAX_LIMIT):
        page = await desk.list(MAX_LIMIT, cursor, sort)
        found += sum(wanted.has(record) for record in page.jobs)
        cursor = page.next_cursor
        if cursor is None:
            return found, True
    return found, False


@router.get("/{job_id}")
async def get_job(request: Request, desk: TheDesk, job_id: TheJobId, response: Response) -> views.JobView:
    """With its revision, which is the ETag too: send it back in If-Match to change the job only if it is still as seen."""
    revision = await desk.revision(job_id)
    record = await desk.get(job_id)
    waits = isinstance(record.state, Probing | Queued)
    line = await desk.queue() if waits else ()
    lookout: Lookout = request.app.state.lookout
    mfu = await lookout.mfu(record) if isinstance(record.state, Running) else None
    place = next((one for one in line if one.job == job_id), None)
    response.headers["ETag"] = etag(revision)
    return projections.job(record, revision, time.time(), place, mfu)


@router.get("/{job_id}/plans")
async def list_plans(desk: TheDesk, job_id: TheJobId) -> list[views.PlanView]:
    """Where each generation trained, oldest first, as far as the history is kept."""
    record = await desk.get(job_id)
    entries: list[HistoryEntry] = []
    after = BEGINNING
    while found := await desk.history(job_id, after, HISTORY_AT_ONCE):
        entries.extend(item for _, item in found if isinstance(item, HistoryEntry) and item.type == "running")
        after = found[-1][0]
        if len(found) < HISTORY_AT_ONCE:
            break
    return projections.plans(record, entries)


@router.post("/{job_id}:cancel", status_code=202)
async def cancel(desk: TheDesk, principal: ThePrincipal, job_id: TheJobId, match: TheMatch) -> views.AcceptedView:
    """Stop the job; it ends CANCELLED. Asking twice is no error, asking after the end is (409)."""
    await require_unfinished(desk, job_id)
    command = await desk.command(CancelRequested(job=job_id, by=principal.name), match)
    return views.AcceptedView(id=command, message=f"{job_id} is being cancelled")


@router.post("/{job_id}:pause", status_code=202)
async def pause(desk: TheDesk, principal: ThePrincipal, job_id: TheJobId, match: TheMatch) -> views.AcceptedView:
    """Have the job make one more step, save it and give up its devices. Asking twice is no error."""
    await require_unfinished(desk, job_id)
    command = await desk.command(PauseRequested(job=job_id, by=principal.name), match)
    return views.AcceptedView(id=command, message=f"{job_id} is being paused; it keeps what it has learned in a checkpoint")


@router.post("/{job_id}:resume", status_code=202)
async def resume(desk: TheDesk, principal: ThePrincipal, job_id: TheJobId, match: TheMatch) -> views.AcceptedView:
    """Have a paused job go on from the step it was paused at; one that is to pause need not. No error for any other."""
    await require_unfinished(desk, job_id)
    command = await desk.command(ResumeRequested(job=job_id, by=principal.name), match)
    return views.AcceptedView(id=command, message=f"{job_id} goes on as soon as there are devices for it")


@router.patch("/{job_id}", status_code=202, openapi_extra=document(ResizeRequest))
async def resize(
    desk: TheDesk,
    principal: ThePrincipal,
    job_id: TheJobId,
    match: TheMatch,
    wanted: Annotated[ResizeRequest, Depends(body_of(ResizeRequest))],
) -> views.AcceptedView:
    """Change how many devices a job may and should have, or its priority. It moves while it trains; no step is lost."""
    record = await require_unfinished(desk, job_id)
    size = wanted.changed(record.wanted_size)
    if wanted.priority is not None:
        sooner = PriorityRequested(job=job_id, priority=wanted.priority, by=principal.name)
        command = await desk.command(sooner, match)
        match = None  # it has just become another revision, by what was asked here
        if not wanted.is_of_size:
            return views.AcceptedView(id=command, message=f"{job_id} is to have priority {wanted.priority}")
    command = await desk.command(ResizeRequested(job=job_id, size=size, by=principal.name), match)
    aim = f"{size.target} devices" if size.target else "as many devices as it can use"
    most = f" to {size.max_devices}" if size.max_devices else " upwards"
    return views.AcceptedView(id=command, message=f"{job_id} is to have {aim}, from {size.min_devices}{most}")


async def require_unfinished(desk: Desk, job_id: TheJobId) -> JobRecord:
    record = await desk.get(job_id)
    status = status_of(record.state)
    if status in TERMINAL_STATUSES:
        raise conflict(f"{job_id} is over ({status.value}); an ended job never changes")
    return record
