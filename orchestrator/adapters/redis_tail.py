"""One reader of a job's streams for however many follow it: what it read last is kept for all of them.

A follower that stands within what is kept reads from here; one further back reads the store itself until it is here. Knows
nothing of what an entry means. Where the store fails, all followers are told, and the next one begins anew.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import islice
from typing import Generic, TypeVar

from orchestrator.domain.ids import JobId

T = TypeVar("T")
KEPT = 1000
Read = Callable[[JobId, int], Awaitable[Sequence[tuple[str, T]]]]


class Tail(Generic[T]):
    """begin: the newest entry's number as it is followed from."""

    def __init__(self, begin: int) -> None:
        self.reached = begin
        self.error: Exception | None = None
        self._start = begin
        """Followers that have this one, or a later one, miss nothing of what is kept."""
        self._kept: deque[tuple[str, T]] = deque()
        self._news = asyncio.Event()

    def add(self, items: Sequence[tuple[str, T]]) -> None:
        self._kept.extend(items)
        self.reached = int(items[-1][0])
        while len(self._kept) > KEPT:
            self._start = int(self._kept.popleft()[0])
        self._wake()

    def fail(self, error: Exception) -> None:
        self.error = error
        self._wake()

    def after(self, reached: int) -> Sequence[tuple[str, T]] | None:
        """What is kept beyond `reached`; None where what came next is no longer kept."""
        if reached < self._start:
            return None
        count = 0
        for id, _ in reversed(self._kept):
            if int(id) <= reached:
                break
            count += 1
        return list(islice(self._kept, len(self._kept) - count, None)) if count else []

    async def news(self, reached: int) -> None:
        """Returns once there is something beyond `reached`. Raises what the reader met."""
        while self.reached <= reached:
            if self.error is not None:
                raise self.error
            await self._news.wait()

    def _wake(self) -> None:
        woken, self._news = self._news, asyncio.Event()
        woken.set()


class Tails(Generic[T]):
    """read: entries after a number, at once; wait: until there are any, or for a while; end: the newest one's number."""

    def __init__(
        self, read: Read[T], wait: Callable[[JobId, int], Awaitable[None]], end: Callable[[JobId], Awaitable[int]]
    ) -> None:
        self._read = read
        self._wait = wait
        self._end = end
        self._tails: dict[JobId, tuple[Tail[T], asyncio.Task[None]]] = {}
        self._followers: dict[JobId, int] = {}

    @asynccontextmanager
    async def of(self, job: JobId) -> AsyncIterator[Tail[T]]:
        """Read for as long as anybody follows."""
        self._followers[job] = self._followers.get(job, 0) + 1
        try:
            if not self._is_read(job):
                begin = await self._end(job)
                if not self._is_read(job):  # nobody else has begun meanwhile
                    tail = Tail[T](begin)
                    self._tails[job] = tail, asyncio.create_task(self._run(job, tail))
            yield self._tails[job][0]
        finally:
            self._followers[job] -= 1
            if not self._followers[job]:
                del self._followers[job]
                if job in self._tails:
                    self._tails.pop(job)[1].cancel()

    def _is_read(self, job: JobId) -> bool:
        return job in self._tails and self._tails[job][0].error is None

    async def _run(self, job: JobId, tail: Tail[T]) -> None:
        try:
            while True:
                if items := await self._read(job, tail.reached):
                    tail.add(items)
                else:
                    await self._wait(job, tail.reached)
        except Exception as error:  # also what cannot be read: nobody is left to wait for ever
            tail.fail(error)
