"""What is done to the API while it is measured: a storm of submissions, lists, a fleet of readers; each gives figures."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import signal
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from orchestrator.domain.ids import JobId

from .service import Scribe, Service, a_record, running
from .stats import quantile
from .wire import Connection

FILE: dict[str, Any] = {
    "name": "bench",
    "program": "causal_lm",
    "data": {"files": ["{stdlib}"]},
    "train": {"steps": 10, "micro_batches": 4, "micro_batch_size": 2, "sequence": 64},
}
CONCURRENT = 16
GIVE_UP_S = 60.0
SPREAD = 0.7
"""Of the time in which steps are written: the last of a reader's reconnects is well before its end."""


# --- submissions ---------------------------------------------------------------------------------------------------------


async def submit_rate(service: Service, count: int) -> tuple[float, float, list[float]]:
    """Submissions a second by CONCURRENT clients; p99 in ms; and latencies, s, of one client alone."""
    numbers = itertools.count()

    async def client(seconds: list[float]) -> None:
        connection = service.connection()
        while (number := next(numbers)) < count:
            answer = await connection.request("POST", "/api/v1/jobs", _body(number), {"Idempotency-Key": f"rate-{number}"})
            assert answer.status == 201, answer.body
            seconds.append(answer.seconds)
        connection.close()

    taken: list[float] = []
    began = time.perf_counter()
    await asyncio.gather(*(client(taken) for _ in range(CONCURRENT)))
    rate = count / (time.perf_counter() - began)
    alone, connection = [], service.connection()
    for number in range(100):
        answer = await connection.request("POST", "/api/v1/jobs", _body(number), {"Idempotency-Key": f"alone-{number}"})
        alone.append(answer.seconds)
    connection.close()
    return rate, 1000 * quantile(taken, 0.99), alone


async def storm(service: Service, count: int, kill_every_s: float) -> dict[str, int]:
    """count submissions by clients that try again with the same key, while API and Redis are killed in turn.

    sent: jobs asked for; lost: acknowledged and not there; doubled: there more than once. Judged by the whole list.
    """
    numbers, acknowledged, tries = itertools.count(), {}, Counter[str]()
    over = asyncio.Event()

    async def client() -> None:
        connection = service.connection(5.0)
        while (number := next(numbers)) < count:
            deadline = time.monotonic() + GIVE_UP_S
            while time.monotonic() < deadline:
                tries["requests"] += 1
                try:
                    headers = {"Idempotency-Key": f"storm-{number}"}
                    answer = await connection.request("POST", "/api/v1/jobs", _body(number, storm="yes"), headers)
                except OSError:
                    await asyncio.sleep(random.uniform(0.02, 0.1))
                    continue
                if answer.status in (200, 201):
                    acknowledged[number] = answer.json()["id"]
                    break
                assert answer.status in (429, 503), answer.body
                await asyncio.sleep(random.uniform(0.05, 0.2))
        connection.close()

    async def killer() -> None:
        for victim in itertools.cycle(("api", "api", "redis")):
            with suppress(TimeoutError):
                async with asyncio.timeout(kill_every_s * random.uniform(0.5, 1.5)):
                    await over.wait()
                    return
            tries[f"{victim}_kills"] += 1
            if victim == "api":
                service.stop_api(signal.SIGKILL)
                service.start_api()
                await service.ready()
            else:
                await asyncio.to_thread(service.kill_redis)

    async def clients() -> None:
        await asyncio.gather(*(client() for _ in range(CONCURRENT)))
        over.set()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(killer())
        tasks.create_task(clients())
    there = Counter[str]()
    ids = set()
    async for job in every_job(service, "label=storm%3Dyes&"):
        there[job["labels"]["number"]] += 1
        ids.add(job["id"])
    return {
        "sent": count,
        "acknowledged": len(acknowledged),
        "lost": sum(id not in ids for id in acknowledged.values()),
        "doubled": sum(found - 1 for found in there.values()),
        "requests": tries["requests"],
        "api_kills": tries["api_kills"],
        "redis_kills": tries["redis_kills"],
    }


def _body(number: int, **labels: str) -> bytes:
    return json.dumps({**FILE, "labels": {"number": str(number), **labels}}).encode()


# --- lists ---------------------------------------------------------------------------------------------------------------


async def every_job(service: Service, query: str = "") -> Any:
    connection, cursor = service.connection(60.0), ""
    while True:
        answer = await connection.request("GET", f"/api/v1/jobs?{query}limit=200{cursor}")
        page = answer.json()
        for job in page["jobs"]:
            yield job
        if page["next_cursor"] is None:
            break
        cursor = f"&cursor={page['next_cursor']}"
    connection.close()


async def list_p99_ms(service: Service, count: int) -> float:
    """Of pages of 50 from the newest on, by one client that goes through them and begins again."""
    connection, seconds, cursor = service.connection(30.0), [], ""
    for _ in range(count):
        answer = await connection.request("GET", f"/api/v1/jobs?limit=50{cursor}")
        assert answer.status == 200
        seconds.append(answer.seconds)
        following = answer.json()["next_cursor"]
        cursor = f"&cursor={following}" if following else ""
    connection.close()
    return 1000 * quantile(seconds, 0.99)


# --- readers -------------------------------------------------------------------------------------------------------------


@dataclass
class Reader:
    """One client of a job's events, which leaves every so often and comes back with its last id."""

    last: int = 0
    steps: int = 0
    reconnects: int = 0
    gaps: int = 0
    repeats: int = 0
    lags: list[float] = field(default_factory=list)
    came_at: float = 0.0
    """Wall clock of its latest connection; what was written before that is caught up with."""

    def hear(self, id: str, step: int | None, at: float) -> None:
        number = int(id)
        if number <= self.last:
            self.repeats += 1
            return
        self.last = number
        if step is not None:
            self.gaps += step != self.steps + 1 and self.steps > 0
            self.steps = step
            if at > self.came_at:
                self.lags.append(time.time() - at)


async def fleet(
    service: Service, scribe: Scribe, clients: int, reconnects: int, steps_per_s: float, seconds: float
) -> dict[str, Any]:
    """lag: from a step's instant, before it is written, until a reader has it, of steps that were written while it read."""
    (job,) = await scribe.fill(1, running(), "watched")
    readers = [Reader() for _ in range(clients)]
    over = asyncio.Event()
    path = f"/api/v1/jobs/{job}/events"
    tasks = [asyncio.create_task(_read(service, one, path, reconnects, seconds, over)) for one in readers]
    await asyncio.sleep(min(20.0, clients / 50))
    for one in readers:
        one.lags.clear()
    written = await _write(scribe, job, steps_per_s, seconds)
    await asyncio.gather(*tasks)
    lags = [lag for one in readers for lag in one.lags]
    return {
        "clients": clients,
        "lag_p50_ms": 1000 * quantile(lags, 0.5),
        "lag_p99_ms": 1000 * quantile(lags, 0.99),
        "gaps": sum(one.gaps for one in readers) + sum(one.steps != written for one in readers),
        "repeats": sum(one.repeats for one in readers),
        "reconnects": sum(one.reconnects for one in readers),
        "least_reconnects": min(one.reconnects for one in readers),
        "steps": written - 100,
    }


async def _write(scribe: Scribe, job: JobId, steps_per_s: float, seconds: float) -> int:
    """The last step's number."""
    record, began = a_record(job, running()), time.monotonic()
    for number in itertools.count(1):
        record = await scribe.step(record)
        if time.monotonic() - began >= seconds:
            break
        await asyncio.sleep(max(0.0, began + number / steps_per_s - time.monotonic()))
    await scribe.finish(record)
    return record.committed


async def _read(service: Service, one: Reader, path: str, reconnects: int, seconds: float, over: asyncio.Event) -> None:
    """Until the job has ended. Leaves `reconnects` times, spread over `seconds`."""
    while True:
        connection: Connection = service.connection(60.0)
        one.came_at = 0.0
        leaves_at = time.monotonic() + random.uniform(0.5, 1.5) * SPREAD * seconds / max(1, reconnects)
        try:
            async for told in connection.events(path, str(one.last)):
                one.came_at = one.came_at or time.time()
                data = json.loads(told.data)
                is_step = told.event == "step"
                one.hear(told.id, data["step"] if is_step else None, _instant(data["at"]) if is_step else 0.0)
                one.gaps += told.event == "gap"
                if told.event == "history" and data["status"] == "SUCCEEDED":
                    return
                if one.reconnects < reconnects and time.monotonic() >= leaves_at:
                    one.reconnects += 1
                    break
        except OSError:
            await asyncio.sleep(random.uniform(0.05, 0.3))
        finally:
            connection.close()


def _instant(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


async def sigterm_exit_s(service: Service, scribe: Scribe, streams: int) -> float:
    """With so many streams open that have heard something."""
    (job,) = await scribe.fill(1, running(), "left")
    heard = asyncio.Semaphore(0)

    async def reader() -> None:
        connection = service.connection(60.0)
        with suppress(OSError):
            async for _ in connection.events(f"/api/v1/jobs/{job}/events", "0"):
                heard.release()

    readers = [asyncio.create_task(reader()) for _ in range(streams)]
    for _ in range(streams):
        await heard.acquire()
    took = await asyncio.to_thread(service.stop_api)
    await asyncio.gather(*readers)
    return took


def rounded(value: Any, digits: int = 3) -> Any:
    if isinstance(value, dict):
        return {name: rounded(item, digits) for name, item in value.items()}
    return round(value, digits) if isinstance(value, float) else value
