"""The list of jobs: narrowed by words, and one command to all that are left. Over a desk that the test plays."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from orchestrator.domain.events import CancelRequested
from orchestrator.domain.ids import JobId
from orchestrator.domain.state import Queued
from tests.desk import a_spec
from tests.served import Served, serve

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def crowd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Six jobs that wait, three of them of one team."""
    if os.environ.get("EVERSTEP_SKIP_DASHBOARD", "") == "1":
        pytest.skip("the dashboard is left out")
    with serve(tmp_path_factory.mktemp("everstep")) as served:
        for number in range(6):
            labels = {"team": "nlp" if number % 2 else "vision", "number": str(number)}
            spec = replace(a_spec(name=f"run-{number}"), labels=labels)
            served.desk.add(f"job-{number}", spec=spec, state=Queued(reason="busy"))
        yield served


@pytest.fixture  # the desk first: beside the browser's there may be no other loop in this thread
def page(crowd: Served, browser: Browser) -> Iterator[Page]:
    context = browser.new_context(base_url=crowd.url, viewport={"width": 1280, "height": 900})
    yield context.new_page()
    context.close()


def test_jobs_are_narrowed_by_words_and_all_that_are_left_are_cancelled(
    page: Page, crowd: Served, barriers: Callable[[Page], dict[str, Any]]
) -> None:
    page.goto("/jobs")
    rows = page.locator("tbody tr")
    expect(rows).to_have_count(6)
    expect(page.get_by_role("button", name="All of these…")).to_have_count(0)
    words = page.get_by_role("searchbox")
    words.fill("run-3")
    words.press("Enter")
    expect(rows).to_have_count(1)
    words.fill("team=nlp")
    words.press("Enter")
    expect(rows).to_have_count(3)
    expect(page).to_have_url(f"{crowd.url}/jobs?only=team%3Dnlp")
    assert not barriers(page)

    page.get_by_role("button", name="All of these…").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("3 jobs would be cancelled")
    expect(dialog.locator("li")).to_have_text(["job-5", "job-3", "job-1"])
    assert crowd.desk.asked == []
    dialog.get_by_role("button", name="Cancel 3").click()
    expect(page.get_by_role("status").filter(has_text="3 jobs are being cancelled")).to_be_visible()
    assert {command.job for command in crowd.desk.asked} == {JobId(f"job-{number}") for number in (1, 3, 5)}
    assert all(isinstance(command, CancelRequested) for command in crowd.desk.asked)

    page.get_by_role("link", name="Failed").click()
    expect(page.get_by_text("No job is so.")).to_be_visible()
    expect(page.get_by_role("button", name="All of these…")).to_have_count(0)
