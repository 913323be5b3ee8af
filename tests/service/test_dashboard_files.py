"""What a browser is given: one page for every address, assets for ever, a policy that lets nothing else run."""

from __future__ import annotations

from pathlib import Path

import httpx2
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from api import dashboard
from tests.served import Served


@pytest.fixture
def browser(tmp_path: Path) -> TestClient:
    assets = tmp_path / "assets"
    assets.mkdir()
    (tmp_path / "index.html").write_text("<!doctype html><title>Everstep</title>")
    (assets / "index-1a2b.js").write_text("export {}")
    (tmp_path / "secret.txt").write_text("secret")
    app = FastAPI()
    dashboard.install(app, tmp_path)
    return TestClient(app)


@pytest.mark.parametrize(
    "path", ["/", "/jobs", "/jobs/job-1", "/jobs/job-1/map", "/nodes", "/plans", "/webhooks/wh-1", "/faults"]
)
def test_every_page_is_the_same_file_and_is_asked_for_again(browser: TestClient, path: str) -> None:
    answer = browser.get(path)
    assert answer.status_code == 200 and "Everstep" in answer.text
    assert answer.headers["cache-control"] == "no-cache" and answer.headers["content-type"].startswith("text/html")


def test_assets_are_kept_for_ever_and_nothing_beside_them_is_served(browser: TestClient) -> None:
    answer = browser.get("/assets/index-1a2b.js")
    assert answer.status_code == 200 and answer.headers["cache-control"] == "public, max-age=31536000, immutable"
    for path in ("/assets/none.js", "/assets/../secret.txt", "/assets/%2e%2e/secret.txt", "/secret.txt"):
        assert browser.get(path).status_code == 404


def test_the_policy_lets_no_inline_script_or_style_run(browser: TestClient) -> None:
    for path in ("/", "/assets/index-1a2b.js"):
        policy = browser.get(path).headers["content-security-policy"]
        assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy and "http" not in policy


def test_a_server_built_without_it_says_so_and_how_to_get_it(tmp_path: Path) -> None:
    app = FastAPI()
    dashboard.install(app, tmp_path / "nothing")
    answer = TestClient(app).get("/")
    assert answer.status_code == 501 and "EVERSTEP_SKIP_DASHBOARD" in answer.text
    assert TestClient(app).get("/assets/index.js").status_code == 404


def test_addresses_of_the_api_are_never_answered_with_a_page(served: Served, http: httpx2.Client) -> None:
    answer = http.get("/api/v1/nothing")
    assert answer.status_code == 404 and answer.headers["content-type"] == "application/problem+json"
    assert http.get("/api/v1/version").json()["chaos"] is True
