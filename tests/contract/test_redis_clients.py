"""What is asked of Redis can be given up at any moment, and then is."""

from __future__ import annotations

import asyncio
from pathlib import Path

from orchestrator.adapters.embedded_redis import EmbeddedRedis
from orchestrator.adapters.redis_store import RedisStore

MOMENTS = 40
"""Turns of the loop that a request is left; it is on its way and waits for its answer long before the last."""
AT_ONCE_S = 30.0


def test_a_blocked_read_that_is_given_up_at_any_moment_ends(tmp_path: Path) -> None:
    redis = EmbeddedRedis(tmp_path)
    redis.start()

    async def whole() -> None:
        store = RedisStore(redis.address)
        await store.load()
        for moment in range(MOMENTS):
            reading = asyncio.create_task(store.commands("0", 4 * AT_ONCE_S))
            for _ in range(moment):
                await asyncio.sleep(0)
            reading.cancel()
            await asyncio.wait({reading}, timeout=AT_ONCE_S)
            assert reading.cancelled(), f"after {moment} turns of the loop it went on"
        await store.close()

    try:
        asyncio.run(whole())
    finally:
        redis.stop()
