"""What Prometheus reads: jobs by state, requests, open streams, and a few series per job for the newest jobs only.

One registry per app. Labels are closed vocabularies, route templates and capped job ids; nothing a client sends becomes
one.
"""

from __future__ import annotations

import time
from collections import Counter as Tally
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from orchestrator.domain.job import JobRecord, JobStatus
from orchestrator.domain.status import RESIZES, TERMINAL_STATUSES, status_of
from orchestrator.ports import Desk

MAX_JOBS = 1000
PAGE = 200
UNROUTED = "unmatched"
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class Metrics:
    def __init__(self, version: str, max_jobs: int) -> None:
        self._max_jobs = max_jobs
        self._registry = registry = CollectorRegistry()
        build = Gauge("everstep_build_info", "Always 1; its label says which build.", ["version"], registry=registry)
        build.labels(version).set(1)
        self._jobs = Gauge("everstep_jobs", f"Jobs by state, of the newest {MAX_JOBS}.", ["state"], registry=registry)
        self._nodes = Gauge("everstep_nodes", "Nodes by kind and status.", ["kind", "status"], registry=registry)
        self._step = Gauge("everstep_job_committed_step", "Last committed step.", ["job"], registry=registry)
        self._loss = Gauge("everstep_job_loss", "Loss of the last committed step.", ["job"], registry=registry)
        self._recoveries = Gauge("everstep_job_recoveries", "Recoveries from a fault.", ["job"], registry=registry)
        self._false_alarms = Gauge(
            "everstep_job_false_alarms", "Suspected hangs that were none, of the job's life.", ["job"], registry=registry
        )
        self._requests = Counter(
            "everstep_http_requests_total", "Requests answered.", ["method", "route", "code"], registry=registry
        )
        self._seconds = Histogram(
            "everstep_http_request_seconds", "Request to first byte of the answer.", ["route"], registry=registry
        )
        self.streams = Gauge("everstep_event_stream_clients", "Open event streams.", registry=registry)

    def answered(self, method: str, route: str, code: int, seconds: float) -> None:
        self._requests.labels(method, route, str(code)).inc()
        self._seconds.labels(route).observe(seconds)

    async def render(self, desk: Desk) -> bytes:
        records = await _newest(desk)
        tally = Tally(status_of(record.state) for record in records)
        for status in JobStatus:
            self._jobs.labels(status.value).set(tally[status])
        self._nodes.clear()
        for (kind, node_status), count in Tally((node.kind, node.status.value) for node in await desk.nodes()).items():
            self._nodes.labels(kind, node_status).set(count)
        self._per_job([record for record in records if status_of(record.state) not in TERMINAL_STATUSES][: self._max_jobs])
        return generate_latest(self._registry)

    def _per_job(self, active: Sequence[JobRecord]) -> None:
        for gauge in (self._step, self._loss, self._recoveries, self._false_alarms):
            gauge.clear()
        for record in active:
            self._step.labels(record.id).set(record.committed)
            self._recoveries.labels(record.id).set(sum(item.fault.cause not in RESIZES for item in record.incidents))
            self._false_alarms.labels(record.id).set(record.false_alarms)
            if record.last_answer is not None and record.last_answer.losses:
                self._loss.labels(record.id).set(record.last_answer.loss)


async def _newest(desk: Desk) -> list[JobRecord]:
    records: list[JobRecord] = []
    cursor: str | None = None
    while len(records) < MAX_JOBS:
        page = await desk.list(PAGE, cursor)
        records.extend(page.jobs)
        cursor = page.next_cursor
        if cursor is None:
            break
    return records


class CountRequests:
    """ASGI layer: counts each answer under its route's template."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()

        async def send_counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                path = getattr(scope.get("route"), "path", UNROUTED)
                method = scope["method"] if scope["method"] in METHODS else "other"
                self._metrics.answered(method, path, message["status"], time.perf_counter() - began)
            await send(message)

        await self._app(scope, receive, send_counted)
