"""The API as one ASGI app over a desk. Who serves it, where, and on which store is the composition root's business."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic import BaseModel

from orchestrator.ports import Desk, Foreseer

from . import dashboard, problems, views
from .chaos import FaultRequest
from .description import describe
from .live import Lookout
from .metrics import CountRequests, Metrics
from .plan_files import PlanRequest
from .routes import bulk, checkpoints, faults, health, jobs, live, nodes, plans, queue, schemas, streams
from .schemas import AddNodeRequest, DrainRequest, JobFile, QuotaRequest, ResizeRequest
from .security import Gatekeeper
from .selections import SelectionRequest
from .settings import ApiSettings

ASKED: tuple[type[BaseModel], ...] = (
    JobFile,
    ResizeRequest,
    AddNodeRequest,
    DrainRequest,
    SelectionRequest,
    FaultRequest,
    PlanRequest,
    QuotaRequest,
)
TOLD: tuple[type[BaseModel], ...] = (views.EventView, views.StepView, views.GapView, *live.TOLD.values())


def create_app(desk: Desk, settings: ApiSettings, foreseer: Foreseer | None = None) -> FastAPI:
    """Serve it on loopback, with a graceful shutdown of a second or so: open event streams end only when cut."""
    app = FastAPI(
        title="Everstep",
        summary="Elastic, fault-tolerant training.",
        version=settings.version,
        # The interactive pages load their scripts from elsewhere.
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        generate_unique_id_function=_operation_id,
    )
    app.state.desk = desk
    app.state.settings = settings
    app.state.foreseer = foreseer
    app.state.lookout = Lookout(desk)
    app.state.metrics = Metrics(settings.version, settings.max_metric_jobs)
    problems.install(app)
    # streams before jobs: /jobs/{job_id}/events is the longer path.
    for part in (streams, bulk, jobs, checkpoints, faults, nodes, queue, plans, live, schemas, health):
        app.include_router(part.router)
    dashboard.install(app)
    describe(app, ASKED, TOLD)
    # The last one added is the outermost.
    app.add_middleware(CountRequests, metrics=app.state.metrics)
    app.add_middleware(Gatekeeper, settings=settings)
    return app


def _operation_id(route: APIRoute) -> str:
    """`submit`, `list_jobs`: what a generated client would call it."""
    return route.name
