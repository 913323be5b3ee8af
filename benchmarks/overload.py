"""One who asks ten times what it may, and what others notice of that."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections import Counter
from typing import Any

from .loads import CONCURRENT
from .service import Service
from .stats import quantile

ALLOWED_PER_S = 100.0
"""What a token may ask in the service that is overloaded: OVERLOAD times that can be made on the machine it runs on."""
OVERLOAD = 10


async def refused(service: Service, seconds: float) -> dict[str, Any]:
    """Lists of 50 jobs by one who asks now and then, alone and while another token asks OVERLOAD times what it may."""
    owner = service.connection(30.0)
    answer = await owner.request("POST", "/api/v1/tokens", json.dumps({"name": "greedy", "roles": ["viewer"]}).encode())
    assert answer.status == 201, answer.body
    greedy, statuses, over = answer.json()["token"], Counter[int](), asyncio.Event()

    async def lists() -> float:
        taken, until = [], time.monotonic() + seconds
        while time.monotonic() < until:
            answer = await owner.request("GET", "/api/v1/jobs?limit=50")
            assert answer.status == 200, answer.body
            taken.append(answer.seconds)
            await asyncio.sleep(0.02)
        return 1000 * quantile(taken, 0.99)

    async def asks(share: float, every_s: float) -> None:
        connection, began = service.connection(30.0, greedy), time.monotonic() + share * every_s
        for number in itertools.count():
            await asyncio.sleep(max(0.0, began + number * every_s - time.monotonic()))
            if over.is_set():
                break
            statuses[(await connection.request("GET", "/api/v1/jobs?limit=50")).status] += 1
        connection.close()

    quiet, before_mb = await lists(), service.api_mb
    every_s = CONCURRENT / (OVERLOAD * ALLOWED_PER_S)
    asking = asyncio.gather(*(asks(number / CONCURRENT, every_s) for number in range(CONCURRENT)))
    await asyncio.sleep(1.0)
    loaded, after_mb = await lists(), service.api_mb
    over.set()
    await asking
    owner.close()
    return {
        "quiet_p99_ms": quiet,
        "p99_ms": loaded,
        "asked_per_s": sum(statuses.values()) / (seconds + 1.0),
        "answered": statuses[200],
        "refused": statuses[429],
        "failed": sum(count for status, count in statuses.items() if status >= 500),
        "grew_mb": after_mb - before_mb,
    }
