"""How the service holds under load, on a real Redis that syncs every write before it answers.

    python -m benchmarks.api --json [--scale 0.05] [--only submits,list,sse,storm,sigterm,overload,cancel,page,ray]

--scale makes counts smaller; the figures are those of scale 1. Load is made on the same machine, so it pays for both sides.
The last line of output is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from api.client import Client
from deploy.local import NodeSpec, up
from orchestrator.adapters.embedded_redis import EmbeddedRedis
from orchestrator.domain.state import Queued, Succeeded

from . import loads, overload
from .cluster import end_in_good_order, say
from .ray_jobs import RayJobs
from .service import Service, a_scribe, a_service
from .stats import quantile

PARTS = ("submits", "list", "sse", "storm", "sigterm", "overload", "cancel", "page", "ray")
CANCEL_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    submits: int
    jobs: int
    clients: int
    reconnects: int
    sse_s: float
    storm: int
    cancels: int
    overload_s: float

    @classmethod
    def of(cls, scale: float) -> Sizes:
        def some(whole: float, least: float = 1) -> int:
            return int(max(least, whole * scale))

        return cls(
            submits=some(2000, 100),
            jobs=some(10_000, 100),
            clients=some(500, 10),
            reconnects=some(50, 3),
            sse_s=float(some(300, 15)),
            storm=some(10_000, 200),
            cancels=some(2000, 20),
            overload_s=float(some(8, 2)),
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="accepted for likeness: the result is JSON in any case")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--only", default=",".join(PARTS))
    asked = parser.parse_args()
    wanted = set(asked.only.split(","))
    if wanted - set(PARTS):
        parser.error(f"--only takes {', '.join(PARTS)}")
    end_in_good_order()
    sizes = Sizes.of(asked.scale)
    found: dict[str, Any] = {"scale": asked.scale}
    if wanted & {"submits", "list", "sse", "storm", "sigterm", "ray"}:
        found |= asyncio.run(_alone(sizes, wanted))
    if "overload" in wanted:
        found["overload"] = asyncio.run(_overloaded(sizes))
    if wanted & {"cancel", "page"}:
        found |= _whole(sizes, wanted)
    found["is_whole"] = asked.scale == 1.0 and wanted == set(PARTS)
    print(json.dumps(loads.rounded(found)), flush=True)
    return 0 if is_well(found) else 1


def is_well(found: dict[str, Any]) -> bool:
    """What no load may do to it."""
    sse, submits = found.get("sse", {}), found.get("submits", {})
    return not any((sse.get("gaps"), sse.get("repeats"), submits.get("lost"), submits.get("doubled")))


# --- the API and Redis alone ----------------------------------------------------------------------------------------------


async def _alone(sizes: Sizes, wanted: set[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with a_service() as service:
        async with a_scribe(service) as scribe:
            service.start_api()
            await service.ready()
            taking = asyncio.create_task(scribe.take_up())
            try:
                alone: list[float] = []
                if wanted & {"submits", "ray"}:
                    rate, p99, alone = await loads.submit_rate(service, sizes.submits)
                    found |= {"submits_per_s": rate, "submit_p99_ms": p99, "submit_alone_p50_ms": 1000 * median(alone)}
                    say(f"{rate:.0f} submissions a second, p99 {p99:.1f} ms")
                if "ray" in wanted:
                    found |= await asyncio.to_thread(_ray, median(alone))
                if "list" in wanted:
                    await scribe.fill(sizes.jobs, Succeeded(at=time.time()), "listed")
                    found["list_p99_ms_10k"] = await loads.list_p99_ms(service, 300)
                    say(f"a page of {sizes.jobs} jobs: p99 {found['list_p99_ms_10k']:.1f} ms")
                if "sse" in wanted:
                    found["sse"] = await loads.fleet(
                        service, scribe, sizes.clients, sizes.reconnects, steps_per_s=5.0, seconds=sizes.sse_s
                    )
                    say(f"event streams: {loads.rounded(found['sse'])}")
                if "storm" in wanted:
                    found["submits"] = await loads.storm(service, sizes.storm, kill_every_s=4.0)
                    say(f"submissions while servers are killed: {found['submits']}")
                if "sigterm" in wanted:
                    found["sigterm_exit_s"] = await loads.sigterm_exit_s(service, scribe, 100)
                    say(f"SIGTERM with 100 streams open: {found['sigterm_exit_s']:.1f} s")
            finally:
                taking.cancel()
                await asyncio.wait({taking})
    return found


async def _overloaded(sizes: Sizes) -> dict[str, Any]:
    """A service of its own, where a token may ask less than this machine can."""
    with a_service() as service:
        async with a_scribe(service) as scribe:
            allowed = overload.ALLOWED_PER_S
            service.start_api(f"api.requests_per_s={allowed:g}", f"api.burst={allowed:g}")
            await service.ready()
            await scribe.fill(min(sizes.jobs, 1000), Succeeded(at=time.time()), "listed")
            found = await overload.refused(service, sizes.overload_s)
    say(f"a token asks {overload.OVERLOAD} times what it may: {loads.rounded(found)}")
    return found


def _ray(ours_s: float) -> dict[str, Any]:
    """Our latency over Ray's, of one client that submits one job after the other."""
    with RayJobs() as ray:
        theirs = ray.submit_latencies_s(20)
    say(f"submission: {1000 * ours_s:.1f} ms, Ray Jobs {1000 * median(theirs):.1f} ms")
    return {"ray_jobs_submit_ratio": ours_s / median(theirs), "ray_jobs_submit_p50_ms": 1000 * median(theirs)}


# --- with a supervisor, on Ray --------------------------------------------------------------------------------------------


def _whole(sizes: Sizes, wanted: set[str]) -> dict[str, Any]:
    """A cluster that finds jobs: most of them over, some that wait for devices there are not."""
    found: dict[str, Any] = {}
    with TemporaryDirectory(prefix="everstep-bench-", ignore_cleanup_errors=True) as folder:
        asyncio.run(_prepare(Path(folder), sizes))
        cluster = up(Path(folder), [NodeSpec("cpu", 1)], say=say)
        try:
            with Client(cluster.url, retry_s=30, timeout_s=60) as client:
                if "page" in wanted:
                    found["page_ready_s_10k"] = _page_ready_s(client)
                    say(f"the page is ready after {found['page_ready_s_10k']:.2f} s")
                if "cancel" in wanted:
                    took, p99 = _bulk_cancel(client, sizes.cancels)
                    found |= {"bulk_cancel_2000_s": took, "bulk_cancel_list_p99_ms": p99}
                    say(f"{sizes.cancels} jobs cancelled in {took:.1f} s; lists of 200 meanwhile: p99 {p99:.0f} ms")
        finally:
            cluster.down()
    return found


async def _prepare(state_dir: Path, sizes: Sizes) -> None:
    service = Service(state_dir)
    EmbeddedRedis(state_dir).start()
    try:
        async with a_scribe(service) as scribe:
            await scribe.fill(sizes.jobs, Succeeded(at=time.time()), "over")
            await scribe.fill(sizes.cancels, Queued(reason="needs 4096 devices"), "waits")
    finally:
        service.stop()


def _bulk_cancel(client: Client, count: int) -> tuple[float, float]:
    """Seconds from asking until every one of them is over, and the p99 of lists that were asked for meanwhile, in ms."""
    began, taken = time.monotonic(), list[float]()
    asked = client.to_many("cancel", state=["PENDING"])
    if asked.count != count:
        raise RuntimeError(f"{asked.count} of {count} jobs were there to be cancelled")
    while time.monotonic() - began < CANCEL_S:
        # The newest were written last: those that wait.
        if all(job.status == "CANCELLED" for job in _newest(client, count, taken)):
            return time.monotonic() - began, 1000 * quantile(taken, 0.99)
        time.sleep(0.25)
    raise RuntimeError(f"{count} jobs were not cancelled within {CANCEL_S:g} s")


def _newest(client: Client, count: int, taken: list[float]) -> Any:
    """taken: what each page took, s, is added to it."""
    cursor: str | None = None
    while count > 0:
        began = time.monotonic()
        page = client.jobs(limit=min(200, count), cursor=cursor)
        taken.append(time.monotonic() - began)
        yield from page.jobs
        count, cursor = count - len(page.jobs), page.next_cursor


def _page_ready_s(client: Client) -> float:
    """From the first request of a browser that has never been here until the newest job can be read; the median of 5."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium")
    if chromium is None:
        raise RuntimeError("there is no chromium; apt-get install chromium")
    address: Callable[[], str] = getattr(client, "login_link", lambda: f"{client.base_url}/")
    newest = client.jobs(limit=1).jobs[0]
    taken = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for _ in range(5):
            context = browser.new_context()
            page, link = context.new_page(), address()
            began = time.monotonic()
            page.goto(link)
            page.get_by_text(newest.id).first.wait_for(timeout=60_000)
            taken.append(time.monotonic() - began)
            context.close()
        browser.close()
    return median(taken)


if __name__ == "__main__":
    sys.exit(main())
