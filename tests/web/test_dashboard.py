"""What people do in the browser, with the eyes and the keyboard of a browser: submit, watch, kill, scale, lose the server.

The tests are one story, in order; the job that the first one submits is there for the others.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
from playwright.sync_api import BrowserContext, Page, expect

from api.client import Client
from api.client.credentials import headers_for
from deploy.keeper import API
from deploy.local import LocalCluster
from deploy.settings import Places
from tests.served import eventually
from tests.tiny_job import TEXT, TinyJob

pytestmark = pytest.mark.timeout(300)
FOREVER = 1_000_000


@pytest.fixture(scope="module")
def job(client: Client) -> TinyJob:
    """The one that was submitted by hand."""
    found = next(client.all_jobs())
    return TinyJob(client, found.id)


def test_a_job_is_submitted_watched_through_a_recovery_and_scaled(
    page: Page, client: Client, tmp_path_factory: pytest.TempPathFactory
) -> None:
    page.goto("/")
    page.get_by_role("button", name="Submit a job").first.click()
    file = _a_file(tmp_path_factory.mktemp("text"))
    page.get_by_label("Job file, YAML or JSON").fill(file.replace(str(FOREVER), "many"))
    page.get_by_role("button", name="Submit", exact=True).click()
    expect(page.get_by_role("alert")).to_contain_text("train.steps")
    page.get_by_label("Job file, YAML or JSON").fill(file)
    page.get_by_role("button", name="Submit", exact=True).click()
    expect(page).to_have_url(re.compile(r"/jobs/job-\w+$"))
    job = TinyJob(client, page.url.rpartition("/")[2])
    expect(page.get_by_role("heading", level=1)).to_contain_text("running")
    expect(page.get_by_role("img", name=re.compile("^Loss: from"))).to_be_visible()

    page.get_by_role("link", name="Cluster map").click()
    expect(page.get_by_role("heading", name=re.compile(r"Generation \d+: tp1 × pp1"))).to_be_visible()
    page.get_by_role("img", name=re.compile("Devices of 3 nodes")).press("ArrowRight")
    expect(page.locator(".chosen")).to_contain_text("trains: rank")

    victim = "a100-2"
    before = job.trains_where(lambda nodes: victim in nodes)
    page.get_by_role("link", name="Nodes").click()
    page.get_by_role("button", name=f"Kill {victim}").click()
    page.get_by_role("dialog").get_by_role("button", name="Kill").click()
    expect(page.locator("tr", has_text=victim).get_by_text("lost")).to_be_visible()
    page.goto(f"/jobs/{job.id}/incidents")
    recovery = page.locator(".incident", has_text=re.compile(r"Recovery \d+: node lost"))
    expect(recovery.locator(".pause")).to_contain_text("pause")
    expect(recovery.get_by_role("table", name="Phases of the pause")).to_contain_text("first step")
    expect(recovery).to_contain_text("no committed step lost")
    page.get_by_role("link", name="Cluster map").click()
    expect(page.locator(".legend")).to_contain_text("lost")
    assert job.incidents_since(before)

    page.get_by_role("button", name="Scale").click()
    page.get_by_role("spinbutton", name="Devices").fill("2")
    page.get_by_role("dialog").get_by_role("button", name="Scale").click()
    expect(page.locator(".reason").first).to_contain_text("on 2 devices")
    page.get_by_role("link", name="Events and logs").click()
    expect(page.locator(".events li").first).to_be_visible()


def test_a_lost_server_is_said_and_what_it_did_meanwhile_is_caught_up(
    page: Page, cluster: LocalCluster, client: Client, job: TinyJob
) -> None:
    page.goto(f"/jobs/{job.id}")
    expect(page.locator(".link")).to_have_text("live")
    server = Places(cluster.state_dir).process(API)
    assert server is not None
    before = job.view().step
    os.kill(server.pid, signal.SIGSTOP)  # its connections stay open, and nothing comes
    try:
        expect(page.get_by_role("alert")).to_contain_text("Connection lost")
        expect(page.locator(".link")).to_have_text("stale")
    finally:
        os.kill(server.pid, signal.SIGCONT)
    expect(page.locator(".link")).to_have_text("live")
    expect(page.get_by_role("alert")).to_have_count(0)
    page.get_by_text(re.compile("steps as a table")).click()
    trained = job.view().step
    assert trained > before, "training went on without the server"
    eventually(lambda: max(_steps(page), default=0) >= trained, 60)
    steps = _steps(page)
    assert steps == list(range(steps[0], steps[0] - len(steps), -1)), "none is missing"


def test_eight_tabs_are_told_over_one_stream(tabs: BrowserContext, cluster: LocalCluster, job: TinyJob) -> None:
    paths = ["/", "/nodes", f"/jobs/{job.id}", f"/jobs/{job.id}/map"] * 2
    pages = [tabs.new_page() for _ in paths]
    for one, path in zip(pages, paths, strict=True):
        one.goto(path)
    for one in pages:
        expect(one.locator(".link")).to_have_text("live")
    with httpx2.Client(base_url=cluster.url, trust_env=False, timeout=60, headers=headers_for(cluster.url)) as http:
        eventually(lambda: "everstep_event_stream_clients 1.0" in http.get("/metrics").text, 60)
    seen = _step(pages[2])
    eventually(lambda: _step(pages[2]) > seen and _step(pages[6]) > seen, 60)


def test_nothing_on_any_page_keeps_people_out(page: Page, job: TinyJob, barriers: Callable[[Page], dict[str, Any]]) -> None:
    """In light and dark; and at the width of a telephone nothing is cut off."""
    of_job = [f"/jobs/{job.id}{part}" for part in ("", "/map", "/incidents", "/events")]
    found: dict[str, Any] = {}
    for path in ("/jobs", *of_job, "/nodes", "/plans", "/webhooks", "/faults", "/jobs/none"):
        page.goto(path)
        found |= barriers(page)
    assert not found


def test_a_job_is_cancelled_once_that_is_confirmed(page: Page, job: TinyJob) -> None:
    page.goto(f"/jobs/{job.id}")
    page.get_by_role("button", name="Cancel job").click()
    expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    page.get_by_role("button", name="Cancel job").click()
    page.get_by_role("button", name="Cancel the job").click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("cancelled")
    expect(page.get_by_role("button", name="Cancel job")).to_have_count(0)


def _a_file(folder: Path) -> str:
    text = folder / "text.txt"
    text.write_text(TEXT * 400)
    return f"""
name: tiny
program: causal_lm
data: {{files: ["{text}"]}}
model: {{layers: 2, width: 32, heads: 2, ffn: 64}}
train: {{steps: {FOREVER}, micro_batches: 8, micro_batch_size: 1, sequence: 32}}
parallel: {{tp: 1, pp: 1}}
checkpoint: {{every: 0}}
"""


def _steps(page: Page) -> list[int]:
    """Of the table of the last steps, newest first."""
    return [int(text) for text in page.locator("details.figures-table tbody tr td:first-child").all_text_contents()]


def _step(page: Page) -> int:
    return int(page.locator(".progress-line strong").inner_text().replace(",", ""))
