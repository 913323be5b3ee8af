"""Pages of jobs in Redis: which ids come next, in each order, and how a place in it is written.

A place is what the last job of a page is sorted by, and never a count: jobs that come, end or go meanwhile shift nothing.
"""

from __future__ import annotations

import math
from typing import Any

from orchestrator.domain.errors import Refused
from orchestrator.domain.ids import JobId
from orchestrator.ports import Sort

from . import redis_keys as keys
from .redis_clients import text


async def page(reads: Any, limit: int, cursor: str | None, sort: Sort) -> tuple[list[JobId], str | None]:
    """The ids, and the place of the last one where there are more."""
    found = await (_by_end if sort.is_of_finished else _by_number)(reads, limit + 1, cursor, sort.is_descending)
    ids = [id for _, id in found[:limit]]
    if len(found) <= limit or not ids:
        return ids, None
    at = found[limit - 1][0]
    return ids, end_place(at, ids[-1]) if sort.is_of_finished else str(int(at))


async def _by_number(reads: Any, count: int, cursor: str | None, is_descending: bool) -> list[tuple[float, JobId]]:
    """Of submission, one for each job."""
    return await _beyond(reads, keys.JOBS, None if cursor is None else number_of(cursor), count, is_descending)


async def _by_end(reads: Any, count: int, cursor: str | None, is_descending: bool) -> list[tuple[float, JobId]]:
    """Whole ones and archived ones. Many may have ended at one instant: among these the id decides."""
    last = None if cursor is None else read_end_place(cursor)
    found: dict[JobId, float] = {}
    for name in (keys.JOBS_ENDED, keys.JOBS_ARCHIVED):
        beyond = await _beyond(reads, name, last and last[0], count, is_descending)
        # What ended at the same instant as the last of them, or as the place itself, may lie on either side of the cut.
        for edge in {at for at, _ in beyond[-1:]} | ({last[0]} if last else set()):
            beyond += await _at(reads, name, edge)
        found.update((id, at) for at, id in beyond)
    ordered = sorted(((at, id) for id, at in found.items()), reverse=is_descending)
    return [one for one in ordered if last is None or (one < last if is_descending else one > last)][:count]


async def _beyond(reads: Any, name: str, at: float | None, count: int, is_descending: bool) -> list[tuple[float, JobId]]:
    if is_descending:
        start = "+inf" if at is None else f"({at!r}"
        found = await reads.zrevrangebyscore(name, start, "-inf", start=0, num=count, withscores=True)
    else:
        start = "-inf" if at is None else f"({at!r}"
        found = await reads.zrangebyscore(name, start, "+inf", start=0, num=count, withscores=True)
    return [(float(score), JobId(text(id))) for id, score in found]


async def _at(reads: Any, name: str, at: float) -> list[tuple[float, JobId]]:
    return [(at, JobId(text(id))) for id in await reads.zrangebyscore(name, repr(at), repr(at))]


def number_of(id: str) -> int:
    """Of an id of a stream, or a page's cursor. Raises Refused."""
    head = id.removesuffix("-0")
    if not head.isascii() or not head.isdigit() or len(head) > 15:
        raise Refused(f"{id!r} is not an id of this stream; use one that was sent before, or 0 for the beginning")
    return int(head)


def end_place(at: float, id: JobId) -> str:
    return f"{at!r}:{id}"


def read_end_place(cursor: str) -> tuple[float, JobId]:
    """Raises Refused."""
    at, _, id = cursor.partition(":")
    try:
        place = float(at)
    except ValueError:
        place = math.nan
    if not id or not math.isfinite(place):
        raise Refused(f"{cursor!r} is no place in jobs by their end; use a next_cursor that this order gave")
    return place, JobId(id)
