"""One reader for all who follow a job's events."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from orchestrator.adapters.redis_tail import Tails
from tests.builders import JOB


def test_followers_are_told_of_an_entry_that_cannot_be_read() -> None:
    async def read(job: str, after: int) -> Sequence[tuple[str, str]]:
        raise ValueError("no entry of this release")

    async def wait(job: str, after: int) -> None:
        await asyncio.sleep(3600)

    async def end(job: str) -> int:
        return 0

    async def follow() -> None:
        async with asyncio.timeout(5), Tails[str](read, wait, end).of(JOB) as tail:
            await tail.news(0)

    with pytest.raises(ValueError, match="no entry"):
        asyncio.run(follow())
