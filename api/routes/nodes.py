"""Nodes: list them, ask for one more."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends

from orchestrator.domain.events import NodeRequested

from .. import projections, views
from ..deps import TheDesk, body_of, document
from ..schemas import AddNodeRequest

router = APIRouter(prefix="/api/v1", tags=["cluster"])
NodeBody = Annotated[AddNodeRequest, Depends(body_of(AddNodeRequest))]


@router.get("/nodes")
async def list_nodes(desk: TheDesk) -> list[views.NodeView]:
    return [projections.node(item) for item in await desk.nodes()]


@router.post("/nodes", status_code=202, openapi_extra=document(AddNodeRequest))
async def add_node(desk: TheDesk, wanted: NodeBody) -> views.AcceptedView:
    """Ask for one more node; it shows in the list when it is up."""
    command = await desk.command(NodeRequested(kind=wanted.kind, num_devices=wanted.num_devices, labels=wanted.labels))
    return views.AcceptedView(id=command, message=f"a {wanted.kind} node with {wanted.num_devices} devices is being added")
