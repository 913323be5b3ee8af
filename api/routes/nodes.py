"""Nodes: list them, ask for one more."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Path

from orchestrator.domain.events import NodeRequested, ReleaseRequested
from orchestrator.domain.ids import NodeId

from .. import projections, views
from ..deps import TheDesk, body_of, document
from ..problems import conflict, not_found
from ..schemas import AddNodeRequest

router = APIRouter(prefix="/api/v1", tags=["cluster"])
NodeBody = Annotated[AddNodeRequest, Depends(body_of(AddNodeRequest))]


@router.get("/nodes")
async def list_nodes(desk: TheDesk) -> list[views.NodeView]:
    held = await desk.quarantine()
    return [projections.node(item, held) for item in await desk.nodes()]


@router.post("/nodes", status_code=202, openapi_extra=document(AddNodeRequest))
async def add_node(desk: TheDesk, wanted: NodeBody) -> views.AcceptedView:
    """Ask for one more node; it shows in the list when it is up."""
    command = await desk.command(NodeRequested(kind=wanted.kind, num_devices=wanted.num_devices, labels=wanted.labels))
    return views.AcceptedView(id=command, message=f"a {wanted.kind} node with {wanted.num_devices} devices is being added")


@router.post("/nodes/{node}:release", status_code=202)
async def release_node(desk: TheDesk, node: Annotated[str, Path(max_length=255)]) -> views.AcceptedView:
    """An operator vouches for a node: its devices may be planned with again, and their strikes are forgotten."""
    known = {item.id for item in await desk.nodes()}
    held = [one for one in await desk.quarantine() if one.device.node == node]
    if node not in known and not held:
        raise not_found(f"node {node!r} is unknown; nodes: {', '.join(sorted(known)) or 'none'}")
    if not held:
        raise conflict(f"nothing is held against any device of {node}")
    command = await desk.command(ReleaseRequested(node=NodeId(node)))
    devices = ", ".join(str(one.device) for one in held)
    return views.AcceptedView(id=command, message=f"{devices} may be used again")
