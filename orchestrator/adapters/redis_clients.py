"""Three ways to speak to Redis, because redis-py's one default way writes twice when the server stalls.

reads: idempotent, tried again once. writes: one try; a script makes repeating them harmless, and whoever repeats decides.
waits: blocking reads, with a socket timeout above the block time. Errors leave here as Unavailable.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Connection, ConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import ConstantBackoff, NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from orchestrator.domain.errors import Unavailable

BLOCK_S = 5.0
"""Longest wait of one blocking read."""
Argument = str | bytes | int


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisAddress:
    host: str
    port: int
    password: str | None = None


class _Connection(Connection):
    """Cancellation always ends what waits for it.

    redis-py writes under `asyncio.wait_for`, which before Python 3.12 drops a cancellation that comes as the write ends. A
    loop that reads would then go on for ever: a supervisor that has lost its lease could not end.
    """

    async def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        limit, self.socket_timeout = self.socket_timeout, None
        try:
            async with asyncio.timeout(limit):
                await super().send_packed_command(command, check_health)
        finally:
            self.socket_timeout = limit


class RedisClients:
    """Connects on first use. timeout_s: of one try; an answer that takes longer is Unavailable."""

    def __init__(self, address: RedisAddress, timeout_s: float = 2.0) -> None:
        self.address = address
        self.timeout_s = timeout_s
        self.reads = self._client(timeout_s, Retry(ConstantBackoff(0.05), 1))
        self.writes = self._client(timeout_s, Retry(NoBackoff(), 0))
        self.waits = self._client(BLOCK_S + timeout_s, Retry(NoBackoff(), 0))

    async def run(self, client: Redis, script: str, *arguments: Argument) -> Any:
        """A script's answer; redis-py hashes it once and loads it anew where the server has forgotten it."""
        with unavailable(self.address):
            return await client.register_script(script)(args=list(arguments))

    async def write(self, script: str, *arguments: Argument) -> Any:
        """A script that may be sent twice: once more at once where a connection had gone stale, then Unavailable."""
        try:
            return await self.run(self.writes, script, *arguments)
        except Unavailable as error:
            if not isinstance(error.__cause__, RedisConnectionError):
                raise
        return await self.run(self.writes, script, *arguments)

    async def close(self) -> None:
        for client in (self.reads, self.writes, self.waits):
            await client.aclose()

    def _client(self, timeout_s: float, retry: Retry) -> Redis:
        pool = ConnectionPool(
            connection_class=_Connection,
            host=self.address.host,
            port=self.address.port,
            password=self.address.password,
            socket_timeout=timeout_s,
            socket_connect_timeout=self.timeout_s,
            retry=retry,
            retry_on_error=[],
            max_connections=2000,
            client_name="everstep",
            protocol=2,  # one shape of answers, whatever the client library's version
        )
        return Redis.from_pool(pool)


@contextmanager
def unavailable(address: RedisAddress) -> Iterator[None]:
    try:
        yield
    except (RedisError, OSError, TimeoutError) as error:
        said = str(error) or type(error).__name__
        raise Unavailable(f"Redis at {address.host}:{address.port} did not answer ({said}); see that it runs") from error


def text(data: bytes | str) -> str:
    return data.decode() if isinstance(data, bytes) else data


def status(answer: Sequence[bytes]) -> tuple[str, str]:
    return text(answer[0]), text(answer[1])
