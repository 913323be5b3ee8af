"""Whether this process lives, whether it can do its work, and its figures for Prometheus."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel

from orchestrator.domain.faults import POINTS, FaultKind
from orchestrator.domain.kinds import table

from .. import views
from ..chaos import KINDS as FAULT_KINDS
from ..chaos import fields_of
from ..deps import TheDesk, TheMetrics, TheSettings
from ..problems import Problem
from .hooks import Webhooks

router = APIRouter(tags=["health"])
OK = "ok"


class Health(BaseModel):
    status: str
    version: str


class Readiness(BaseModel):
    status: str
    checks: dict[str, str]


@router.get("/healthz")
async def healthz(settings: TheSettings) -> Health:
    """This process answers; says nothing about anything behind it."""
    return Health(status=OK, version=settings.version)


@router.get("/readyz")
async def readyz(desk: TheDesk, settings: TheSettings) -> Readiness:
    """Every check by name; 503 with the same names where one is not ok."""
    try:
        async with asyncio.timeout(settings.health_timeout_s):
            checks = await desk.health()
    except TimeoutError:
        checks = {"store": f"did not answer within {settings.health_timeout_s:g} s"}
    wrong = [f"{name}: {found}" for name, found in checks.items() if found != OK]
    if wrong:
        raise Problem(503, "not-ready", "; ".join(wrong), headers={"Retry-After": "1"}, checks=checks)
    return Readiness(status=OK, checks=checks)


@router.get("/api/v1/version")
async def version(settings: TheSettings) -> views.ServerView:
    """What this server is, and what may be asked of it."""
    return views.ServerView(
        version=settings.version,
        chaos=settings.chaos,
        kinds={kind.name: kind.bf16_tflops for kind in table(settings.kinds).values()},
        fault_kinds=tuple(_fault_kind(kind, words) for kind, words in FAULT_KINDS.items()),
        points=POINTS,
    )


def _fault_kind(kind: FaultKind, words: str) -> views.FaultKindView:
    needs, takes = fields_of(kind)
    return views.FaultKindView(
        kind=kind, words=words, needs=tuple(sorted(needs - {"kind"})), takes=tuple(sorted(takes - needs))
    )


@router.get("/metrics", response_class=Response)
async def prometheus(request: Request, desk: TheDesk, metrics: TheMetrics) -> Response:
    webhooks: Webhooks | None = request.app.state.webhooks
    return Response(await metrics.render(desk, webhooks.store if webhooks else None), media_type=CONTENT_TYPE_LATEST)
