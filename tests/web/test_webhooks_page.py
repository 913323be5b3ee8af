"""What an admin does about webhooks in the browser, and what is not offered to those who may do less.

The API's own process on a real Redis; whoever is told is a server of the test's.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect

from api.client import Client
from api.client.webhooks import received
from deploy.owner import own_token
from orchestrator.adapters.embedded_redis import EmbeddedRedis, free_port

pytestmark = pytest.mark.timeout(300)
CONFIG = "webhooks: {http: true, networks: [127.0.0.0/8]}\n"


@dataclass
class Told:
    """A receiver of webhooks. answer: the status it has for whatever comes."""

    url: str = ""
    answer: int = 204
    messages: list[tuple[dict[str, str], bytes]] = field(default_factory=list)


@pytest.fixture
def told() -> Iterator[Told]:
    found = Told()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            found.messages.append(({name.lower(): value for name, value in self.headers.items()}, body))
            self.send_response(found.answer)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Nobody reads it."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.url = f"http://127.0.0.1:{server.server_port}/told"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield found
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(scope="module")
def owner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """Of an API that runs by itself."""
    if os.environ.get("EVERSTEP_SKIP_DASHBOARD", "") == "1":
        pytest.skip("the dashboard is left out")
    folder, port = tmp_path_factory.mktemp("webhooks"), free_port()
    (folder / "config.yaml").write_text(CONFIG)
    redis = EmbeddedRedis(folder)
    redis.start()
    command = [sys.executable, "-m", "deploy.api_server", "--state-dir", str(folder), "--port", str(port)]
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(command, stderr=log)
    try:
        with Client(f"http://127.0.0.1:{port}", token=own_token(folder), retry_s=60) as client:
            client.server_version()
            yield client
    finally:
        process.terminate()
        process.wait(30)
        redis.stop()


@pytest.fixture
def sign_in(browser: Browser, owner: Client) -> Iterator[Callable[[str], Page]]:
    opened: list[BrowserContext] = []

    def enter(token: str) -> Page:
        context = browser.new_context(base_url=owner.base_url, viewport={"width": 1280, "height": 900})
        context.set_default_timeout(60_000)
        opened.append(context)
        assert context.request.post("/api/v1/session", data={"token": token}).ok
        return context.new_page()

    yield enter
    for one in opened:
        one.close()


def test_a_webhook_is_added_tested_looked_at_resumed_and_removed(
    owner: Client, told: Told, sign_in: Callable[[str], Page], barriers: Callable[[Page], dict[str, Any]]
) -> None:
    page = sign_in(owner.create_token("boss", roles=["admin"]).token)
    page.goto("/")
    page.get_by_role("link", name="Webhooks").click()
    expect(page.get_by_text("Nobody is told of anything.")).to_be_visible()
    page.get_by_role("button", name="Add a webhook").click()
    page.get_by_label("Name").fill("ops")
    page.get_by_label("URL").fill("http://169.254.169.254/latest")
    page.get_by_role("checkbox", name=re.compile("^job.failed")).check()
    page.get_by_role("dialog").get_by_role("button", name="Add").click()
    expect(page.get_by_role("alert")).to_contain_text("169.254.169.254")
    page.get_by_label("URL").fill(told.url)
    page.get_by_role("dialog").get_by_role("button", name="Add").click()
    expect(page.get_by_role("heading", name="The secret of ops")).to_be_visible()
    secret = page.locator(".secret code").inner_text()
    page.get_by_role("button", name="It is kept").click()
    expect(page.locator("tr", has_text="ops")).to_contain_text("job.failed")
    assert not barriers(page)

    page.get_by_role("button", name="Test ops").click()
    page.get_by_role("link", name="ops", exact=True).click()
    row = page.locator("tbody tr", has_text="ping")
    expect(row).to_contain_text("delivered")
    expect(row).to_contain_text("204")
    ((headers, body),) = told.messages
    assert received(headers, body, secret).type == "ping"
    row.get_by_text("What was sent").click()
    expect(row.locator("pre")).to_contain_text('"type": "ping"')
    expect(row).to_contain_text(headers["webhook-id"])
    assert not barriers(page)

    told.answer = 410
    row.get_by_role("button", name=re.compile("^Redeliver ping of ")).click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("paused")
    expect(page.locator(".warn")).to_contain_text("410")
    assert [one["webhook-id"] for one, _ in told.messages] == [headers["webhook-id"]] * 2
    told.answer = 204
    page.get_by_role("button", name="Resume ops").click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("active")

    page.get_by_role("button", name="Remove ops").click()
    page.get_by_role("button", name="Remove it").click()
    expect(page.get_by_text("Nobody is told of anything.")).to_be_visible()
    assert owner.webhooks() == []


def test_what_a_role_may_not_do_is_not_offered(owner: Client, sign_in: Callable[[str], Page]) -> None:
    page = sign_in(owner.create_token("eyes", roles=["viewer"]).token)
    page.goto("/")
    expect(page.get_by_text("No job has been submitted yet.")).to_be_visible()
    expect(page.get_by_role("button", name="Submit a job")).to_have_count(0)
    expect(page.get_by_role("link", name="Webhooks")).to_have_count(0)
    page.goto("/nodes")
    expect(page.get_by_text("There is no node.")).to_be_visible()
    expect(page.get_by_role("button", name="Add nodes")).to_have_count(0)
    page.goto("/webhooks")
    expect(page.get_by_role("alert")).to_contain_text("needs the role admin")
    expect(page.get_by_role("button", name="Add a webhook")).to_have_count(0)
    hands = sign_in(owner.create_token("hands", roles=["operator"]).token)
    hands.goto("/")
    expect(hands.get_by_role("button", name="Submit a job").first).to_be_visible()
