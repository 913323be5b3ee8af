"""A job's checkpoints: which there are, newest first."""

from __future__ import annotations

from fastapi import APIRouter

from .. import projections, views
from ..deps import TheDesk, TheJobId

router = APIRouter(prefix="/api/v1/jobs", tags=["checkpoints"])


@router.get("/{job_id}/checkpoints")
async def list_checkpoints(desk: TheDesk, job_id: TheJobId) -> list[views.CheckpointView]:
    """Those the job could be restored from, newest first; the one it began with is among them."""
    return [projections.checkpoint(one) for one in projections.checkpoints_of(await desk.get(job_id))]
