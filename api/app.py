"""The API as one ASGI app over a desk. Who serves it, where, and on which store is the composition root's business."""

from __future__ import annotations

import time

from fastapi import Depends, FastAPI
from fastapi.routing import APIRoute
from pydantic import BaseModel

from orchestrator.domain.kinds import table
from orchestrator.ports import Desk, Foreseer, Keyring, Vault

from . import dashboard, problems, views
from .access import authorize
from .access_shapes import SignInRequest, TokenRequest
from .chaos import FaultRequest
from .description import describe
from .doorman import Doorman
from .hook_shapes import WebhookRequest
from .identities import Identities
from .live import Lookout
from .metrics import CountRequests, Metrics
from .plan_files import PlanRequest
from .routes import access, bulk, checkpoints, faults, health, hooks, jobs, live, nodes, plans, queue, schemas, streams
from .schemas import AddNodeRequest, DrainRequest, JobFile, QuotaRequest, ResizeRequest
from .security import Gatekeeper
from .selections import ResizeManyRequest, SelectionRequest
from .settings import ApiSettings

ASKED: tuple[type[BaseModel], ...] = (
    JobFile,
    ResizeRequest,
    AddNodeRequest,
    DrainRequest,
    SelectionRequest,
    ResizeManyRequest,
    FaultRequest,
    PlanRequest,
    QuotaRequest,
    TokenRequest,
    SignInRequest,
    WebhookRequest,
)
TOLD: tuple[type[BaseModel], ...] = (views.EventView, views.StepView, views.GapView, *live.TOLD.values())


def create_app(
    desk: Desk,
    settings: ApiSettings,
    foreseer: Foreseer | None = None,
    keyring: Keyring | None = None,
    vault: Vault | None = None,
    webhooks: hooks.Webhooks | None = None,
) -> FastAPI:
    """Serve it with a graceful shutdown of a second or so: open event streams end only when cut.

    keyring None: whoever reaches it may do everything, so serve it where nobody else can. vault None: jobs have no secrets.
    webhooks None: nobody is told of anything.
    """
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
    app.state.lookout = Lookout(desk, settings.kinds)
    app.state.keyring = keyring
    app.state.vault = vault
    app.state.webhooks = webhooks
    app.state.identities = known = Identities(keyring, settings.local_digest, time.time) if keyring is not None else None
    app.state.metrics = Metrics(settings.version, settings.max_metric_jobs, table(settings.kinds))
    problems.install(app)
    # streams before jobs: /jobs/{job_id}/events is the longer path.
    for part in (streams, bulk, jobs, checkpoints, faults, nodes, queue, plans, live, access, hooks, schemas, health):
        app.include_router(part.router, dependencies=[Depends(authorize)])
    dashboard.install(app)
    describe(app, ASKED, TOLD)
    # The last one added is the outermost.
    app.add_middleware(CountRequests, metrics=app.state.metrics)
    app.add_middleware(Doorman, settings=settings, keyring=keyring, identities=known)
    app.add_middleware(Gatekeeper, settings=settings)
    return app


def _operation_id(route: APIRoute) -> str:
    """`submit`, `list_jobs`: what a generated client would call it."""
    return route.name
