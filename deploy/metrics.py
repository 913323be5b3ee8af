"""What a supervisor counts for Prometheus, by looking at what it commits and whom it hears: nothing below it knows.

Counters live as long as the process, as Prometheus expects; what is true now of every job is the API's to say. Labels are
closed vocabularies.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from orchestrator.adapters.processes import write_private
from orchestrator.domain.attic import Retention, Retired
from orchestrator.domain.cluster import Node
from orchestrator.domain.events import Command
from orchestrator.domain.host_events import Envelope
from orchestrator.domain.ids import EffectId, JobId, NodeId, Term
from orchestrator.domain.incident import Incident
from orchestrator.domain.job import JobRecord
from orchestrator.domain.memo import Kept
from orchestrator.domain.requests import CloseHost, HostMessage
from orchestrator.domain.state import Failed, JobStatus, Reforming
from orchestrator.domain.status import RESIZES, TERMINAL_STATUSES, status_of
from orchestrator.ports import Cluster, Commit, HostGone, Loaded, StateStore

from .settings import Places

T = TypeVar("T")
REGISTRY = CollectorRegistry()
PAUSES = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2, 5, 10, 30, 60, 300)
SECONDS = (0.001, 0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 30, 60, 300)
COMMANDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2)
BYTES = tuple(float(1 << power) for power in range(16, 46, 3))
FORGOTTEN_S = 120.0
"""A host that nobody has asked for so long is nobody's."""


def _counter(name: str, words: str, *labels: str) -> Counter:
    return Counter(f"everstep_{name}", words, labels, registry=REGISTRY)


def _histogram(name: str, words: str, buckets: Sequence[float], *labels: str) -> Histogram:
    return Histogram(f"everstep_{name}", words, labels, buckets=buckets, registry=REGISTRY)


TRANSITIONS = _counter("job_transitions_total", "Changes of a job's state.", "to", "cause")
RECOVERIES = _counter("recoveries_total", "Recoveries that ended, by what began them and how.", "cause", "outcome")
RESIZED = _counter("resizes_total", "Changes of size or balance that ended.", "cause")
PAUSE = _histogram("recovery_pause_seconds", "Fault to next committed step, less one undisturbed step.", PAUSES, "cause")
PHASE = _histogram("recovery_phase_seconds", "Where the time of recoveries went.", PAUSES, "phase")
LOST = _counter("steps_lost_total", "Committed steps that were rolled back.")
STEPS = _counter("steps_total", "Committed steps.")
TOKENS = _counter("tokens_total", "Tokens of committed steps.")
STEP = _histogram("step_seconds", "From one committed step to the next of the same generation.", SECONDS)
SAVED_S = _histogram("checkpoint_seconds", "From a checkpoint's first snapshot to its manifest.", SECONDS, "kind")
SAVED_BYTES = _histogram("checkpoint_bytes", "What a checkpoint added to the disk.", BYTES, "kind")
UNSAVED = _counter("checkpoint_failures_total", "Checkpoints that came to nothing.")
ALARMS = _counter("false_alarm_total", "Suspected hangs that were none.")
REDIS_S = _histogram("redis_command_seconds", "Calls of the supervisor to its store.", COMMANDS, "command")
REDIS_ERRORS = _counter("redis_errors_total", "Those that failed.", "command")
EPOCH = Gauge("everstep_lease_epoch", "The term of this supervisor; 0 before it ever held the lease.", registry=REGISTRY)
HELD = Gauge("everstep_lease_held", "Whether this supervisor holds the lease.", registry=REGISTRY)
HEARTBEAT = Gauge(
    "everstep_heartbeat_age_seconds",
    "Since the host that was silent longest was heard; 0: no hosts.",
    registry=REGISTRY,
)


def serve(host: str, port: int, places: Places) -> int:
    """Answer Prometheus on a thread; the port. Where is also written for its file_sd."""
    server, _ = start_http_server(port, addr=host, registry=REGISTRY)
    bound: int = server.server_port
    target = {"targets": [f"{host}:{bound}"], "labels": {"job": "everstep-supervisor", "instance": socket.gethostname()}}
    places.run.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_private(places.run / "prometheus.json", json.dumps([target]))
    return bound


class MeteredStore(StateStore):
    """A store that counts what goes through it."""

    def __init__(self, store: StateStore) -> None:
        self._store = store
        self._known: dict[JobId, JobRecord] = {}

    async def acquire(self, holder: str, ttl_s: float, *, by: str = "", at: float = 0.0) -> Term | None:
        term = await _timed("acquire", self._store.acquire(holder, ttl_s, by=by, at=at))
        if term is not None:
            EPOCH.set(term)
            HELD.set(1)
        return term

    async def renew(self, holder: str, term: Term, ttl_s: float) -> bool:
        kept = await _timed("renew", self._store.renew(holder, term, ttl_s))
        HELD.set(int(kept))
        return kept

    async def release(self, holder: str, term: Term) -> None:
        HELD.set(0)
        await self._store.release(holder, term)

    async def load(self) -> Loaded:
        loaded = await _timed("load", self._store.load())
        self._known = dict(loaded.jobs)
        return loaded

    async def retire(self, term: Term, now: float, retention: Retention) -> Retired:
        return await _timed("retire", self._store.retire(term, now, retention))

    async def over(self, jobs: Collection[JobId]) -> frozenset[JobId]:
        return await _timed("over", self._store.over(jobs))

    async def overtake(self, holder: str, term: Term, above: Term, ttl_s: float) -> Term | None:
        raised = await _timed("overtake", self._store.overtake(holder, term, above, ttl_s))
        if raised is not None:
            EPOCH.set(raised)
        return raised

    async def commit(self, term: Term, commit: Commit) -> int:
        commits = await _timed("commit", self._store.commit(term, commit))
        for job, record in commit.jobs.items():
            count(self._known.get(job), record)
            if status_of(record.state) in TERMINAL_STATUSES:
                self._known.pop(job, None)
            else:
                self._known[job] = record
        for one in commit.steps:
            STEPS.inc()
            TOKENS.inc(one.tokens)
            if one.seconds is not None:
                STEP.observe(one.seconds)
        return commits

    async def commands(self, after: str, wait_s: float) -> Sequence[tuple[str, Command]]:
        # It waits for news; how long says nothing.
        return await self._store.commands(after, wait_s)


class MeteredCluster(Cluster):
    """A cluster that remembers when each host was heard last."""

    def __init__(self, cluster: Cluster, clock: Callable[[], float] = time.monotonic) -> None:
        self._cluster = cluster
        self._clock = clock
        self._heard: dict[tuple[JobId, NodeId], float] = {}
        self._asked: dict[tuple[JobId, NodeId], float] = {}
        HEARTBEAT.set_function(self.oldest_s)

    def oldest_s(self) -> float:
        now = self._clock()
        asked = [key for key, at in self._asked.copy().items() if now - at < FORGOTTEN_S]
        return max((now - self._heard[key] for key in asked if key in self._heard), default=0.0)

    async def nodes(self) -> tuple[Node, ...]:
        return await self._cluster.nodes()

    async def hosts(self) -> tuple[tuple[JobId, NodeId], ...]:
        return await self._cluster.hosts()

    async def ask(self, job: JobId, node: NodeId) -> Kept:
        return await self._cluster.ask(job, node)

    async def call(
        self, job: JobId, node: NodeId, term: Term, effect: EffectId, request: HostMessage, memo: str = ""
    ) -> None:
        await self._cluster.call(job, node, term, effect, request, memo)
        if isinstance(request, CloseHost):
            self._forget(job, node)

    async def poll(
        self, job: JobId, node: NodeId, term: Term, after: int, acked: int, wait_s: float, memo: str = ""
    ) -> tuple[Envelope, ...]:
        key = (job, node)
        self._asked[key] = self._clock()
        self._heard.setdefault(key, self._asked[key])
        try:
            said = await self._cluster.poll(job, node, term, after, acked, wait_s, memo)
        except HostGone:
            self._forget(job, node)
            raise
        self._heard[key] = self._clock()
        return said

    def _forget(self, job: JobId, node: NodeId) -> None:
        self._asked.pop((job, node), None)
        self._heard.pop((job, node), None)


def count(before: JobRecord | None, after: JobRecord) -> None:
    """What has happened between two records of a job."""
    status = status_of(after.state)
    if before is None or status is not status_of(before.state):
        cause = after.state.fault.cause.value if isinstance(after.state, Reforming) else "none"
        TRANSITIONS.labels(status.value, cause).inc()
    if before is None:
        return
    if after.incidents is not before.incidents or status in TERMINAL_STATUSES:
        open_before = {one.number for one in before.incidents if one.pause_s is None}
        new = max((one.number for one in before.incidents), default=0)
        for one in after.incidents:
            if one.number in open_before or one.number > new:
                _count_incident(one, status, isinstance(after.state, Failed))
    ALARMS.inc(max(0, after.false_alarms - before.false_alarms))
    UNSAVED.inc(max(0, after.save_failures - before.save_failures))
    saved, known = after.checkpoint, before.checkpoint
    is_new = saved is not None and (known is None or (saved.step, saved.generation) != (known.step, known.generation))
    if is_new and saved is not None and saved.new_bytes is not None:
        kind = "entry" if saved.depth else "base"
        SAVED_BYTES.labels(kind).observe(saved.new_bytes)
        if saved.seconds:
            SAVED_S.labels(kind).observe(saved.seconds)


def _count_incident(one: Incident, status: JobStatus, has_failed: bool) -> None:
    is_over = one.pause_s is not None
    if not is_over and status not in TERMINAL_STATUSES:
        return
    cause = one.fault.cause.value
    if one.fault.cause in RESIZES:
        RESIZED.labels(cause).inc()
        return
    RECOVERIES.labels(cause, "recovered" if is_over else "failed" if has_failed else "cancelled").inc()
    if one.pause_s is not None:
        PAUSE.labels(cause).observe(max(0.0, one.pause_s))
        LOST.inc(one.rolled_back)
        for phase, seconds in one.phases.items():
            PHASE.labels(phase).observe(max(0.0, seconds))


async def _timed(command: str, call: Awaitable[T]) -> T:
    began = time.perf_counter()
    try:
        return await call
    except Exception:
        REDIS_ERRORS.labels(command).inc()
        raise
    finally:
        REDIS_S.labels(command).observe(time.perf_counter() - began)
