"""Nodes, and the faults a person may cause on purpose."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends

from orchestrator.domain.cluster import NodeStatus
from orchestrator.domain.events import FaultKind, FaultRequested, NodeRequested
from orchestrator.domain.ids import JobId, NodeId
from orchestrator.domain.job import JobRecord
from orchestrator.ports import Desk

from .. import projections, views
from ..deps import TheDesk, TheSettings, body_of, document
from ..problems import Problem, conflict, invalid, not_found
from ..schemas import AddNodeRequest, FaultRequest
from .jobs import require_unfinished

router = APIRouter(prefix="/api/v1", tags=["cluster"])
NodeBody = Annotated[AddNodeRequest, Depends(body_of(AddNodeRequest))]
FaultBody = Annotated[FaultRequest, Depends(body_of(FaultRequest))]


@router.get("/nodes")
async def list_nodes(desk: TheDesk) -> list[views.NodeView]:
    return [projections.node(item) for item in await desk.nodes()]


@router.post("/nodes", status_code=202, openapi_extra=document(AddNodeRequest))
async def add_node(desk: TheDesk, wanted: NodeBody) -> views.AcceptedView:
    """Ask for one more node; it shows in the list when it is up."""
    command = await desk.command(NodeRequested(kind=wanted.kind, num_devices=wanted.num_devices, labels=wanted.labels))
    return views.AcceptedView(id=command, message=f"a {wanted.kind} node with {wanted.num_devices} devices is being added")


def _require_chaos(settings: TheSettings) -> None:
    if not settings.chaos:
        raise Problem(403, "chaos-off", "faults are off on this server; start it with chaos enabled (everstep up --chaos)")


@router.post("/faults", status_code=202, dependencies=[Depends(_require_chaos)], openapi_extra=document(FaultRequest))
async def cause_fault(desk: TheDesk, wanted: FaultBody) -> views.AcceptedView:
    """Kill a rank or a node, to see a recovery. Only where the server was started with chaos enabled."""
    fault = wanted.checked()
    if fault.kind == "kill_node":
        assert fault.node is not None
        return await _kill_node(desk, NodeId(fault.node))
    assert fault.job is not None and fault.rank is not None
    return await _kill_rank(desk, JobId(fault.job), fault.rank)


async def _kill_node(desk: Desk, name: NodeId) -> views.AcceptedView:
    known = {item.id: item for item in await desk.nodes()}
    if name not in known:
        raise not_found(f"node {name!r} is unknown; nodes: {', '.join(known) or 'none'}")
    if known[name].status is not NodeStatus.UP:
        raise conflict(f"node {name} is {known[name].status.value} already")
    command = await desk.command(FaultRequested(fault=FaultKind.KILL_NODE, node=name))
    return views.AcceptedView(id=command, message=f"node {name} is being killed")


async def _kill_rank(desk: Desk, job: JobId, rank: int) -> views.AcceptedView:
    record = await require_unfinished(desk, job)
    size = _world_size(record)
    if rank >= size:
        raise invalid("rank", rank, f"must be 0..{size - 1} in generation {record.generation}", f"0..{size - 1}")
    command = await desk.command(FaultRequested(fault=FaultKind.KILL_RANK, job=job, rank=rank))
    return views.AcceptedView(id=command, message=f"rank {rank} of {job} is being killed")


def _world_size(record: JobRecord) -> int:
    plan = projections.current_plan(record)
    if plan is None:
        raise conflict(f"{record.id} has no ranks yet; wait until it has started")
    return plan[1].world_size
