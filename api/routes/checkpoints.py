"""A job's checkpoints: which there are, and one more, now."""

from __future__ import annotations

from fastapi import APIRouter

from orchestrator.domain.events import CheckpointNow

from .. import projections, views
from ..access import ThePrincipal
from ..deps import TheDesk, TheJobId, TheMatch
from .jobs import require_unfinished

router = APIRouter(prefix="/api/v1/jobs", tags=["checkpoints"])


@router.get("/{job_id}/checkpoints")
async def list_checkpoints(desk: TheDesk, job_id: TheJobId) -> list[views.CheckpointView]:
    """Those the job could be restored from, newest first; the one it began with is among them."""
    return projections.checkpoints(await desk.get(job_id))


@router.post("/{job_id}:checkpoint", status_code=202)
async def checkpoint_now(desk: TheDesk, principal: ThePrincipal, job_id: TheJobId, match: TheMatch) -> views.AcceptedView:
    """Have a checkpoint made of the next step, or as soon as the job trains; no error where it makes none by itself."""
    await require_unfinished(desk, job_id)
    command = await desk.command(CheckpointNow(job=job_id, by=principal.name), match)
    return views.AcceptedView(id=command, message=f"a checkpoint of {job_id} has been asked for")
