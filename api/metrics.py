"""What Prometheus reads: jobs by state, requests, open streams, and a few series per job for the newest jobs only.

One registry per app. Labels are closed vocabularies, route templates and capped job ids; nothing a client sends becomes
one.
"""

from __future__ import annotations

import logging
import time
from collections import Counter as Tally
from collections.abc import Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from orchestrator.domain.ids import NodeId
from orchestrator.domain.job import JobRecord
from orchestrator.domain.kinds import KINDS, Kinds
from orchestrator.domain.state import JobStatus
from orchestrator.domain.status import TERMINAL_STATUSES, status_of
from orchestrator.notify.ports import HookStore
from orchestrator.ports import Desk

from . import projections

log = logging.getLogger(__name__)
MAX_JOBS = 1000
PAGE = 200
UNROUTED = "unmatched"
JOB_SERIES: Mapping[str, str] = {
    "committed_step": "Last committed step.",
    "loss": "Loss of the last committed step.",
    "eval_loss": "Loss on held-out text, as it was evaluated last.",
    "recoveries": "Recoveries from a fault.",
    "false_alarms": "Suspected hangs that were none, of the job's life.",
    "tokens_per_second": "While it trains, of its typical step.",
    "step_seconds": "Median of recent undisturbed steps.",
    "step_seconds_spread": "The longest less the shortest of them.",
    "slowest_rank_ratio": "How many times as long as usual the slowest rank takes; 1 where none is slow.",
    "mfu_ratio": "Operations of the model, of what its devices could do by their data sheets.",
    "goodput_ratio": "Of its time since it started, spent on steps that count.",
    "devices": "In the running plan.",
    "checkpoint_age_seconds": "Since the newest checkpoint was committed, or since it started.",
    "checkpoint_step": "The step of the newest checkpoint; 0 for none.",
    "at_risk": "Whether one more failure could cost committed steps.",
}
"""everstep_job_<name>: of the newest open jobs only."""
READS = frozenset({"GET", "HEAD", "OPTIONS"})
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class Metrics:
    def __init__(self, version: str, max_jobs: int, table: Kinds = KINDS) -> None:
        self._max_jobs = max_jobs
        self._table = table
        self._registry = registry = CollectorRegistry()
        build = Gauge("everstep_build_info", "Always 1; its label says which build.", ["version"], registry=registry)
        build.labels(version).set(1)
        self._jobs = Gauge("everstep_jobs", f"Jobs by state, of the newest {MAX_JOBS}.", ["state"], registry=registry)
        self._nodes = Gauge("everstep_nodes", "Nodes by kind and status.", ["kind", "status"], registry=registry)
        self._quarantined = Gauge("everstep_devices_quarantined", "Devices that no plan may use.", registry=registry)
        self._goodput = Gauge(
            "everstep_goodput_ratio",
            "Of the time that open jobs have had since they started, spent on steps.",
            registry=registry,
        )
        self._per_job_gauges = {
            name: Gauge(f"everstep_job_{name}", words, ["job"], registry=registry) for name, words in JOB_SERIES.items()
        }
        self._requests = Counter(
            "everstep_http_requests_total", "Requests answered.", ["method", "route", "code"], registry=registry
        )
        self._seconds = Histogram(
            "everstep_http_request_seconds", "Request to first byte of the answer.", ["route"], registry=registry
        )
        self._webhooks = Gauge("everstep_webhooks", "Webhooks by state.", ["state"], registry=registry)
        self._told = Counter(
            "everstep_webhook_deliveries_total", "Attempts to tell a webhook, by outcome.", ["outcome"], registry=registry
        )
        self.streams = Gauge("everstep_event_stream_clients", "Open event streams.", registry=registry)

    def answered(self, method: str, route: str, code: int, seconds: float) -> None:
        self._requests.labels(method, route, str(code)).inc()
        self._seconds.labels(route).observe(seconds)

    def told(self, outcome: str) -> None:
        """A webhook; delivered, failed for good, or to be retried."""
        self._told.labels(outcome).inc()

    async def render(self, desk: Desk, hooks: HookStore | None = None) -> bytes:
        records = await _newest(desk)
        tally = Tally(status_of(record.state) for record in records)
        for status in JobStatus:
            self._jobs.labels(status.value).set(tally[status])
        self._nodes.clear()
        nodes = await desk.nodes()
        for (kind, node_status), count in Tally((node.kind, node.status.value) for node in nodes).items():
            self._nodes.labels(kind, node_status).set(count)
        self._quarantined.set(sum(one.is_out for one in await desk.quarantine()))
        known = await hooks.hooks() if hooks is not None else ()
        paused = sum(standing.paused_at is not None for _, standing in known)
        self._webhooks.labels("paused").set(paused)
        self._webhooks.labels("active").set(len(known) - paused)
        active = [record for record in records if status_of(record.state) not in TERMINAL_STATUSES]
        self._goodput.set(_goodput(active, time.time()))
        self._per_job(active[: self._max_jobs], {node.id: node.kind for node in nodes}, time.time())
        return generate_latest(self._registry)

    def _per_job(self, active: Sequence[JobRecord], kinds: Mapping[NodeId, str], now: float) -> None:
        for gauge in self._per_job_gauges.values():
            gauge.clear()
        for record in active:
            for name, value in job_series(record, kinds, now, self._table).items():
                if value is not None:
                    self._per_job_gauges[name].labels(record.id).set(value)


def job_series(record: JobRecord, kinds: Mapping[NodeId, str], now: float, table: Kinds = KINDS) -> dict[str, float | None]:
    """One value for each of JOB_SERIES; None where nobody knows."""
    shown = projections.job(record, 0, now)
    answer = record.last_answer
    saves = record.spec.checkpoint.every != 0
    since = record.checkpoint.at if record.checkpoint and record.checkpoint.at else record.started_at
    slow = [one.factor for one in record.stragglers.values() if one.is_slow]
    steps = sorted(record.recent_step_s)
    return {
        "committed_step": record.committed,
        "loss": answer.loss if answer is not None and answer.losses else None,
        "eval_loss": shown.evaluation.loss if shown.evaluation else None,
        "recoveries": shown.recoveries,
        "false_alarms": record.false_alarms,
        "tokens_per_second": shown.tokens_per_s or 0.0,
        "step_seconds": record.typical_step_s,
        "step_seconds_spread": steps[-1] - steps[0] if len(steps) > 1 else None,
        "slowest_rank_ratio": max([1.0, *slow]),
        "mfu_ratio": projections.mfu(record, kinds, table),
        "goodput_ratio": shown.goodput.share if shown.goodput else None,
        "devices": len(shown.plan.seats) if shown.plan and shown.status == JobStatus.RUNNING else 0,
        "checkpoint_age_seconds": max(0.0, now - since) if saves and since is not None else None,
        "checkpoint_step": record.checkpoint.step if record.checkpoint else 0,
        "at_risk": int(bool(record.at_risk)),
    }


def _goodput(active: Sequence[JobRecord], now: float) -> float:
    """1 where nothing has started."""
    trained = wanted = 0.0
    for record in active:
        spent = projections.goodput(record, now)
        if spent.share is not None and spent.share > 0:
            trained += spent.causes["training"]
            wanted += spent.causes["training"] / spent.share
    return trained / wanted if wanted else 1.0


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
        has_answered = False

        def count(code: int) -> None:
            path = getattr(scope.get("route"), "path", UNROUTED)
            method = scope["method"] if scope["method"] in METHODS else "other"
            seconds = time.perf_counter() - began
            self._metrics.answered(method, path, code, seconds)
            _tell(scope, method, path, code, seconds)

        async def send_counted(message: Message) -> None:
            nonlocal has_answered
            if message["type"] == "http.response.start":
                has_answered = True
                count(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, send_counted)
        except Exception:
            # A bug: what answers it is further out than this.
            if not has_answered:
                count(500)
            raise


def _tell(scope: Scope, method: str, route: str, code: int, seconds: float) -> None:
    """Of what changes something, a line; of what went wrong here, a warning; of reading, one at the level of debugging."""
    level = logging.WARNING if code >= 500 else logging.DEBUG if method in READS else logging.INFO
    if log.isEnabledFor(level):
        job = scope.get("path_params", {}).get("job_id")
        request_id = scope.get("state", {}).get("request_id")
        said = {"method": method, "route": route, "code": code, "seconds": round(seconds, 6), "request_id": request_id}
        log.log(level, "request", extra=said | ({"job": job} if job else {}))
