"""One client's view of one job's stream, as server-sent events: ids to resume by, pings, a `gap`, and an end.

The desk's stream never ends by itself; this one ends after the job's terminal event, or when a resumed reader had
already seen it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator

import anyio
from fastapi.sse import KEEPALIVE_COMMENT, format_sse_event

from orchestrator.domain.errors import EverstepError
from orchestrator.domain.events import HistoryEntry, StepRecord
from orchestrator.domain.ids import JobId
from orchestrator.domain.status import TERMINAL_STATUSES, status_of
from orchestrator.ports import Desk, Gap

from . import projections
from .metrics import Metrics
from .settings import ApiSettings

log = logging.getLogger(__name__)
RETRY_MS = 1000
Item = tuple[str, HistoryEntry | StepRecord | Gap]


async def event_stream(desk: Desk, job: JobId, after: str, settings: ApiSettings, metrics: Metrics) -> AsyncIterator[bytes]:
    """`event:` is `history`, `step` or `gap`; `data:` the JSON of EventView, StepView or GapView."""
    metrics.streams.inc()
    items = desk.follow(job, after).__aiter__()
    pending = asyncio.ensure_future(_next(items))
    over, silent_s = False, 0.0
    try:
        yield format_sse_event(retry=RETRY_MS)
        while True:
            done, _ = await asyncio.wait({pending}, timeout=settings.idle_check_s)
            if done:
                item = pending.result()
                if item is None:
                    return
                silent_s = 0.0
                yield encode(item)
                if is_last(item):
                    return
                pending = asyncio.ensure_future(_next(items))
            elif over:
                # Over before this wait began, and a whole wait without a word: nothing is left to say.
                return
            else:
                over = status_of((await desk.get(job)).state) in TERMINAL_STATUSES
                silent_s += settings.idle_check_s
                if silent_s >= settings.ping_s:
                    silent_s = 0.0
                    yield KEEPALIVE_COMMENT
    except EverstepError as error:
        # The answer has begun, so it can only end; the reader comes back with its last id.
        log.warning("event stream of %s ended: %s", job, error)
    finally:
        metrics.streams.dec()
        # A client that leaves cancels this; what reads the store is still ended properly.
        with anyio.CancelScope(shield=True):
            pending.cancel()
            await asyncio.wait({pending})
            if isinstance(items, AsyncGenerator):
                await items.aclose()


def encode(item: Item) -> bytes:
    id, value = item
    match value:
        case HistoryEntry():
            return format_sse_event(event="history", id=id, data_str=projections.event(id, value).model_dump_json())
        case StepRecord():
            return format_sse_event(event="step", id=id, data_str=projections.step(id, value).model_dump_json())
        case Gap():
            return format_sse_event(event="gap", id=id, data_str=projections.gap(id, value).model_dump_json())


def is_last(item: Item) -> bool:
    value = item[1]
    return isinstance(value, HistoryEntry) and value.status in TERMINAL_STATUSES


async def _next(items: AsyncIterator[Item]) -> Item | None:
    return await anext(items, None)
