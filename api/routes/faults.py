"""Faults on purpose: cause one, and see what became of those of a job."""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import Annotated

from fastapi import APIRouter, Depends

from orchestrator.domain.cluster import NodeStatus
from orchestrator.domain.faults import FaultRequested
from orchestrator.domain.ids import JobId, NodeId
from orchestrator.domain.job import JobRecord
from orchestrator.ports import Desk

from .. import projections, views
from ..chaos import FaultRequest, words_of
from ..deps import TheDesk, TheJobId, TheSettings, body_of, document
from ..problems import Problem, conflict, invalid, not_found
from .jobs import require_unfinished

router = APIRouter(prefix="/api/v1", tags=["faults"])
FaultBody = Annotated[FaultRequest, Depends(body_of(FaultRequest))]


async def _require_chaos(settings: TheSettings) -> None:
    if not settings.chaos:
        raise Problem(403, "chaos-off", "faults are off on this server; start it with chaos enabled (everstep up --chaos)")


@router.post("/faults", status_code=202, dependencies=[Depends(_require_chaos)], openapi_extra=document(FaultRequest))
async def cause_fault(desk: TheDesk, wanted: FaultBody) -> views.FaultAcceptedView:
    """Make something fail, to see what becomes of it. Only where the server was started with chaos enabled."""
    asked = replace(wanted.to_command(), id=f"fault-{secrets.token_hex(4)}")
    if asked.job is not None:
        _check_rank(await require_unfinished(desk, asked.job), asked)
    if asked.node is not None:
        await _check_node(desk, asked.node)
    command = await desk.command(asked)
    return views.FaultAcceptedView(id=command, fault=asked.id, message=f"{words_of(asked)} has been asked for")


@router.get("/jobs/{job_id}/faults")
async def list_faults(desk: TheDesk, job_id: TheJobId) -> list[views.FaultView]:
    """Every fault on purpose that is kept, oldest first, with its verdict."""
    return [projections.fault(one) for one in (await desk.get(JobId(job_id))).injected]


async def _check_node(desk: Desk, name: NodeId) -> None:
    known = {item.id: item for item in await desk.nodes()}
    if name not in known:
        raise not_found(f"node {name!r} is unknown; nodes: {', '.join(known) or 'none'}")
    if known[name].status is NodeStatus.LOST:
        raise conflict(f"node {name} is {known[name].status.value} already")


def _check_rank(record: JobRecord, asked: FaultRequested) -> None:
    if asked.rank is None:
        return
    plan = projections.current_plan(record)
    if plan is None:
        raise conflict(f"{record.id} has no ranks yet; wait until it has started")
    size = plan[1].world_size
    if asked.rank >= size:
        raise invalid("rank", asked.rank, f"must be 0..{size - 1} in generation {record.generation}", f"0..{size - 1}")
