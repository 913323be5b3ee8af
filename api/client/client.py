"""The client: every call of the API as a typed method, with retries where a repeat is safe.

Made from aio.py by `python -m deploy.sync_client`: change that one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

import httpx2

from api.access_shapes import DAY_S, AuditPage, MintedView, TokenView, WhoView
from api.chaos import FaultRequest
from api.hook_shapes import DeliveryView, MadeWebhookView, WebhookView
from api.plan_views import ForecastView
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
    LogPageView,
    NodeView,
    ProjectView,
    StepView,
    SubmittedView,
    WaitingView,
)

from . import access_calls, calls, hook_calls
from .calls import BEGINNING, Call, JobLike, LogChunk
from .credentials import headers_for
from .errors import ApiError, StillRunning, Unreachable
from .job import Job
from .retry import Budget
from .streaming import SHAPES, SILENCE_S, Event

T = TypeVar("T")


class Client:
    """Raises ApiError, Unreachable. retry_s: how long to try a server that does not answer (it may be restarting).

    token: where it is left out, EVERSTEP_TOKEN, the file EVERSTEP_TOKEN_FILE, or that of a server you have started here.
    """

    def __init__(
        self,
        base_url: str,
        *,
        token: str | None = None,
        timeout_s: float = 10.0,
        retry_s: float = 10.0,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self._retry_s = retry_s
        given = headers_for(self.base_url, token) | dict(headers or {})
        # A proxy of the environment must not see requests to this machine.
        self._http = httpx2.Client(base_url=self.base_url, timeout=timeout_s, trust_env=False, headers=given)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    # --- jobs ----------------------------------------------------------------------------------------------------------

    def submit(self, job: JobLike, key: str | None = None, *, id: str | None = None) -> SubmittedView:
        """A job file (its relative paths count from its own folder) or the same as a mapping. Raises Refused too.

        id: one of your own (`job-nightly-7`), under which the same job is recorded once, and no other.
        """
        return self.send(calls.submit(job, key, id))

    def run(self, job: JobLike, key: str | None = None) -> Job:
        """Submit it, and have a handle to it."""
        made = self.submit(job, key)
        return self.attach(made.id)

    def attach(self, job: str) -> Job:
        return Job(self, job)

    def jobs(
        self,
        *,
        state: Sequence[str] = (),
        labels: Mapping[str, str] | None = None,
        name: str | None = None,
        project: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        limit: int = 50,
        cursor: str | None = None,
        user: str | None = None,
        sort: Literal["-created_at", "created_at", "-finished_at", "finished_at"] | None = None,
        total: bool = False,
    ) -> JobPage:
        """Newest first, or as `sort` says: by finished_at, only those that are over. A cursor is of one order.

        since, until: of when they were submitted, aware. user: name or id of the token they were submitted with.
        """
        return self.send(calls.jobs(state, labels, name, project, since, until, limit, cursor, user, sort, total))

    def all_jobs(self, *, state: Sequence[str] = ()) -> Iterator[JobSummary]:
        cursor: str | None = None
        while True:
            page = self.jobs(state=state, limit=200, cursor=cursor)
            yield from page.jobs
            if (cursor := page.next_cursor) is None:
                return

    def job(self, job: str) -> JobView:
        return self.send(calls.job(job))

    def cancel(self, job: str, *, if_revision: int | None = None) -> AcceptedView:
        return self.send(calls.verb(job, "cancel", if_revision))

    def pause(self, job: str, *, if_revision: int | None = None) -> AcceptedView:
        """It makes one more step, saves it, and holds no device until it is resumed."""
        return self.send(calls.verb(job, "pause", if_revision))

    def resume(self, job: str, *, if_revision: int | None = None) -> AcceptedView:
        return self.send(calls.verb(job, "resume", if_revision))

    def to_many(
        self,
        verb: Literal["cancel", "pause", "resume"],
        *,
        state: Sequence[str] = (),
        name: str | None = None,
        project: str | None = None,
        labels: Mapping[str, str] | None = None,
        dry_run: bool = False,
    ) -> BulkView:
        """To every open job that is in one of these states, has this name and project and all these labels."""
        return self.send(calls.to_many(verb, state, name, project, labels, dry_run))

    def resize(
        self,
        job: str,
        *,
        target: int | None = None,
        min_devices: int | None = None,
        max_devices: int | None = None,
        priority: int | None = None,
        if_revision: int | None = None,
    ) -> AcceptedView:
        """In devices; what is left out stays. target: how many it should have now; 0: as many as it can use."""
        return self.send(calls.resize(job, target, min_devices, max_devices, priority, if_revision))

    def resize_many(
        self,
        *,
        target: int | None = None,
        min_devices: int | None = None,
        max_devices: int | None = None,
        priority: int | None = None,
        state: Sequence[str] = (),
        name: str | None = None,
        project: str | None = None,
        labels: Mapping[str, str] | None = None,
        dry_run: bool = False,
    ) -> BulkView:
        """As resize, of every open job that is in one of these states, has this name and project and all these labels."""
        sizes = {"target": target, "min_devices": min_devices, "max_devices": max_devices, "priority": priority}
        return self.send(calls.resize_many(sizes, state, name, project, labels, dry_run))

    def queue(self) -> list[WaitingView]:
        """Jobs without devices, the next one first, and why each waits."""
        return self.send(calls.queue())

    def projects(self) -> list[ProjectView]:
        return self.send(calls.projects())

    def project(self, name: str) -> ProjectView:
        return self.send(calls.project(name))

    def set_quota(self, project: str, max_devices: int | None) -> AcceptedView:
        """max_devices: of all its jobs together; None for no limit. What they have already, they keep."""
        return self.send(calls.set_quota(project, max_devices))

    def checkpoints(self, job: str) -> list[CheckpointView]:
        """Newest first."""
        return self.send(calls.checkpoints(job))

    def checkpoint_now(self, job: str) -> AcceptedView:
        return self.send(calls.verb(job, "checkpoint"))

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
            if not heard:
                found = self.job(job)
                if found.is_over:
                    return
            if not budget.pause():
                raise Unreachable(f"{self.base_url} keeps ending the events of {job} without a word")

    def history(self, job: str, since: str = BEGINNING, limit: int = 1000) -> list[EventView | GapView]:
        return self.send(calls.history(job, since, limit))

    def metrics(self, job: str, since: str = BEGINNING, limit: int = 1000) -> list[StepView]:
        return self.send(calls.metrics(job, since, limit))

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
        return self.send(calls.logs(job, rank, device, tail, offset))

    def log_lines(
        self,
        job: str,
        *,
        ranks: Sequence[int] = (),
        devices: Sequence[str] = (),
        since: datetime | None = None,
        grep: str = "",
        tail: int | None = None,
        after: str = "",
    ) -> LogPageView:
        """Logs of many ranks as one, in the order of time; of every device where none is named.

        after: `next` of the page before. since: an aware instant.
        """
        return self.send(calls.log_lines(job, ranks, devices, since, grep, tail, after))

    def validate(self, job: JobLike) -> ForecastView:
        """What a submission would be refused for is raised; else the plan it would get now. Nothing is recorded."""
        return self.send(calls.validate(job))

    def plan(self, job: JobLike, cluster: Mapping[str, Any] | None = None) -> ForecastView:
        """What a job would run as, on the server's nodes or on a cluster described as in a cluster file. Starts nothing."""
        return self.send(calls.plan(job, cluster))

    # --- cluster -------------------------------------------------------------------------------------------------------

    def nodes(self) -> list[NodeView]:
        return self.send(calls.nodes())

    def add_node(
        self, kind: str, num_devices: int = 2, labels: Mapping[str, str] | None = None, *, count: int = 1
    ) -> AcceptedView:
        """labels: `rack` or `switch` is the failure domain mirrors keep out of where they can."""
        return self.send(calls.add_node(kind, num_devices, labels, count))

    def cordon_node(self, node: str) -> AcceptedView:
        """Nothing new is placed there; what trains there trains on."""
        return self.send(calls.node_verb(node, "cordon"))

    def uncordon_node(self, node: str) -> AcceptedView:
        """Have it used again; jobs that have not left it yet need not."""
        return self.send(calls.node_verb(node, "uncordon"))

    def drain_node(self, node: str) -> AcceptedView:
        """Have jobs move off it while they train."""
        return self.send(calls.node_verb(node, "drain"))

    def remove_node(self, node: str, deadline_s: float | None = None) -> AcceptedView:
        """Drain it, then take it away; after deadline_s in any case."""
        return self.send(calls.remove_node(node, deadline_s))

    def release_node(self, node: str) -> AcceptedView:
        """Have its devices planned with again, whatever is held against them."""
        return self.send(calls.node_verb(node, "release"))

    def kill_node(self, node: str) -> FaultAcceptedView:
        """Whatever mirrors cover."""
        return self.send(calls.fault({"kind": "node_kill", "node": node, "beyond_mirrors": True}))

    def kill_rank(self, job: str, rank: int) -> FaultAcceptedView:
        """Whatever mirrors cover."""
        return self.send(calls.fault({"kind": "kill", "job": job, "rank": rank, "beyond_mirrors": True}))

    def inject(self, fault: FaultRequest | Mapping[str, Any]) -> FaultAcceptedView:
        """Make something fail on purpose. Raises Refused where the request can't be right."""
        return self.send(calls.inject(fault))

    def faults(self, job: str) -> list[FaultView]:
        """Those caused on purpose that are kept, oldest first."""
        return self.send(calls.faults(job))

    def ready(self) -> dict[str, str]:
        """Name of each check -> "ok". Raises ApiError, whose problem carries the checks, where one is not."""
        return self.send(calls.ready())

    def server_version(self) -> str:
        return self.send(calls.health_version())

    # --- access --------------------------------------------------------------------------------------------------------

    def whoami(self) -> WhoView:
        """Whose token this client has, and what it may do."""
        return self.send(access_calls.whoami())

    def create_token(
        self,
        name: str,
        roles: Sequence[str] = ("operator",),
        *,
        projects: Sequence[str] = (),
        expires_s: float | None = 90 * DAY_S,
    ) -> MintedView:
        """Its text is in this answer and nowhere else. expires_s: from now; None: never."""
        return self.send(access_calls.create_token(name, roles, projects, expires_s))

    def tokens(self) -> list[TokenView]:
        """Oldest first."""
        return self.send(access_calls.tokens())

    def revoke_token(self, token: str) -> TokenView:
        """By its id."""
        return self.send(access_calls.revoke_token(token))

    def login_link(self) -> str:
        """Signs a browser in, once, with the rights of this client's token."""
        code = self.send(access_calls.login_code())
        return f"{self.base_url}{code.path}"

    def audit(self, limit: int = 100, cursor: str | None = None) -> AuditPage:
        """What was asked for, newest first."""
        return self.send(access_calls.audit(limit, cursor))

    # --- webhooks ------------------------------------------------------------------------------------------------------

    def create_webhook(
        self,
        name: str,
        url: str,
        *,
        events: Sequence[str] = (),
        projects: Sequence[str] = (),
        labels: Mapping[str, str] | None = None,
    ) -> MadeWebhookView:
        """Have a URL told of what happens from now on; of events, projects and labels, none means any.

        The secret in this answer is nowhere else: `api.client.webhooks` checks with it what comes.
        """
        return self.send(hook_calls.create(name, url, events, projects, labels))

    def webhooks(self) -> list[WebhookView]:
        """Oldest first."""
        return self.send(hook_calls.webhooks())

    def webhook(self, webhook: str) -> WebhookView:
        return self.send(hook_calls.webhook(webhook))

    def delete_webhook(self, webhook: str) -> None:
        """With what it was to be told."""
        self.send(hook_calls.remove(webhook))

    def pause_webhook(self, webhook: str) -> WebhookView:
        """What is pending waits; what happens meanwhile it is not told."""
        return self.send(hook_calls.verb(webhook, "pause"))

    def resume_webhook(self, webhook: str) -> WebhookView:
        return self.send(hook_calls.verb(webhook, "resume"))

    def test_webhook(self, webhook: str) -> DeliveryView:
        """Send it a ping."""
        return self.send(hook_calls.test(webhook))

    def deliveries(self, webhook: str) -> list[DeliveryView]:
        """What it was told or is to be told, newest first."""
        return self.send(hook_calls.deliveries(webhook))

    def redeliver(self, webhook: str, delivery: str) -> DeliveryView:
        """Send it once more, under the same id."""
        return self.send(hook_calls.redeliver(webhook, delivery))

    # --- sending -------------------------------------------------------------------------------------------------------

    def send(self, call: Call[T]) -> T:
        """Any call of calls.py, with its retries."""
        budget = Budget(self._retry_s)
        while True:
            try:
                answer = self._http.request(call.method, call.path, **call.request())
            except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
                if not budget.pause():
                    raise self._unreachable(error) from error
            except httpx2.TransportError as error:
                if not call.is_repeatable or not budget.pause():
                    raise self._unreachable(error) from error
            else:
                if answer.is_success:
                    return call.read(answer)
                if answer.status_code != 503 or not call.is_repeatable or not budget.pause():
                    raise calls.refused(answer)

    def _stream(self, job: str, after: str) -> Iterator[Event]:
        headers = {"Accept": "text/event-stream", "Last-Event-ID": after}
        timeout = httpx2.Timeout(10.0, read=SILENCE_S)
        path = f"{calls.job_path(job)}/events"
        with self._http.stream("GET", path, headers=headers, timeout=timeout) as answer:
            if answer.status_code == 204:
                return
            if not answer.is_success:
                answer.read()
                raise calls.refused(answer)
            for sse in httpx2.EventSource(answer):
                shape = SHAPES.get(sse.event)
                if shape is not None:
                    yield shape.model_validate_json(sse.data)

    def _unreachable(self, error: Exception) -> Unreachable:
        return Unreachable(f"no answer from {self.base_url} ({error})")
