"""Nodes: list them, add some, keep new work off them, empty them, take them away."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query

from orchestrator.domain.admission import Admittance
from orchestrator.domain.events import CordonRequested, NodeRequested, ReleaseRequested, UncordonRequested
from orchestrator.domain.ids import NodeId
from orchestrator.domain.kinds import table
from orchestrator.ports import Desk

from .. import projections, views
from ..deps import TheDesk, TheSettings, body_of, document
from ..problems import conflict, not_found
from ..schemas import AddNodeRequest, DrainRequest

router = APIRouter(prefix="/api/v1", tags=["cluster"])
NodeBody = Annotated[AddNodeRequest, Depends(body_of(AddNodeRequest))]
DrainBody = Annotated[DrainRequest, Depends(body_of(DrainRequest, may_be_empty=True))]
TheNode = Annotated[str, Path(max_length=255)]


@router.get("/nodes")
async def list_nodes(desk: TheDesk, settings: TheSettings) -> list[views.NodeView]:
    held, cordons, admissions = await desk.quarantine(), await desk.cordons(), await desk.admissions()
    return projections.nodes(await desk.nodes(), held, cordons, admissions, settings.kinds)


@router.post("/nodes", status_code=202, openapi_extra=document(AddNodeRequest))
async def add_node(desk: TheDesk, settings: TheSettings, wanted: NodeBody) -> views.AcceptedView:
    """Ask for more nodes; they show in the list when they are up."""
    wanted.refuse_unless(table(settings.kinds))
    command = await desk.command(
        NodeRequested(kind=wanted.kind, num_devices=wanted.num_devices, labels=wanted.labels, count=wanted.count)
    )
    what = f"a {wanted.kind} node" if wanted.count == 1 else f"{wanted.count} {wanted.kind} nodes"
    each = "" if wanted.count == 1 else " each"
    added = "is" if wanted.count == 1 else "are"
    return views.AcceptedView(id=command, message=f"{what} with {wanted.num_devices} devices{each} {added} being added")


@router.post("/nodes/{node}:cordon", status_code=202)
async def cordon(desk: TheDesk, node: TheNode) -> views.AcceptedView:
    """Place nothing new there; what trains there trains on."""
    await _require_known(desk, node)
    command = await desk.command(CordonRequested(node=NodeId(node)))
    return views.AcceptedView(id=command, message=f"nothing new is placed on {node}")


@router.post("/nodes/{node}:uncordon", status_code=202)
async def uncordon(desk: TheDesk, node: TheNode) -> views.AcceptedView:
    """Use it again; jobs that have not left it yet need not."""
    if all(one.node != node for one in await desk.cordons()):
        await _require_known(desk, node)
        raise conflict(f"{node} is not cordoned")
    command = await desk.command(UncordonRequested(node=NodeId(node)))
    return views.AcceptedView(id=command, message=f"{node} may be used again")


@router.post("/nodes/{node}:drain", status_code=202, openapi_extra=document(DrainRequest))
async def drain(desk: TheDesk, node: TheNode, wanted: DrainBody) -> views.AcceptedView:
    """Have jobs move their state off it while they train, then leave; no step is lost."""
    await _require_known(desk, node)
    if wanted.deadline_s is not None and not wanted.remove:
        raise conflict("deadline_s is when the node goes in any case, and remove is false; set remove to true")
    return await _drain(desk, node, wanted.remove, wanted.deadline_s)


@router.delete("/nodes/{node}", status_code=202)
async def remove_node(
    desk: TheDesk,
    node: TheNode,
    deadline_s: Annotated[float | None, Query(ge=0, le=30 * 86400, description="It goes then in any case.")] = None,
) -> views.AcceptedView:
    """Drain it, then take it away."""
    await _require_known(desk, node)
    return await _drain(desk, node, True, deadline_s)


@router.post("/nodes/{node}:release", status_code=202)
async def release_node(desk: TheDesk, node: TheNode) -> views.AcceptedView:
    """An operator vouches for a node: strikes are forgotten, its devices may be planned with, and it is checked at once."""
    held = [one for one in await desk.quarantine() if one.device.node == node]
    is_refused = any(one.node == node and one.standing is Admittance.REFUSED for one in await desk.admissions())
    if not held and not is_refused:
        await _require_known(desk, node)
        raise conflict(f"nothing is held against {node} or any device of it")
    command = await desk.command(ReleaseRequested(node=NodeId(node)))
    if is_refused:
        return views.AcceptedView(id=command, message=f"{node} is checked again, and used where nothing is wrong")
    devices = ", ".join(str(one.device) for one in held)
    return views.AcceptedView(id=command, message=f"{devices} may be used again")


async def _drain(desk: Desk, node: str, remove: bool, deadline_s: float | None) -> views.AcceptedView:
    command = await desk.command(CordonRequested(node=NodeId(node), drain=True, remove=remove, deadline_s=deadline_s))
    goes = "" if not remove else ", then it goes" if deadline_s is None else f", then it goes, within {deadline_s:g} s"
    return views.AcceptedView(id=command, message=f"jobs leave {node}{goes}")


async def _require_known(desk: Desk, node: str) -> None:
    known = {item.id for item in await desk.nodes()}
    if node not in known:
        raise not_found(f"node {node!r} is unknown; nodes: {', '.join(sorted(known)) or 'none'}")
