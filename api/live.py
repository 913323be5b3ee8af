"""Everything a dashboard shows, as one stream: jobs and nodes as they change, and what happens to the jobs it watches.

A browser opens few streams to one server over all its tabs, so there is one, and it carries several jobs. States
(`summary`, `job`, `nodes`) are told when they differ from what was told last, so a reader who comes back is given them
anew; what happened (`history`, `step`, `gap`) goes on after where the reader stands in each job. A `pulse` tells silence
from a lost connection.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime

import anyio
from fastapi.sse import format_sse_event
from pydantic import BaseModel

from orchestrator.domain.access import LOCAL, Principal
from orchestrator.domain.errors import EverstepError, NotFound, Refused
from orchestrator.domain.events import HistoryEntry, StepRecord
from orchestrator.domain.ids import JobId, NodeId
from orchestrator.domain.job import JobRecord
from orchestrator.domain.kinds import DeviceKind, table
from orchestrator.ports import Desk, Gap

from . import projections, views
from .metrics import Metrics

log = logging.getLogger(__name__)
PULSE_S = 1.5
LOOK_S = 1.0
"""Jobs and nodes are looked at this often, by however many streams."""
SHOWN_JOBS = 100
"""The newest of those that the reader may see, whose changes are told,"""
PAGE, MAX_PAGES = 200, 10
"""looked for among the newest 1,900 of all: fewer than a desk keeps decoded, or each look would decode them all anew;"""
SELDOM_S = 5.0
"""this often where they are not among the newest hundred."""
SOON_S = 0.1
"""After news of a job its page is told, at most this often."""
FIGURES_S = 5.0
MOVING = {"step": 0, "loss": None, "tokens_per_s": None, "typical_step_s": None, "mfu": None, "goodput": None}
"""With every step; told this often where nothing else has changed."""
MAX_WAITING = 2000
RETRY_MS = 1000
BEGINNING = "0"
Message = tuple[str, BaseModel | list[views.NodeView], str]
"""event, data, and the job whose place it moves, if any."""


def places(text: str) -> dict[JobId, str]:
    """`job-a:12,job-b:0` as {job-a: 12, job-b: 0}. Raises Refused."""
    found: dict[JobId, str] = {}
    for part in filter(None, text.split(",")):
        job, _, after = part.partition(":")
        after = after or BEGINNING
        if not job or not (after.isascii() and after.isdecimal()) or len(after) > 15:
            raise Refused(f"{part[:200]!r} names no place in a job; use JOB or JOB:ID, where ID was sent before")
        found[JobId(job)] = after
    return found


@dataclass(slots=True)
class _Sight:
    """Of jobs, for everybody who may see the same projects. lasts_s: longer where many pages had to be turned."""

    jobs: Mapping[str, views.JobSummary] = field(default_factory=dict)
    looked_at: float = 0.0
    lasts_s: float = 0.0


class Lookout:
    """What jobs and nodes look like now, looked at once for all streams that see the same, and only while there are any."""

    def __init__(self, desk: Desk, kinds: tuple[DeviceKind, ...] = ()) -> None:
        """kinds: of device, besides those that everybody knows."""
        self._desk = desk
        self._kinds = kinds
        self._table = table(kinds)
        self._sights: dict[frozenset[str], _Sight] = {}
        self._nodes: list[views.NodeView] = []
        self._looked_at = 0.0
        self._lock = asyncio.Lock()

    async def look(self, principal: Principal) -> tuple[Mapping[str, views.JobSummary], list[views.NodeView]]:
        """The newest jobs of the principal's projects, and every node. Raises Unavailable."""
        async with self._lock:
            await self._look_at_nodes()
            sight = self._sights.setdefault(frozenset(principal.projects), _Sight())
            if time.monotonic() - sight.looked_at >= sight.lasts_s:
                await self._look_at_jobs(sight, principal)
                self._forget()
            return sight.jobs, self._nodes

    async def mfu(self, record: JobRecord) -> float | None:
        """Raises Unavailable."""
        async with self._lock:
            await self._look_at_nodes()
        return projections.mfu(record, {NodeId(node.id): node.kind for node in self._nodes}, self._table)

    async def _look_at_jobs(self, sight: _Sight, principal: Principal) -> None:
        found: list[JobRecord] = []
        cursor, pages = None, 0
        while len(found) < SHOWN_JOBS and pages < MAX_PAGES:
            page = await self._desk.list(SHOWN_JOBS if not pages else PAGE, cursor)
            found += [record for record in page.jobs if principal.reaches(record.spec.project)]
            cursor, pages = page.next_cursor, pages + 1
            if cursor is None:
                break
        line = {one.job: one for one in await self._desk.queue()}
        sight.jobs = {one.id: projections.summary(one, line.get(one.id)) for one in found[:SHOWN_JOBS]}
        sight.looked_at, sight.lasts_s = time.monotonic(), LOOK_S / 2 if pages == 1 else SELDOM_S

    async def _look_at_nodes(self) -> None:
        if time.monotonic() - self._looked_at < LOOK_S / 2:
            return
        held, cordons = await self._desk.quarantine(), await self._desk.cordons()
        admissions = await self._desk.admissions()
        nodes = await self._desk.nodes()
        self._nodes = projections.nodes(nodes, held, cordons, admissions, self._kinds)
        self._looked_at = time.monotonic()

    def _forget(self) -> None:
        """What nobody looks at any more."""
        now = time.monotonic()
        self._sights = {who: sight for who, sight in self._sights.items() if now - sight.looked_at < 2 * SELDOM_S}


async def live_stream(
    desk: Desk, lookout: Lookout, after: Mapping[JobId, str], metrics: Metrics, principal: Principal = LOCAL
) -> AsyncIterator[bytes]:
    """after: the jobs that are watched, and where the reader stands in each. Ends where the store does not answer."""
    metrics.streams.inc()
    told: asyncio.Queue[Message | None] = asyncio.Queue(MAX_WAITING)
    reached = dict(after)
    tasks = [
        asyncio.ensure_future(_ending(told, part))
        for part in (
            _states(lookout, principal),
            *(part for job, place in after.items() for part in _watch(desk, lookout, job, place)),
        )
    ]
    try:
        yield format_sse_event(retry=RETRY_MS)
        while (message := await told.get()) is not None:
            yield _encode(message, reached)
    finally:
        metrics.streams.dec()
        with anyio.CancelScope(shield=True):
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)


async def _ending(told: asyncio.Queue[Message | None], part: AsyncIterator[Message]) -> None:
    """Put what `part` says into the queue; where it breaks, the stream ends, and its reader comes back."""
    try:
        async for message in part:
            await told.put(message)
    except NotFound:
        pass  # said already: a job that is gone is no longer among the jobs
    except EverstepError as error:
        log.warning("live stream ended: %s", error)
        await told.put(None)
    except Exception:
        # A bug: pulses that go on would say that all is told.
        await told.put(None)
        raise
    finally:
        if isinstance(part, AsyncGenerator):
            await part.aclose()


def _watch(desk: Desk, lookout: Lookout, job: JobId, after: str) -> tuple[AsyncIterator[Message], ...]:
    stirred = asyncio.Event()
    return _happenings(desk, job, after, stirred), _page(desk, lookout, job, stirred)


async def _states(lookout: Lookout, principal: Principal) -> AsyncIterator[Message]:
    jobs: dict[str, views.JobSummary] = {}
    nodes: list[views.NodeView] | None = None
    pulsed_at = 0.0
    while True:
        seen, here = await lookout.look(principal)
        for id, summary in reversed(list(seen.items())):
            if jobs.get(id) != summary:
                yield "summary", summary, ""
        jobs = dict(seen)
        if here != nodes:
            nodes = here
            yield "nodes", here, ""
        if time.monotonic() - pulsed_at >= PULSE_S - LOOK_S / 2:
            pulsed_at = time.monotonic()
            yield "pulse", views.PulseView(at=datetime.now(UTC)), ""
        await asyncio.sleep(LOOK_S)


async def _page(desk: Desk, lookout: Lookout, job: JobId, stirred: asyncio.Event) -> AsyncIterator[Message]:
    """What its page shows, whenever something has happened to it. Figures that move with every step come with summaries."""
    shown: views.JobView | None = None
    shown_at = 0.0
    while True:
        stirred.clear()
        revision = await desk.revision(job)
        record = await desk.get(job)
        found = projections.job(record, revision, time.time(), mfu=await lookout.mfu(record))
        if shown is None or _still(found) != _still(shown) or (found != shown and time.monotonic() - shown_at > FIGURES_S):
            shown, shown_at = found, time.monotonic()
            yield "job", found, ""
        await asyncio.sleep(SOON_S)
        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                await stirred.wait()


def _still(job: views.JobView) -> views.JobView:
    return job.model_copy(update=MOVING)


async def _happenings(desk: Desk, job: JobId, after: str, stirred: asyncio.Event) -> AsyncIterator[Message]:
    items = desk.follow(job, after).__aiter__()
    try:
        async for id, value in items:
            match value:
                case HistoryEntry():
                    stirred.set()
                    yield "history", views.JobEventView(job=job, **dict(projections.event(id, value))), job
                case StepRecord():
                    yield "step", views.JobStepView(job=job, **dict(projections.step(id, value))), job
                case Gap():
                    yield "gap", views.JobGapView(job=job, **dict(projections.gap(id, value))), job
    finally:
        if isinstance(items, AsyncGenerator):
            await items.aclose()


def _encode(message: Message, reached: dict[JobId, str]) -> bytes:
    event, data, job = message
    if job:
        reached[JobId(job)] = data.id  # type: ignore[union-attr]
    id = ",".join(f"{job}:{place}" for job, place in reached.items())
    text = f"[{','.join(one.model_dump_json() for one in data)}]" if isinstance(data, list) else data.model_dump_json()
    return format_sse_event(event=event, id=id or None, data_str=text)
