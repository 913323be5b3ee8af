"""One stream for a whole dashboard; see api/live.py."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Query, Request
from fastapi.responses import Response
from fastapi.sse import EventSourceResponse

from .. import views
from ..access import ThePrincipal
from ..deps import TheDesk, TheMetrics
from ..description import reference
from ..live import Lookout, live_stream, places
from ..problems import invalid

router = APIRouter(prefix="/api/v1", tags=["live"])
MAX_WATCHED = 16
TOLD: dict[str, type[views.View]] = {
    "summary": views.JobSummary,
    "job": views.JobView,
    "history": views.JobEventView,
    "step": views.JobStepView,
    "gap": views.JobGapView,
    "pulse": views.PulseView,
}
_NODES = {"title": "nodes", "type": "array", "items": reference(views.NodeView)}
_DATA = {"oneOf": [*({"title": name, **reference(model)} for name, model in TOLD.items()), _NODES]}


@router.get(
    "/live",
    response_model=None,
    responses={200: {"content": {"text/event-stream": {"schema": {"type": "string", "contentSchema": _DATA}}}}},
)
async def live(
    request: Request,
    desk: TheDesk,
    metrics: TheMetrics,
    principal: ThePrincipal,
    watch: Annotated[list[str] | None, Query(description="JOB or JOB:ID: what happens to it, after that id.")] = None,
    last_event_id: Annotated[str | None, Header(max_length=4000)] = None,
) -> Response:
    """Server-sent events: `summary` of any job and `nodes` as they change, `pulse` every other second, and of watched jobs
    `job`, `history`, `step` and `gap`. An event's id says where the reader stands in each of them; it never ends by itself.
    """
    after = places(",".join(watch or ()))
    if len(after) > MAX_WATCHED:
        raise invalid(
            "watch", len(after), f"names {len(after)} jobs, at most {MAX_WATCHED} are watched", f"up to {MAX_WATCHED}"
        )
    stands = places(last_event_id or "")
    after |= {job: place for job, place in stands.items() if job in after}
    for job in after:
        await desk.get(job)
    lookout: Lookout = request.app.state.lookout
    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return EventSourceResponse(live_stream(desk, lookout, after, metrics, principal), headers=headers)
