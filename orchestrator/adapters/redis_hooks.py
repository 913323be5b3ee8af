"""Webhooks on Redis: whom to tell, what is to be told, and the lease of whoever sends.

How far each job's history was looked at is kept here, so that a restart of anything loses and repeats nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from orchestrator.domain import codec
from orchestrator.domain.errors import Conflict, NotFound
from orchestrator.domain.hooks import Delivery, Hook, Standing
from orchestrator.domain.ids import JobId
from orchestrator.notify.choosing import NodesSeen
from orchestrator.notify.ports import KEPT, MAX_HOOKS, Noted, Unread

from . import redis_hook_scripts as scripts
from . import redis_keys as keys
from .redis_clients import Argument, RedisAddress, RedisClients, status, text, unavailable

NEW_AT_ONCE = 1000
JOBS_AT_ONCE = 250
"""Looked at by one script, which nobody else's commands pass."""
BEGINNING = "0"


class RedisHooks:
    def __init__(self, address: RedisAddress, *, timeout_s: float = 2.0, kept: int = KEPT) -> None:
        self._clients = RedisClients(address, timeout_s)
        self._kept = kept
        self._looked: tuple[Any, ...] = ()
        self._cursor = BEGINNING

    async def close(self) -> None:
        await self._clients.close()

    # --- hooks ------------------------------------------------------------------------------------------------------------

    async def add(self, hook: Hook) -> None:
        outcome, _ = status(await self._clients.write(scripts.ADD, hook.id, codec.dumps(hook), MAX_HOOKS))
        if outcome == "FULL":
            raise too_many()

    async def hooks(self) -> tuple[tuple[Hook, Standing], ...]:
        reads: Any = self._clients.reads
        with unavailable(self._clients.address):
            found, standing = await reads.hgetall(keys.HOOKS), await reads.hgetall(keys.HOOKS_STANDING)
        known = [(codec.loads(Hook, data), _standing(standing.get(id))) for id, data in found.items()]
        return tuple(sorted(known, key=lambda one: (one[0].created_at, one[0].id)))

    async def hook(self, id: str) -> tuple[Hook, Standing]:
        reads: Any = self._clients.reads
        with unavailable(self._clients.address):
            data, standing = await reads.hget(keys.HOOKS, id), await reads.hget(keys.HOOKS_STANDING, id)
        if data is None:
            raise no_hook(id)
        return codec.loads(Hook, data), _standing(standing)

    async def remove(self, id: str) -> None:
        self._require(id, await self._clients.run(self._clients.writes, scripts.REMOVE, id))

    async def pause(self, id: str, why: str, now: float) -> None:
        _, standing = await self.hook(id)
        if standing.paused_at is None:
            paused = replace(standing, paused_at=now, why=why)
            self._require(id, await self._clients.write(scripts.PAUSE, id, codec.dumps(paused)))

    async def resume(self, id: str, now: float) -> None:
        self._require(id, await self._clients.write(scripts.RESUME, id, repr(now)))

    # --- deliveries -------------------------------------------------------------------------------------------------------

    async def put(self, delivery: Delivery) -> None:
        answer = await self._clients.write(scripts.PUT, *_whole(delivery), self._kept)
        self._require(delivery.hook, answer)

    async def deliveries(self, id: str) -> tuple[Delivery, ...]:
        reads: Any = self._clients.reads
        with unavailable(self._clients.address):
            order = await reads.zrevrange(keys.deliveries_order(id), 0, -1)
            found = await reads.hmget(keys.deliveries(id), order) if order else []
        return tuple(codec.loads(Delivery, data) for data in found if data)

    async def delivery(self, id: str, delivery: str) -> Delivery:
        reads: Any = self._clients.reads
        with unavailable(self._clients.address):
            data = await reads.hget(keys.deliveries(id), delivery)
        if data is None:
            raise no_delivery(id, delivery)
        return codec.loads(Delivery, data)

    # --- whoever sends ----------------------------------------------------------------------------------------------------

    async def hold(self, holder: str, ttl_s: float) -> bool:
        return bool(await self._clients.write(scripts.HOLD, holder, int(ttl_s * 1000)))

    async def release(self, holder: str) -> None:
        await self._clients.write(scripts.RELEASE, holder)

    async def unread(self, limit: int) -> Sequence[Unread]:
        """Costs one read of three counters where nothing was written since a look that found nothing."""
        with unavailable(self._clients.address):
            counts: Any = await self._clients.reads.mget([keys.COMMITS, keys.JOBS_MADE, keys.HOOKS_MADE])
        if tuple(counts) == self._looked:
            return ()
        is_whole, found = self._cursor == BEGINNING, dict[JobId, int]()
        while len(found) < limit:
            asked = (self._cursor, JOBS_AT_ONCE, NEW_AT_ONCE)
            cursor, *part = await self._clients.run(self._clients.writes, scripts.UNREAD, *asked)
            found.update((JobId(text(job)), int(after)) for job, after in zip(part[::2], part[1::2], strict=True))
            # The next look goes on there: jobs that are always first with news hide no others.
            self._cursor = text(cursor)
            if self._cursor == BEGINNING:
                break
        self._looked = tuple(counts) if is_whole and self._cursor == BEGINNING and not found else ()
        return [Unread(job=job, after=after) for job, after in found.items()]

    async def nodes_seen(self) -> NodesSeen | None:
        with unavailable(self._clients.address):
            data: Any = await self._clients.reads.get(keys.HOOKS_NODES)
        return codec.loads(NodesSeen, data) if data else None

    async def note(
        self,
        holder: str,
        read: Sequence[tuple[JobId, int | None]],
        deliveries: Sequence[Delivery],
        nodes: NodesSeen | None = None,
    ) -> bool:
        arguments: list[Argument] = [holder, self._kept, codec.dumps(nodes) if nodes is not None else "", len(read)]
        for job, number in read:
            arguments += [job, "" if number is None else number]
        arguments.append(len(deliveries))
        for one in deliveries:
            arguments += _whole(one)
        return status(await self._clients.write(scripts.NOTE, *arguments))[0] == "OK"

    async def due(self, now: float, limit: int, each: int) -> tuple[Delivery, ...]:
        found = await self._clients.run(self._clients.reads, scripts.DUE, repr(now), limit, each)
        return tuple(codec.loads(Delivery, data) for data in found)

    async def tried(self, holder: str, delivery: Delivery, before: Standing, standing: Standing) -> Noted:
        due = "" if delivery.due_at is None else repr(delivery.due_at)
        was = b"" if before == Standing() else codec.dumps(before)
        is_now = b"" if standing == before else codec.dumps(standing)
        about = (holder, delivery.hook, delivery.id, codec.dumps(delivery), due)
        # Once only: where the answer is lost, the next try finds another standing and is made anew.
        answer = await self._clients.run(
            self._clients.writes, scripts.TRIED, *about, was, is_now, int(standing.paused_at is not None)
        )
        return Noted(status(answer)[0])

    def _require(self, id: str, answer: Sequence[bytes]) -> None:
        if status(answer)[0] == "GONE":
            raise no_hook(id)


def too_many() -> Conflict:
    return Conflict(f"there are {MAX_HOOKS} webhooks, the most that are kept; remove some that are not used")


def no_hook(id: str) -> NotFound:
    return NotFound(f"there is no webhook {id}; list the webhooks to see what there is")


def no_delivery(id: str, delivery: str) -> NotFound:
    return NotFound(f"webhook {id} has no delivery {delivery}, or not any more; list its deliveries")


def _standing(data: bytes | None) -> Standing:
    return codec.loads(Standing, data) if data else Standing()


def _whole(one: Delivery) -> list[Argument]:
    due = one.due_at if one.due_at is not None else one.at
    return [one.hook, one.id, repr(due), codec.dumps(one)]
