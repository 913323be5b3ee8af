"""A real browser before a real cluster: Debian's Chromium, driven from outside, and one cluster for every test here."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright
from playwright.sync_api import TimeoutError as PlaywrightTimeout

from api.client import Client
from api.dashboard import BUILT
from deploy.local import LocalCluster, up
from orchestrator.adapters.local_nodes import parse_nodes

NODES = "A100:2,A100:2,H100:2"
PATIENCE_MS = 60_000
"""For whatever comes by itself: a page, a word, a state. It says nothing of how soon that should be."""
expect.set_options(timeout=PATIENCE_MS)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    if os.environ.get("EVERSTEP_SKIP_DASHBOARD", "") == "1":
        pytest.skip("the dashboard is left out")
    assert (BUILT / "index.html").is_file(), "the dashboard was not built: run make setup"
    running = up(tmp_path_factory.mktemp("everstep"), parse_nodes(NODES), chaos=True)
    try:
        yield running
    finally:
        running.down()


@pytest.fixture(scope="module")
def client(cluster: LocalCluster) -> Iterator[Client]:
    with Client(cluster.url, retry_s=30) as one:
        yield one


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("there is no chromium; apt-get install chromium")
    with sync_playwright() as playwright:
        # Tests run as root in containers, where the browser's own sandbox cannot be made.
        found = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def tabs(browser: Browser, cluster: LocalCluster) -> Iterator[BrowserContext]:
    """One browser as far as storage and workers go; nothing that it opens may complain."""
    context = browser.new_context(base_url=cluster.url, viewport={"width": 1280, "height": 900}, color_scheme="light")
    context.set_default_timeout(PATIENCE_MS)
    assert context.request.post("/api/v1/session", data={"token": cluster.token}).ok, "signed in, with a cookie of its own"
    complaints: list[str] = []
    context.on("weberror", lambda error: complaints.append(str(error.error)))
    context.on("console", lambda said: complaints.append(said.text) if "Content Security Policy" in said.text else None)
    yield context
    context.close()
    assert not complaints


@pytest.fixture
def page(tabs: BrowserContext) -> Page:
    return tabs.new_page()


@pytest.fixture(scope="session")
def barriers() -> Callable[[Page], dict[str, Any]]:
    """What keeps people out of the page that is open: what axe finds serious, in light and in dark, and what is cut off at
    the width of a telephone."""
    axe = (Path(__file__).parents[2] / "api/web/node_modules/axe-core/axe.min.js").read_text()

    def find(page: Page) -> dict[str, Any]:
        found: dict[str, Any] = {}
        expect(page.locator("main h1")).to_be_visible()
        expect(page.locator(".loading")).to_have_count(0)
        page.evaluate(axe)
        for scheme, rules in (("light", "{}"), ("dark", "{runOnly: ['color-contrast', 'link-in-text-block']}")):
            page.emulate_media(color_scheme=scheme)  # which changes colours alone
            for one in page.evaluate(f"axe.run(document, {{resultTypes: ['violations'], ...{rules}}})")["violations"]:
                if one["impact"] in ("serious", "critical"):
                    found[f"{page.url} {scheme} {one['id']}"] = [node["html"][:200] for node in one["nodes"]][:3]
        page.set_viewport_size({"width": 375, "height": 800})
        try:  # charts are drawn anew once the page has its width
            page.wait_for_function("document.documentElement.scrollWidth <= 375", timeout=20_000)
        except PlaywrightTimeout:
            found[f"{page.url} at 375"] = page.evaluate("document.documentElement.scrollWidth")
        page.set_viewport_size({"width": 1280, "height": 900})
        page.emulate_media(color_scheme="light")
        return found

    return find
