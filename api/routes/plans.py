"""Plans: what a job would run as, here or on a cluster that is not there. Nothing is recorded and nothing is started."""

from __future__ import annotations

from collections import defaultdict
from typing import Annotated

from fastapi import APIRouter, Depends, Request

from orchestrator.domain.cluster import NodeStatus
from orchestrator.domain.foresight import ClusterSketch, NodeSketch
from orchestrator.domain.kinds import DeviceKind, table
from orchestrator.domain.rows import corrected
from orchestrator.ports import Desk, Foreseer

from ..access import ThePrincipal
from ..deps import TheDesk, TheSettings, body_of, document
from ..plan_files import PlanRequest
from ..plan_views import ForecastView, forecast
from ..problems import Problem
from ..schemas import JobFile

router = APIRouter(prefix="/api/v1", tags=["plans"])
JobBody = Annotated[JobFile, Depends(body_of(JobFile))]
PlanBody = Annotated[PlanRequest, Depends(body_of(PlanRequest))]


@router.post("/plans", openapi_extra=document(PlanRequest))
async def plan(request: Request, desk: TheDesk, settings: TheSettings, wanted: PlanBody) -> ForecastView:
    """Without `cluster`: on the nodes that are up, those that jobs use included. Takes as long as importing the
    program does.
    """
    spec = wanted.job.to_spec()
    cluster = wanted.cluster.to_sketch(settings.kinds) if wanted.cluster else await _here(desk, settings.kinds)
    return forecast(await _foreseer(request).foresee(spec, cluster))


@router.post("/jobs:validate", openapi_extra=document(JobFile))
async def validate(
    request: Request, desk: TheDesk, settings: TheSettings, principal: ThePrincipal, wanted: JobBody
) -> ForecastView:
    """All that a submission would be refused for, and the plan it would get on the nodes that are up; nothing is recorded.

    Where no plan fits, `feasible` is false: it could be submitted, and would wait (or fail, where `forever` is true).
    """
    if not principal.reaches(wanted.project) and "project" in wanted.model_fields_set:
        allowed = ", ".join(principal.projects)
        detail = f"project is {wanted.project!r}, this token submits to {allowed}; name one of those"
        raise Problem(403, "forbidden", detail)
    return forecast(await _foreseer(request).foresee(wanted.to_spec(), await _here(desk, settings.kinds)))


def _foreseer(request: Request) -> Foreseer:
    found: Foreseer | None = request.app.state.foreseer
    if found is None:
        raise Problem(503, "unavailable", "this server was started without a planner; use everstep plan --cluster instead")
    return found


async def _here(desk: Desk, configured: tuple[DeviceKind, ...]) -> ClusterSketch:
    held: dict[str, int] = defaultdict(int)
    for one in await desk.quarantine():
        held[one.device.node] += 1
    sketches, nodes = [], await desk.nodes()
    kinds = corrected(configured, {node.id: node.kind for node in nodes}, await desk.admissions())
    known = table(kinds)
    for node in sorted(nodes, key=lambda node: node.id):
        devices = node.num_devices - held[node.id]
        if node.status is NodeStatus.UP and devices > 0:
            kind = node.kind if node.kind in known else "cpu"
            sketches.append(NodeSketch(kind=kind, count=1, devices=devices, name=node.id, domain=node.domain or ""))
    return ClusterSketch(nodes=tuple(sketches), kinds=kinds, is_here=True)
