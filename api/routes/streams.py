"""What happens to a job, as it happens and afterwards: events, metrics, logs."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request
from fastapi.encoders import jsonable_encoder
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from fastapi.sse import EventSourceResponse
from pydantic import AwareDatetime

from orchestrator.domain.job import JobRecord
from orchestrator.domain.secrecy import Veil
from orchestrator.domain.status import TERMINAL_STATUSES, status_of
from orchestrator.ports import Gap, Vault

from .. import logfiles, loglines, projections, views
from ..deps import TheDesk, TheJobId, TheMetrics, TheSettings, TheVault
from ..streams import event_stream

router = APIRouter(prefix="/api/v1/jobs/{job_id}", tags=["jobs"])
BEGINNING = "0"
Since = Annotated[str, Query(min_length=1, max_length=100, description="Only what comes after this id.")]
_BOTH = {
    "application/json": {"schema": {"type": "array", "items": {"$ref": "#/components/schemas/EventView"}}},
    "text/event-stream": {"schema": {"type": "string"}},
}


@router.get(
    "/events",
    response_model=None,
    responses={200: {"content": _BOTH}, 204: {"description": "The job is over and nothing came after the last id."}},
)
async def events(
    request: Request,
    desk: TheDesk,
    settings: TheSettings,
    metrics: TheMetrics,
    job_id: TheJobId,
    since: Annotated[str | None, Query(min_length=1, max_length=100)] = None,
    limit: Annotated[int | None, Query(ge=1, le=1000)] = None,
    accept: Annotated[str, Header()] = "*/*",
    last_event_id: Annotated[str | None, Header(max_length=100)] = None,
) -> Response:
    """Server-sent events (`history`, `step`, `gap`) until the job has ended; the history alone as JSON, when asked for."""
    record = await desk.get(job_id)
    wants_json = "application/json" in accept or since is not None or limit is not None
    if wants_json and "text/event-stream" not in accept:
        entries = await desk.history(job_id, since or BEGINNING, limit or 100)
        return JSONResponse([_shape(id, item) for id, item in entries])
    after = last_event_id or since or BEGINNING
    # Also refuses what is no id while an answer can still say so.
    is_at_end = not await desk.history(job_id, after, 1) and not await desk.steps(job_id, after, 1)
    if is_at_end and status_of(record.state) in TERMINAL_STATUSES:
        # What an EventSource takes as: do not come back.
        return Response(status_code=204)
    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return EventSourceResponse(event_stream(desk, job_id, after, settings, metrics), headers=headers)


@router.get("/metrics")
async def metrics(
    desk: TheDesk, job_id: TheJobId, since: Since = BEGINNING, limit: Annotated[int, Query(ge=1, le=10000)] = 1000
) -> list[views.StepView]:
    """Committed steps, oldest first. A rolled-back step appears again, under its later generation."""
    await desk.get(job_id)
    return [projections.step(id, item) for id, item in await desk.steps(job_id, since, limit)]


@router.get("/logs", response_class=PlainTextResponse)
async def logs(
    desk: TheDesk,
    settings: TheSettings,
    vault: TheVault,
    job_id: TheJobId,
    rank: Annotated[int | None, Query(ge=0, description="A rank of the current generation.")] = None,
    device: Annotated[str | None, Query(max_length=300, description="node/index; outlives a generation.")] = None,
    tail: Annotated[int | None, Query(ge=0, le=10000, description="Only the last lines.")] = None,
    offset: Annotated[int | None, Query(ge=0, description="Bytes to skip: X-Next-Offset of the last answer.")] = None,
) -> PlainTextResponse:
    """One rank's log. With neither rank nor device: of the rank that failed, else of the first that has one. What stands
    before the byte X-Log-Begins is no longer kept: an offset before it reads from there."""
    record = await desk.get(job_id)
    chosen = logfiles.choose(record, settings.log_dir(job_id), rank, device)
    veil = veil_of(vault, record)
    chunk = await logfiles.read(settings.log_dir(job_id), chosen, tail, offset, settings.max_log_bytes, veil)
    headers = {
        "X-Next-Offset": str(chunk.next_offset),
        "X-Log-Device": str(chosen),
        "X-Log-Truncated": str(chunk.is_cut).lower(),
        "X-Log-Begins": str(chunk.begins),
    }
    return PlainTextResponse(chunk.text, headers=headers)


@router.get("/logs/lines")
async def log_lines(
    desk: TheDesk,
    settings: TheSettings,
    vault: TheVault,
    job_id: TheJobId,
    rank: Annotated[
        list[int] | None, Query(description="Of the current generation; repeatable. Default: every log.")
    ] = None,
    device: Annotated[list[str] | None, Query(description="node/index; repeatable.")] = None,
    since: Annotated[AwareDatetime | None, Query(description="Only lines that were not there yet; RFC 3339.")] = None,
    grep: Annotated[str, Query(max_length=200, description="Only lines that hold these words, as they are written.")] = "",
    tail: Annotated[int | None, Query(ge=0, le=loglines.MAX_LINES, description="Only the last lines.")] = None,
    after: Annotated[str, Query(max_length=100_000, description="`next` of an answer: only what has come since.")] = "",
) -> views.LogPageView:
    """Logs of many ranks as one, in the order of time. Call again with `after` while `is_cut`, or for what comes later."""
    record = await desk.get(job_id)
    directory = settings.log_dir(job_id)
    devices = logfiles.choose_many(record, directory, rank or (), device or ())
    asked = loglines.Asked(
        after=loglines.places(after),
        since=None if since is None else since.timestamp(),
        words=grep,
        tail=tail,
        is_over=status_of(record.state) in TERMINAL_STATUSES,
    )
    found = await loglines.read(directory, devices, asked, settings.max_log_bytes, veil_of(vault, record))
    return _page(record, found)


def _page(record: JobRecord, found: loglines.Found) -> views.LogPageView:
    plan = projections.current_plan(record)
    ranks = {device: rank for rank, device in enumerate(plan[1].devices)} if plan else {}
    lines = tuple(
        views.LogLineView(
            device=str(line.device),
            rank=ranks.get(line.device),
            at=projections.instant(line.at),
            offset=line.offset,
            text=line.text,
        )
        for line in found.lines
    )
    return views.LogPageView(lines=lines, next=loglines.as_text(found.after), is_cut=found.is_cut)


def veil_of(vault: Vault | None, record: JobRecord) -> Veil:
    """Over what the job's programs may have printed of its secrets."""
    return vault.veil(record.spec) if vault is not None and record.spec.secrets else Veil()


def _shape(id: str, item: Any) -> Any:
    return jsonable_encoder(projections.gap(id, item) if isinstance(item, Gap) else projections.event(id, item))
