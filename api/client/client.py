"""The client: every call of the API as a typed method, with retries where a repeat is safe.

A repeat is safe for reads, for a cancel, and for a submission (it always carries a key). Adding a node or causing a fault
is sent again only where the first try never reached the server.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeAlias
from urllib.parse import quote

import httpx2

from api.access_shapes import DAY_S, AuditPage, CodeView, MintedView, TokenView, WhoView
from api.chaos import FaultRequest
from api.documents import load_mapping
from api.plan_views import ForecastView
from api.schemas import read
from api.views import (
    TERMINAL,
    AcceptedView,
    BulkView,
    CheckpointView,
    EventView,
    FaultAcceptedView,
    FaultView,
    GapView,
    JobPage,
    JobSummary,
    JobView,
    NodeView,
    StepView,
    SubmittedView,
)
from orchestrator.domain.errors import Refused

from .credentials import headers_for
from .errors import ApiError, StillRunning, Unreachable
from .retry import Budget

Event: TypeAlias = EventView | StepView | GapView
BEGINNING = "0"
PLAN_S = 120.0
"""Most of it is importing the job's program."""
SILENCE_S = 45.0
"""An event stream that says nothing for this long, pings included, is broken."""
_SHAPES: dict[str, type[EventView] | type[StepView] | type[GapView]] = {
    "history": EventView,
    "step": StepView,
    "gap": GapView,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LogChunk:
    text: str
    next_offset: int
    device: str


class Client:
    """Raises ApiError, Unreachable. retry_s: how long to try a server that does not answer (it may be restarting).

    token: where it is left out, EVERSTEP_TOKEN, the file EVERSTEP_TOKEN_FILE, or that of a server you have started here.
    """

    def __init__(self, base_url: str, *, token: str | None = None, timeout_s: float = 10.0, retry_s: float = 10.0) -> None:
        self.base_url = base_url.rstrip("/")
        self._retry_s = retry_s
        # A proxy of the environment must not see requests to this machine.
        self._http = httpx2.Client(
            base_url=self.base_url, timeout=timeout_s, trust_env=False, headers=headers_for(self.base_url, token)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    # --- jobs ----------------------------------------------------------------------------------------------------------

    def submit(self, job: Path | str | Mapping[str, Any], key: str | None = None) -> SubmittedView:
        """A job file (its relative paths count from its own folder) or the same as a mapping. Raises Refused too."""
        body = dict(job) if isinstance(job, Mapping) else read_job_file(Path(job))
        headers = {"Idempotency-Key": key or secrets.token_hex(16)}
        return SubmittedView.model_validate(self._json("POST", "/api/v1/jobs", json=body, headers=headers))

    def jobs(
        self,
        *,
        state: Sequence[str] = (),
        labels: Mapping[str, str] | None = None,
        limit: int = 50,
        cursor: str | None = None,
    ) -> JobPage:
        wanted = [f"{name}={value}" for name, value in (labels or {}).items()]
        params = {"limit": limit, "state": list(state), "label": wanted} | ({"cursor": cursor} if cursor else {})
        return JobPage.model_validate(self._json("GET", "/api/v1/jobs", params=params))

    def all_jobs(self, *, state: Sequence[str] = ()) -> Iterator[JobSummary]:
        page = self.jobs(state=state, limit=200)
        yield from page.jobs
        while page.next_cursor:
            page = self.jobs(state=state, limit=200, cursor=page.next_cursor)
            yield from page.jobs

    def job(self, job: str) -> JobView:
        return JobView.model_validate(self._json("GET", _path(job)))

    def cancel(self, job: str) -> AcceptedView:
        return AcceptedView.model_validate(self._json("POST", f"{_path(job)}:cancel"))

    def to_many(
        self,
        verb: Literal["cancel", "pause", "resume"],
        *,
        state: Sequence[str] = (),
        name: str | None = None,
        labels: Mapping[str, str] | None = None,
        dry_run: bool = False,
    ) -> BulkView:
        """To every open job that is in one of these states, has this name and carries all of these labels."""
        body = {"state": list(state), "name": name, "labels": dict(labels or {}), "dry_run": dry_run}
        return BulkView.model_validate(self._json("POST", f"/api/v1/jobs:{verb}", json=body))

    def pause(self, job: str) -> AcceptedView:
        """It makes one more step, saves it, and holds no device until it is resumed."""
        return AcceptedView.model_validate(self._json("POST", f"{_path(job)}:pause"))

    def resume(self, job: str) -> AcceptedView:
        return AcceptedView.model_validate(self._json("POST", f"{_path(job)}:resume"))

    def resize(
        self, job: str, *, target: int | None = None, min_devices: int | None = None, max_devices: int | None = None
    ) -> AcceptedView:
        """In devices; what is left out stays. target: how many it should have now; 0: as many as it can use."""
        wanted = {"target": target, "min_devices": min_devices, "max_devices": max_devices}
        body = {name: value for name, value in wanted.items() if value is not None}
        return AcceptedView.model_validate(self._json("PATCH", _path(job), json=body))

    def checkpoints(self, job: str) -> list[CheckpointView]:
        """Newest first."""
        return [CheckpointView.model_validate(item) for item in self._json("GET", f"{_path(job)}/checkpoints")]

    def checkpoint_now(self, job: str) -> AcceptedView:
        return AcceptedView.model_validate(self._json("POST", f"{_path(job)}:checkpoint"))

    def wait(self, job: str, timeout_s: float | None = None, poll_s: float = 0.5) -> JobView:
        """The job once it is over. Raises StillRunning after timeout_s."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            found = self.job(job)
            if found.is_over:
                return found
            if deadline is not None and time.monotonic() >= deadline:
                raise StillRunning(f"{job} is {found.status} at step {found.step} of {found.steps} after {timeout_s:g} s")
            time.sleep(poll_s if deadline is None else max(0.0, min(poll_s, deadline - time.monotonic())))

    # --- what happened -------------------------------------------------------------------------------------------------

    def events(self, job: str, after: str = BEGINNING) -> Iterator[Event]:
        """History and steps as they happen, reconnecting where it must; ends when the job has ended."""
        budget = Budget(self._retry_s)
        while True:
            heard = False
            try:
                for event in self._stream(job, after):
                    budget.reset()
                    after, heard = event.id, True
                    yield event
                    if isinstance(event, EventView) and event.status in TERMINAL:
                        return
            except httpx2.TransportError as error:
                if not budget.pause():
                    raise self._unreachable(error) from error
                continue
            except ApiError as error:
                if error.status != 503 or not budget.pause():
                    raise
                continue
            if not heard and self.job(job).is_over:
                return
            if not budget.pause():
                raise Unreachable(f"{self.base_url} keeps ending the events of {job} without a word")

    def history(self, job: str, since: str = BEGINNING, limit: int = 1000) -> list[EventView | GapView]:
        params = {"since": since, "limit": limit}
        found = self._json("GET", f"{_path(job)}/events", params=params, headers={"Accept": "application/json"})
        return [GapView.model_validate(item) if item["type"] == "gap" else EventView.model_validate(item) for item in found]

    def metrics(self, job: str, since: str = BEGINNING, limit: int = 1000) -> list[StepView]:
        found = self._json("GET", f"{_path(job)}/metrics", params={"since": since, "limit": limit})
        return [StepView.model_validate(item) for item in found]

    def all_metrics(self, job: str) -> Iterator[StepView]:
        since, page = BEGINNING, 10000
        while True:
            steps = self.metrics(job, since, page)
            yield from steps
            if len(steps) < page:
                return
            since = steps[-1].id

    def logs(
        self,
        job: str,
        *,
        rank: int | None = None,
        device: str | None = None,
        tail: int | None = None,
        offset: int | None = None,
    ) -> LogChunk:
        given = {"rank": rank, "device": device, "tail": tail, "offset": offset}
        params = {name: value for name, value in given.items() if value is not None}
        answer = self._send("GET", f"{_path(job)}/logs", params=params)
        next_offset, found = int(answer.headers["X-Next-Offset"]), answer.headers["X-Log-Device"]
        return LogChunk(text=answer.text, next_offset=next_offset, device=found)

    def plan(self, job: Path | str | Mapping[str, Any], cluster: Mapping[str, Any] | None = None) -> ForecastView:
        """What a job would run as, on the server's nodes or on a cluster described as in a cluster file. Starts nothing."""
        body = {"job": dict(job) if isinstance(job, Mapping) else read_job_file(Path(job))}
        asked = body | ({"cluster": dict(cluster)} if cluster is not None else {})
        answer = self._json("POST", "/api/v1/plans", json=asked, timeout=PLAN_S)
        return ForecastView.model_validate(answer)

    # --- cluster -------------------------------------------------------------------------------------------------------

    def nodes(self) -> list[NodeView]:
        return [NodeView.model_validate(item) for item in self._json("GET", "/api/v1/nodes")]

    def add_node(
        self, kind: str, num_devices: int = 2, labels: Mapping[str, str] | None = None, *, count: int = 1
    ) -> AcceptedView:
        """labels: `rack` or `switch` is the failure domain mirrors keep out of where they can."""
        body = {"kind": kind, "num_devices": num_devices, "count": count} | ({"labels": dict(labels)} if labels else {})
        return AcceptedView.model_validate(self._json("POST", "/api/v1/nodes", json=body, repeatable=False))

    def cordon_node(self, node: str) -> AcceptedView:
        """Nothing new is placed there; what trains there trains on."""
        return AcceptedView.model_validate(self._json("POST", f"{_node(node)}:cordon"))

    def uncordon_node(self, node: str) -> AcceptedView:
        """Have it used again; jobs that have not left it yet need not."""
        return AcceptedView.model_validate(self._json("POST", f"{_node(node)}:uncordon"))

    def drain_node(self, node: str) -> AcceptedView:
        """Have jobs move off it while they train."""
        return AcceptedView.model_validate(self._json("POST", f"{_node(node)}:drain", json={}))

    def remove_node(self, node: str, deadline_s: float | None = None) -> AcceptedView:
        """Drain it, then take it away; after deadline_s in any case."""
        query = {} if deadline_s is None else {"deadline_s": deadline_s}
        return AcceptedView.model_validate(self._json("DELETE", _node(node), params=query))

    def release_node(self, node: str) -> AcceptedView:
        """Have its devices planned with again, whatever is held against them."""
        return AcceptedView.model_validate(self._json("POST", f"{_node(node)}:release"))

    def kill_node(self, node: str) -> FaultAcceptedView:
        return self._fault({"kind": "kill_node", "node": node})

    def kill_rank(self, job: str, rank: int) -> FaultAcceptedView:
        return self._fault({"kind": "kill_rank", "job": job, "rank": rank})

    def inject(self, fault: FaultRequest | Mapping[str, Any]) -> FaultAcceptedView:
        """Make something fail on purpose. Raises Refused where the request can't be right."""
        asked = fault if isinstance(fault, FaultRequest) else read(FaultRequest, dict(fault))
        return self._fault(asked.checked().model_dump(mode="json", exclude_unset=True))

    def faults(self, job: str) -> list[FaultView]:
        """Those caused on purpose that are kept, oldest first."""
        return [FaultView.model_validate(item) for item in self._json("GET", f"{_path(job)}/faults")]

    def ready(self) -> dict[str, str]:
        """Name of each check -> "ok". Raises ApiError, whose problem carries the checks, where one is not."""
        checks: dict[str, str] = self._json("GET", "/readyz", repeatable=False)["checks"]
        return checks

    def server_version(self) -> str:
        return str(self._json("GET", "/healthz")["version"])

    # --- access --------------------------------------------------------------------------------------------------------

    def whoami(self) -> WhoView:
        """Whose token this client has, and what it may do."""
        return WhoView.model_validate(self._json("GET", "/api/v1/whoami"))

    def create_token(
        self,
        name: str,
        roles: Sequence[str] = ("operator",),
        *,
        projects: Sequence[str] = (),
        expires_s: float | None = 90 * DAY_S,
    ) -> MintedView:
        """Its text is in this answer and nowhere else. expires_s: from now; None: never."""
        body = {"name": name, "roles": list(roles), "projects": list(projects), "expires_s": expires_s}
        return MintedView.model_validate(self._json("POST", "/api/v1/tokens", json=body, repeatable=False))

    def tokens(self) -> list[TokenView]:
        """Oldest first."""
        return [TokenView.model_validate(item) for item in self._json("GET", "/api/v1/tokens")]

    def revoke_token(self, token: str) -> TokenView:
        """By its id."""
        return TokenView.model_validate(self._json("DELETE", f"/api/v1/tokens/{quote(token, safe='')}"))

    def login_link(self) -> str:
        """Signs a browser in, once, with the rights of this client's token."""
        code = CodeView.model_validate(self._json("POST", "/api/v1/session/codes", repeatable=False))
        return f"{self.base_url}{code.path}"

    def audit(self, limit: int = 100, cursor: str | None = None) -> AuditPage:
        """What was asked for, newest first."""
        params = {"limit": limit} | ({"cursor": cursor} if cursor else {})
        return AuditPage.model_validate(self._json("GET", "/api/v1/audit", params=params))

    # --- sending -------------------------------------------------------------------------------------------------------

    def _fault(self, body: Mapping[str, Any]) -> FaultAcceptedView:
        return FaultAcceptedView.model_validate(self._json("POST", "/api/v1/faults", json=body, repeatable=False))

    def _json(self, method: str, path: str, *, repeatable: bool = True, **request: Any) -> Any:
        return self._send(method, path, repeatable=repeatable, **request).json()

    def _send(self, method: str, path: str, *, repeatable: bool = True, **request: Any) -> httpx2.Response:
        budget = Budget(self._retry_s)
        while True:
            try:
                answer = self._http.request(method, path, **request)
            except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
                if not budget.pause():
                    raise self._unreachable(error) from error
            except httpx2.TransportError as error:
                if not repeatable or not budget.pause():
                    raise self._unreachable(error) from error
            else:
                if answer.is_success:
                    return answer
                if answer.status_code != 503 or not repeatable or not budget.pause():
                    raise _refused(answer)

    def _stream(self, job: str, after: str) -> Iterator[Event]:
        headers = {"Accept": "text/event-stream", "Last-Event-ID": after}
        timeout = httpx2.Timeout(10.0, read=SILENCE_S)
        with self._http.stream("GET", f"{_path(job)}/events", headers=headers, timeout=timeout) as answer:
            if answer.status_code == 204:
                return
            if not answer.is_success:
                answer.read()
                raise _refused(answer)
            for sse in httpx2.EventSource(answer):
                shape = _SHAPES.get(sse.event)
                if shape is not None:
                    yield shape.model_validate_json(sse.data)

    def _unreachable(self, error: Exception) -> Unreachable:
        return Unreachable(f"no answer from {self.base_url} ({error})")


def read_job_file(path: Path) -> dict[str, Any]:
    """The mapping in a .yaml, .yml or .json job file, its relative paths made absolute. Raises Refused."""
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise Refused(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise Refused(f"{path} is not UTF-8 at byte {error.start}; save it as UTF-8") from error
    body = load_mapping(text, "application/json" if path.suffix == ".json" else "application/yaml")
    data, folder = body.get("data"), path.resolve().parent
    checkpoint = body.get("checkpoint")
    for name in ("path", "local", "restore_from"):
        if isinstance(checkpoint, dict) and isinstance(place := checkpoint.get(name), str):
            checkpoint[name] = _from(folder, place)
    if isinstance(data, dict) and isinstance(data.get("files"), list):
        data["files"] = [_from(folder, item) if isinstance(item, str) else item for item in data["files"]]
    return body


def _from(folder: Path, pattern: str) -> str:
    # {stdlib}, a URL and an empty pattern are not places in the file's folder.
    return pattern if not pattern or pattern.startswith(("/", "{")) or "://" in pattern else str(folder / pattern)


def _node(node: str) -> str:
    return f"/api/v1/nodes/{quote(node, safe='')}"


def _path(job: str) -> str:
    return f"/api/v1/jobs/{quote(job, safe='')}"


def _refused(answer: httpx2.Response) -> ApiError:
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
