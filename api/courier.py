"""Whoever sends webhooks: looks at what has happened, writes down whom to tell, and tells them until they have heard.

Each API process has one, and a lease in the store says which of them is at work. What was looked at and what is to be sent
are in the store, so a process that ends in the middle leaves nothing out; what it had sent and not written down is sent
once more, under the same id. It refuses to know what is worth telling, when to try again and which address is allowed:
orchestrator/notify decides.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets as randomness
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace

import anyio

from orchestrator.domain.errors import EverstepError, NotFound, Refused, Unavailable
from orchestrator.domain.events import HistoryEntry
from orchestrator.domain.hooks import Attempt, Delivery, Fate, Hook
from orchestrator.domain.ids import JobId
from orchestrator.notify import choosing, retrying, signing
from orchestrator.notify.ports import HookSecrets, HookStore, Noted, Sender, Unread
from orchestrator.notify.retrying import Patience
from orchestrator.ports import Desk

from .redaction import redacted_text

log = logging.getLogger(__name__)
LEASE_S = 6.0
TURN_S = 1.0
"""Between two looks; what has happened is told within about this."""
JOBS_AT_ONCE = 100
ENTRIES_AT_ONCE = 200
MAX_FLYING = 32
"""Messages under way,"""
MAX_FLYING_EACH = 4
"""and to one hook: a slow receiver holds up nobody else."""
HEADERS = {"Content-Type": "application/json", "User-Agent": "everstep-webhooks/1"}


@dataclass(slots=True)
class Courier:
    """clock: seconds since the epoch. told: what became of an attempt, for metrics."""

    desk: Desk
    store: HookStore
    hook_secrets: HookSecrets
    sender: Sender
    patience: Patience = Patience()
    clock: Callable[[], float] = time.time
    chance: Callable[[], float] = random.random
    told: Callable[[str], None] = lambda outcome: None
    holder: str = field(default_factory=lambda: randomness.token_hex(8))
    _flying: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _each: Counter[str] = field(default_factory=Counter)
    _trouble: str = ""

    async def run(self) -> None:
        """Until cancelled; then the lease is free at once."""
        try:
            while True:
                try:
                    await self.turn()
                    self._say("")
                except EverstepError as error:
                    self._say(str(error))
                except Exception as error:
                    # A bug. Nobody else would send what comes after it, so the next turn is tried.
                    self._say(f"{type(error).__name__}: {error}", error)
                await asyncio.sleep(TURN_S)
        finally:
            with anyio.CancelScope(shield=True):
                await self._stop()

    async def turn(self) -> bool:
        """Look once, and send what is due; False where another is at work, or nobody is to be told. Raises Unavailable."""
        if not await self.store.hold(self.holder, LEASE_S):
            return False
        hooks = await self.store.hooks()
        await self._look([hook for hook, standing in hooks if standing.paused_at is None])
        await self._send_due({hook.id: hook for hook, _ in hooks})
        return True

    async def settled(self) -> None:
        """Once nothing is under way."""
        while self._flying:
            await asyncio.wait(self._flying.values())

    # --- looking ----------------------------------------------------------------------------------------------------------

    async def _look(self, hooks: list[Hook]) -> None:
        now = self.clock()
        read: list[tuple[JobId, int | None]] = []
        found: list[choosing.News] = []
        for one in await self.store.unread(JOBS_AT_ONCE):
            reached, news = await self._read(one)
            read.append((one.job, reached))
            found += news
        before = await self.store.nodes_seen()
        nodes, more = choosing.of_nodes(before, await self.desk.nodes(), await self.desk.admissions(), now)
        told = [choosing.delivery(hook, one, now) for one in found + more for hook in hooks if choosing.wants(hook, one)]
        if read or told or nodes != before:
            await self.store.note(self.holder, read, told, nodes if nodes != before else None)

    async def _read(self, one: Unread) -> tuple[int | None, list[choosing.News]]:
        """How far that is, None to its end; and what there is to tell."""
        try:
            record = await self.desk.get(one.job)
            entries = await self.desk.history(one.job, str(one.after), ENTRIES_AT_ONCE)
        except NotFound:
            return None, []
        found = []
        for id, entry in entries:
            if isinstance(entry, HistoryEntry):
                # Covered where it was said; once more here, because this leaves the house.
                shown = replace(entry, message=redacted_text(entry.message))
                if (news := choosing.of_entry(id, shown, record)) is not None:
                    found.append(news)
        # Nothing where it was put into the archive before it was looked at.
        is_over = not entries or any(isinstance(one, HistoryEntry) and one.type == choosing.ENDED for _, one in entries)
        return (None if is_over else int(entries[-1][0])), found

    # --- sending ----------------------------------------------------------------------------------------------------------

    async def _send_due(self, hooks: dict[str, Hook]) -> None:
        # Those that fly are due until it is written down what became of them, so more are asked for than may fly.
        for delivery in await self.store.due(self.clock(), 2 * MAX_FLYING + len(hooks), MAX_FLYING_EACH):
            hook, key = hooks.get(delivery.hook), f"{delivery.hook}/{delivery.id}"
            if hook is None or key in self._flying or self._each[hook.id] >= MAX_FLYING_EACH:
                continue
            if len(self._flying) >= MAX_FLYING:
                return
            self._each[hook.id] += 1
            self._flying[key] = task = asyncio.create_task(self._send(hook, delivery), name=f"webhook {key}")
            task.add_done_callback(lambda task, key=key, id=hook.id: self._landed(task, key, id))  # type: ignore[misc]

    def _landed(self, task: asyncio.Task[None], key: str, hook: str) -> None:
        del self._flying[key]
        self._each[hook] -= 1
        if not task.cancelled() and (error := task.exception()) is not None:
            # What was not written down is due still, and is tried again.
            self._say(str(error))

    async def _send(self, hook: Hook, delivery: Delivery) -> None:
        attempt = await self._attempt(hook, delivery)
        now, chance, noted = self.clock(), self.chance(), Noted.CHANGED
        while noted is Noted.CHANGED:
            try:
                _, before = await self.store.hook(hook.id)
            except NotFound:
                return  # removed meanwhile, with all that was to be told to it
            after, standing = retrying.tried(delivery, before, attempt, self.patience, now, chance)
            noted = await self.store.tried(self.holder, after, before, standing)
        if noted is Noted.OK:
            self.told("retried" if after.fate is Fate.PENDING else after.fate.value)
            if standing.paused_at is not None and before.paused_at is None:
                log.warning("webhook %s is paused: %s", hook.id, standing.why)

    async def _attempt(self, hook: Hook, delivery: Delivery) -> Attempt:
        now, body = self.clock(), delivery.body.encode()
        try:
            secret = await anyio.to_thread.run_sync(self.hook_secrets.get, hook.id)
            signed = signing.headers(secret, delivery.id, int(now), body)
        except (Refused, ValueError) as error:
            return Attempt(at=now, seconds=0.0, error=str(error))
        return await self.sender.send(hook.url, HEADERS | signed, body)

    # ----------------------------------------------------------------------------------------------------------------------

    async def _stop(self) -> None:
        tasks = list(self._flying.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        with suppress(Unavailable):
            await self.store.release(self.holder)

    def _say(self, trouble: str, bug: Exception | None = None) -> None:
        """Once, when it changes."""
        if trouble and trouble != self._trouble:
            log.warning("webhooks wait: %s", trouble, exc_info=bug)
        self._trouble = trouble
