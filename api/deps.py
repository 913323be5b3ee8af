"""What routes are given: the desk, the settings, the metrics, and bodies and parameters already checked.

All of it asynchronous, though little awaits: FastAPI sends every other function to a thread, which costs each request more
than answering it.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Annotated, TypeVar

from fastapi import Depends, Header, Path, Request

from orchestrator.domain.access import Principal
from orchestrator.domain.ids import JobId
from orchestrator.ports import Desk, Vault

from . import schemas
from .description import reference
from .documents import UnsupportedType, load_mapping
from .metrics import Metrics
from .problems import Problem, invalid
from .scoped import ScopedDesk
from .settings import ApiSettings

_TAG = re.compile(r'"([0-9]{1,15})"')
Model = TypeVar("Model", bound=schemas.Request)


async def get_desk(request: Request) -> Desk:
    """As whoever asks sees it."""
    desk: Desk = request.app.state.desk
    principal: Principal | None = request.state.principal
    return ScopedDesk(desk, principal) if principal is not None and principal.projects else desk


async def get_settings(request: Request) -> ApiSettings:
    settings: ApiSettings = request.app.state.settings
    return settings


async def get_metrics(request: Request) -> Metrics:
    metrics: Metrics = request.app.state.metrics
    return metrics


async def get_vault(request: Request) -> Vault | None:
    vault: Vault | None = request.app.state.vault
    return vault


async def get_text(request: Request) -> str:
    try:
        return (await request.body()).decode()
    except UnicodeDecodeError as error:
        raise Problem(422, "invalid", f"the body is not UTF-8 at byte {error.start}; save it as UTF-8") from error


def body_of(model: type[Model], *, may_be_empty: bool = False) -> Callable[..., Awaitable[Model]]:
    """A dependency that reads a body (JSON or YAML) as `model`, refusing it field by field; empty where it may be."""

    async def read(request: Request) -> Model:
        text = await get_text(request)
        return schemas.read(model, {} if may_be_empty and not text.strip() else parse(text, request))

    return read


def parse(text: str, request: Request) -> dict[str, object]:
    try:
        return load_mapping(text, request.headers.get("content-type", ""))
    except UnsupportedType as error:
        raise Problem(415, "content-type", error.message) from error


async def get_key(idempotency_key: Annotated[str | None, Header(alias="Idempotency-Key")] = None) -> str | None:
    key = idempotency_key
    if key is not None and not (1 <= len(key) <= 255 and key.isascii() and key.isprintable()):
        allowed = "1..255 printable ASCII characters"
        raise invalid("Idempotency-Key", key, f"must be {allowed}", allowed)
    return key


async def get_match(if_match: Annotated[str | None, Header(alias="If-Match", max_length=1000)] = None) -> int | None:
    """The revision that a change rests on; None where it rests on none. Raises Problem."""
    if if_match is None or if_match.strip() == "*":
        return None
    quoted = _TAG.fullmatch(if_match.strip())
    if quoted is None:
        allowed = 'the ETag of one answer, for example "7", or *'
        raise invalid("If-Match", if_match, f"must be {allowed}", allowed)
    return int(quoted[1])


def etag(revision: int) -> str:
    return f'"{revision}"'


async def get_job_id(job_id: Annotated[str, Path(max_length=100)]) -> JobId:
    return JobId(job_id)


TheDesk = Annotated[Desk, Depends(get_desk)]
TheSettings = Annotated[ApiSettings, Depends(get_settings)]
TheMetrics = Annotated[Metrics, Depends(get_metrics)]
TheVault = Annotated[Vault | None, Depends(get_vault)]
TheJobId = Annotated[JobId, Depends(get_job_id)]
TheMatch = Annotated[int | None, Depends(get_match)]
TheKey = Annotated[str | None, Depends(get_key)]


def document(model: type[schemas.Request]) -> dict[str, object]:
    """The OpenAPI description of a body that `body_of(model)` reads; app.py names every such model."""
    content = {kind: {"schema": reference(model)} for kind in ("application/json", "application/yaml")}
    return {"requestBody": {"required": True, "content": content}}
