"""The queue and the projects whose jobs are in it: who waits for what, and how many devices a project may have."""

from __future__ import annotations

from collections import Counter
from typing import Annotated

from fastapi import APIRouter, Depends, Path

from orchestrator.domain.events import QuotaRequested
from orchestrator.domain.ids import Device
from orchestrator.domain.job import JobRecord
from orchestrator.domain.queue import DEFAULT_PROJECT, Project
from orchestrator.ports import Desk

from .. import projections, views
from ..deps import TheDesk, body_of, document
from ..problems import not_found
from ..schemas import QuotaRequest

router = APIRouter(prefix="/api/v1", tags=["queue"])
TheProject = Annotated[str, Path(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
PAGE = 200
MAX_PAGES = 50
"""Jobs that are looked at for what a project holds: the newest ten thousand."""


@router.get("/queue")
async def get_queue(desk: TheDesk) -> list[views.WaitingView]:
    """Jobs without devices, whoever gets some first before the others, and why each waits; a thousand at most."""
    return [projections.waiting(one) for one in await desk.queue()]


@router.get("/projects")
async def list_projects(desk: TheDesk) -> list[views.ProjectView]:
    """Projects that have a quota or a job that is not over, by name."""
    return await _projects(desk)


@router.get("/projects/{name}")
async def get_project(desk: TheDesk, name: TheProject) -> views.ProjectView:
    found = await _projects(desk)
    for one in found:
        if one.name == name:
            return one
    known = ", ".join(one.name for one in found)
    raise not_found(f"project {name!r} has no quota and no open job; projects: {known or 'none'}")


@router.put("/projects/{name}", status_code=202, openapi_extra=document(QuotaRequest))
async def set_quota(
    desk: TheDesk, name: TheProject, wanted: Annotated[QuotaRequest, Depends(body_of(QuotaRequest))]
) -> views.AcceptedView:
    """Bound what a project's jobs have together. What they have already, they keep; nothing is placed beyond it."""
    command = await desk.command(QuotaRequested(project=name, max_devices=wanted.max_devices))
    most = "any number of" if wanted.max_devices is None else f"at most {wanted.max_devices}"
    return views.AcceptedView(id=command, message=f"jobs of project {name} are to have {most} devices together")


async def _projects(desk: Desk) -> list[views.ProjectView]:
    sizes: Counter[str] = Counter()
    names: set[str] = set()
    cursor = None
    for _ in range(MAX_PAGES):
        page = await desk.list(PAGE, cursor)
        for record in page.jobs:
            if projections.is_open(record):
                names.add(record.spec.project)
                sizes[record.spec.project] += len(_held(record))
        cursor = page.next_cursor
        if cursor is None:
            break
    waits = Counter(one.project for one in await desk.queue())
    known = {one.name: one for one in await desk.projects()}
    wanted = sorted({DEFAULT_PROJECT, *names, *waits, *known})
    return [projections.project(known.get(name, Project(name=name)), sizes, waits) for name in wanted]


def _held(record: JobRecord) -> frozenset[Device]:
    plan = projections.current_plan(record)
    return frozenset(record.pids) | (frozenset(plan[1].devices) if plan else frozenset())
