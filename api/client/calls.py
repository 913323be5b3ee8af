"""Every call of the API as a value: what is sent, how its answer is read, and whether it may be sent twice.

Sends nothing. The clients (client.py, aio.py) differ only in how they send and wait, and share everything else from here.
A repeat is safe for reads, for a cancel, and for a submission (it always carries a key).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Generic, Literal, TypeAlias, TypeVar
from urllib.parse import quote

import httpx2
from pydantic import BaseModel

from api.chaos import FaultRequest
from api.documents import load_mapping
from api.plan_views import ForecastView
from api.schemas import read
from api.views import (
    AcceptedView,
    BulkView,
    CheckpointView,
    EventView,
    FaultAcceptedView,
    FaultView,
    GapView,
    JobPage,
    JobView,
    LogPageView,
    NodeView,
    ProjectView,
    StepView,
    SubmittedView,
    WaitingView,
)
from orchestrator.domain.errors import Refused

from .errors import ApiError

T = TypeVar("T")
View = TypeVar("View", bound=BaseModel)
JobLike: TypeAlias = Path | str | Mapping[str, Any]
"""A job file, or what one holds."""
BEGINNING = "0"
PLAN_S = 120.0
"""Most of it is importing the job's program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Generic[T]):
    """read: the answer to a success as what the caller gets. timeout_s: instead of the client's own."""

    method: str
    path: str
    read: Callable[[httpx2.Response], T]
    params: Mapping[str, Any] = field(default_factory=dict)
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float | None = None
    is_repeatable: bool = True

    def request(self) -> dict[str, Any]:
        """Keyword arguments of httpx2's request()."""
        found: dict[str, Any] = {"params": dict(self.params), "headers": dict(self.headers)}
        found |= {} if self.body is None else {"json": self.body}
        return found | ({} if self.timeout_s is None else {"timeout": self.timeout_s})


@dataclass(frozen=True, slots=True, kw_only=True)
class LogChunk:
    text: str
    next_offset: int
    device: str


# --- jobs ----------------------------------------------------------------------------------------------------------------


def submit(job: JobLike, key: str | None = None, id: str | None = None) -> Call[SubmittedView]:
    if id is not None:
        return Call(method="PUT", path=job_path(id), read=one(SubmittedView), body=body_of(job))
    headers = {"Idempotency-Key": key or secrets.token_hex(16)}
    return Call(method="POST", path="/api/v1/jobs", read=one(SubmittedView), body=body_of(job), headers=headers)


def jobs(
    state: Sequence[str] = (),
    labels: Mapping[str, str] | None = None,
    name: str | None = None,
    project: str | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
    limit: int = 50,
    cursor: str | None = None,
    user: str | None = None,
    sort: str | None = None,
    total: bool = False,
) -> Call[JobPage]:
    carried = [f"{name}={value}" for name, value in (labels or {}).items()]
    given = {"name": name, "project": project, "since": _instant(since), "until": _instant(until), "cursor": cursor}
    given |= {"user": user, "sort": sort, "total": "true" if total else None}
    params = {"limit": limit, "state": list(state), "label": carried}
    params |= {name: value for name, value in given.items() if value is not None}
    return Call(method="GET", path="/api/v1/jobs", read=one(JobPage), params=params)


def job(id: str) -> Call[JobView]:
    return Call(method="GET", path=job_path(id), read=one(JobView))


def verb(
    id: str, name: Literal["cancel", "pause", "resume", "checkpoint"], revision: int | None = None
) -> Call[AcceptedView]:
    return Call(method="POST", path=f"{job_path(id)}:{name}", read=one(AcceptedView), **resting_on(revision))


def to_many(
    name: Literal["cancel", "pause", "resume"],
    state: Sequence[str],
    job_name: str | None,
    project: str | None,
    labels: Mapping[str, str] | None,
    dry_run: bool,
) -> Call[BulkView]:
    asked = {"state": list(state), "name": job_name, "project": project, "labels": dict(labels or {})}
    body = {**asked, "dry_run": dry_run}
    return Call(method="POST", path=f"/api/v1/jobs:{name}", read=one(BulkView), body=body)


def resize_many(
    sizes: Mapping[str, int | None],
    state: Sequence[str],
    job_name: str | None,
    project: str | None,
    labels: Mapping[str, str] | None,
    dry_run: bool,
) -> Call[BulkView]:
    asked = {"state": list(state), "name": job_name, "project": project, "labels": dict(labels or {})}
    body = {**asked, "dry_run": dry_run}
    wanted = {name: value for name, value in sizes.items() if value is not None}
    return Call(method="POST", path="/api/v1/jobs:resize", read=one(BulkView), body=body | {"resize": wanted})


def resize(
    id: str,
    target: int | None,
    min_devices: int | None,
    max_devices: int | None,
    priority: int | None = None,
    revision: int | None = None,
) -> Call[AcceptedView]:
    wanted = {"target": target, "min_devices": min_devices, "max_devices": max_devices, "priority": priority}
    body = {name: value for name, value in wanted.items() if value is not None}
    return Call(method="PATCH", path=job_path(id), read=one(AcceptedView), body=body, **resting_on(revision))


def resting_on(revision: int | None) -> dict[str, Any]:
    """A change of a job that was looked at. Never sent twice: the first try, whose answer was lost, is itself a change."""
    return {} if revision is None else {"headers": {"If-Match": f'"{revision}"'}, "is_repeatable": False}


def queue() -> Call[list[WaitingView]]:
    return Call(method="GET", path="/api/v1/queue", read=many(WaitingView))


def projects() -> Call[list[ProjectView]]:
    return Call(method="GET", path="/api/v1/projects", read=many(ProjectView))


def project(name: str) -> Call[ProjectView]:
    return Call(method="GET", path=f"/api/v1/projects/{quote(name, safe='')}", read=one(ProjectView))


def set_quota(project: str, max_devices: int | None) -> Call[AcceptedView]:
    path = f"/api/v1/projects/{quote(project, safe='')}"
    return Call(method="PUT", path=path, read=one(AcceptedView), body={"max_devices": max_devices})


def checkpoints(id: str) -> Call[list[CheckpointView]]:
    return Call(method="GET", path=f"{job_path(id)}/checkpoints", read=many(CheckpointView))


def history(id: str, since: str = BEGINNING, limit: int = 1000) -> Call[list[EventView | GapView]]:
    params = {"since": since, "limit": limit}
    headers = {"Accept": "application/json"}
    return Call(method="GET", path=f"{job_path(id)}/events", read=_history, params=params, headers=headers)


def metrics(id: str, since: str = BEGINNING, limit: int = 1000) -> Call[list[StepView]]:
    return Call(method="GET", path=f"{job_path(id)}/metrics", read=many(StepView), params={"since": since, "limit": limit})


def logs(id: str, rank: int | None, device: str | None, tail: int | None, offset: int | None) -> Call[LogChunk]:
    given = {"rank": rank, "device": device, "tail": tail, "offset": offset}
    params = {name: value for name, value in given.items() if value is not None}
    return Call(method="GET", path=f"{job_path(id)}/logs", read=_log, params=params)


def log_lines(
    id: str,
    ranks: Sequence[int] = (),
    devices: Sequence[str] = (),
    since: datetime | None = None,
    grep: str = "",
    tail: int | None = None,
    after: str = "",
) -> Call[LogPageView]:
    params: dict[str, Any] = {"rank": list(ranks), "device": list(devices), "grep": grep, "after": after}
    params |= {} if since is None else {"since": _instant(since)}
    params |= {} if tail is None else {"tail": tail}
    return Call(method="GET", path=f"{job_path(id)}/logs/lines", read=one(LogPageView), params=params)


def faults(id: str) -> Call[list[FaultView]]:
    return Call(method="GET", path=f"{job_path(id)}/faults", read=many(FaultView))


def validate(job: JobLike) -> Call[ForecastView]:
    body = body_of(job)
    return Call(method="POST", path="/api/v1/jobs:validate", read=one(ForecastView), body=body, timeout_s=PLAN_S)


def plan(job: JobLike, cluster: Mapping[str, Any] | None = None) -> Call[ForecastView]:
    body = {"job": body_of(job)} | ({"cluster": dict(cluster)} if cluster is not None else {})
    return Call(method="POST", path="/api/v1/plans", read=one(ForecastView), body=body, timeout_s=PLAN_S)


# --- cluster -------------------------------------------------------------------------------------------------------------


def nodes() -> Call[list[NodeView]]:
    return Call(method="GET", path="/api/v1/nodes", read=many(NodeView))


def add_node(kind: str, num_devices: int, labels: Mapping[str, str] | None, count: int) -> Call[AcceptedView]:
    body = {"kind": kind, "num_devices": num_devices, "count": count} | ({"labels": dict(labels)} if labels else {})
    return Call(method="POST", path="/api/v1/nodes", read=one(AcceptedView), body=body, is_repeatable=False)


def node_verb(node: str, name: Literal["cordon", "uncordon", "drain", "release"]) -> Call[AcceptedView]:
    body: dict[str, Any] | None = {} if name == "drain" else None
    return Call(method="POST", path=f"{node_path(node)}:{name}", read=one(AcceptedView), body=body)


def remove_node(node: str, deadline_s: float | None) -> Call[AcceptedView]:
    params = {} if deadline_s is None else {"deadline_s": deadline_s}
    return Call(method="DELETE", path=node_path(node), read=one(AcceptedView), params=params)


def fault(asked: Mapping[str, Any]) -> Call[FaultAcceptedView]:
    return Call(method="POST", path="/api/v1/faults", read=one(FaultAcceptedView), body=dict(asked), is_repeatable=False)


def inject(asked: FaultRequest | Mapping[str, Any]) -> Call[FaultAcceptedView]:
    """Raises Refused where the request can't be right."""
    request = asked if isinstance(asked, FaultRequest) else read(FaultRequest, dict(asked))
    return fault(request.checked().model_dump(mode="json", exclude_unset=True))


# --- the server ----------------------------------------------------------------------------------------------------------


def ready() -> Call[dict[str, str]]:
    return Call(method="GET", path="/readyz", read=lambda answer: dict(answer.json()["checks"]), is_repeatable=False)


def health_version() -> Call[str]:
    return Call(method="GET", path="/healthz", read=lambda answer: str(answer.json()["version"]))


def server() -> Call[dict[str, Any]]:
    """Version, kinds and what may be asked of it."""
    return Call(method="GET", path="/api/v1/version", read=lambda answer: dict(answer.json()))


# --- reading answers ----------------------------------------------------------------------------------------------------


def one(view: type[View]) -> Callable[[httpx2.Response], View]:
    return lambda answer: view.model_validate(answer.json())


def many(view: type[View]) -> Callable[[httpx2.Response], list[View]]:
    return lambda answer: [view.model_validate(item) for item in answer.json()]


def _history(answer: httpx2.Response) -> list[EventView | GapView]:
    found = answer.json()
    return [GapView.model_validate(item) if item["type"] == "gap" else EventView.model_validate(item) for item in found]


def _log(answer: httpx2.Response) -> LogChunk:
    next_offset, device = int(answer.headers["X-Next-Offset"]), answer.headers["X-Log-Device"]
    return LogChunk(text=answer.text, next_offset=next_offset, device=device)


def _instant(at: datetime | None) -> str | None:
    return None if at is None else at.astimezone(UTC).isoformat()


def refused(answer: httpx2.Response) -> ApiError:
    try:
        problem = answer.json()
    except ValueError:
        problem = None
    if not isinstance(problem, dict):
        problem = {
            "status": answer.status_code,
            "detail": f"{answer.url} answered {answer.status_code} and no problem document",
        }
    return ApiError(problem)


# --- job files -----------------------------------------------------------------------------------------------------------


def body_of(job: JobLike) -> dict[str, Any]:
    """Raises Refused."""
    return dict(job) if isinstance(job, Mapping) else read_job_file(Path(job))


def read_job_file(path: Path) -> dict[str, Any]:
    """The mapping in a job file, its relative paths made absolute. Raises Refused."""
    body = read_mapping(path)
    data, folder = body.get("data"), path.resolve().parent
    checkpoint = body.get("checkpoint")
    for name in ("path", "local", "restore_from"):
        if isinstance(checkpoint, dict) and isinstance(place := checkpoint.get(name), str):
            checkpoint[name] = _from(folder, place)
    if isinstance(data, dict) and isinstance(data.get("files"), list):
        data["files"] = [_from(folder, item) if isinstance(item, str) else item for item in data["files"]]
    return body


def read_mapping(path: Path) -> dict[str, Any]:
    """The mapping in a .yaml, .yml, .toml or .json file. Raises Refused, with the file's name."""
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise Refused(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise Refused(f"{path} is not UTF-8 at byte {error.start}; save it as UTF-8") from error
    kind = {".json": "application/json", ".toml": "application/toml"}.get(path.suffix, "application/yaml")
    try:
        return load_mapping(text, kind)
    except Refused as error:
        raise Refused(f"{path}: {error}", error.problems) from error


def _from(folder: Path, pattern: str) -> str:
    # {stdlib}, a URL and an empty pattern are not places in the file's folder.
    return pattern if not pattern or pattern.startswith(("/", "{")) or "://" in pattern else str(folder / pattern)


def node_path(node: str) -> str:
    return f"/api/v1/nodes/{quote(node, safe='')}"


def job_path(id: str) -> str:
    return f"/api/v1/jobs/{quote(id, safe='')}"
