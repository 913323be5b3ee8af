"""The API over a real port: every error is a problem, and some are not even listened to."""

from __future__ import annotations

from collections.abc import Iterator
from http.client import HTTPConnection

import httpx2
import pytest

from orchestrator.domain.errors import Unavailable
from tests.served import JOB, Served, running

pytestmark = pytest.mark.timeout(120)
PROBLEM = "application/problem+json"


# --- every error is a problem --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("GET", "/nope", 404, "no-such-route"),
        ("GET", "/api/v1/jobs/job-x", 404, "not-found"),
        ("GET", "/api/v1/jobs/job-x/events", 404, "not-found"),
        ("GET", "/api/v1/jobs/job-x/metrics", 404, "not-found"),
        ("GET", "/api/v1/jobs/job-x/logs", 404, "not-found"),
        ("POST", "/api/v1/jobs/job-x:cancel", 404, "not-found"),
        ("DELETE", "/api/v1/jobs", 405, "method"),
        ("POST", "/api/v1/jobs/job-x:explode", 405, "method"),
        ("GET", "/api/v1/jobs?limit=201", 422, "invalid"),
        ("GET", "/api/v1/jobs?state=HAPPY", 422, "invalid"),
        ("GET", "/api/v1/jobs/job-x/metrics?limit=x", 422, "invalid"),
        ("POST", "/api/v1/jobs", 415, "content-type"),
    ],
)
def test_every_error_is_a_problem_document(http: httpx2.Client, method: str, path: str, status: int, kind: str) -> None:
    answer = http.request(method, path)
    assert answer.status_code == status
    assert answer.headers["content-type"] == PROBLEM
    problem = answer.json()
    assert problem["type"] == f"urn:everstep:problem:{kind}"
    assert problem["status"] == status and problem["title"] and problem["detail"] and problem["request_id"]


def test_parameters_out_of_range_are_named(http: httpx2.Client) -> None:
    errors = http.get("/api/v1/jobs?limit=201").json()["errors"]
    assert errors[0]["field"] == "limit" and errors[0]["value"] == "201" and "200" in errors[0]["message"]


def test_a_bug_is_a_problem_too_and_tells_nothing(served: Served, http: httpx2.Client) -> None:
    served.desk.broken = RuntimeError("secret")
    answer = http.get("/api/v1/jobs")
    assert answer.status_code == 500 and answer.headers["content-type"] == PROBLEM
    assert "secret" not in answer.text and answer.json()["request_id"]


def test_a_store_that_cannot_be_reached_is_503_and_says_when_to_retry(served: Served, http: httpx2.Client) -> None:
    served.desk.broken = Unavailable("the store does not answer; is Redis up?")
    answer = http.get("/api/v1/jobs")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert answer.json()["detail"] == "the store does not answer; is Redis up?"


# --- who may ask ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:9", 200),
        ("127.0.0.1:8265", 200),
        ("[::1]:8265", 200),
        ("[::1]", 200),
        ("evil.example", 400),
        ("127.0.0.1.evil.example", 400),
        ("localhost@evil.example", 400),
        ("127.0.0.1:99999", 400),
        ("localhost/x", 400),
        ("", 400),
    ],
)
def test_only_names_of_this_machine_are_answered(http: httpx2.Client, host: str, status: int) -> None:
    answer = http.get("/healthz", headers={"Host": host})
    assert answer.status_code == status
    if status == 400:
        assert answer.headers["content-type"] == PROBLEM and answer.json()["type"].endswith(":host")


def test_a_request_without_a_host_is_refused(served: Served) -> None:
    connection = HTTPConnection(served.url.removeprefix("http://"), timeout=5)
    connection.putrequest("GET", "/healthz", skip_host=True)
    connection.endheaders()
    assert connection.getresponse().status == 400
    connection.close()


def test_a_page_of_another_origin_changes_nothing(served: Served, http: httpx2.Client) -> None:
    running(served)
    answer = http.post(f"/api/v1/jobs/{JOB}:cancel", headers={"Origin": "http://127.0.0.1:1"})
    assert answer.status_code == 403 and answer.json()["type"].endswith(":origin")
    assert not served.desk.asked
    assert http.post(f"/api/v1/jobs/{JOB}:cancel", headers={"Origin": served.url}).status_code == 202


@pytest.mark.parametrize("origin", ["http://127.0.0.1:1", "https://evil.example", "null"])
def test_no_page_of_another_origin_reads_an_answer(http: httpx2.Client, origin: str) -> None:
    """A browser lets it where an answer says so; none does, to a question beforehand neither."""
    asked = {"Origin": origin, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    for answer in (http.get("/api/v1/jobs", headers=asked), http.options("/api/v1/jobs", headers=asked)):
        assert not [name for name in answer.headers if name.lower().startswith("access-control-")]


def test_a_body_that_is_too_large_is_refused_with_or_without_a_length(served: Served, http: httpx2.Client) -> None:
    headers = {"content-type": "application/json"}
    assert http.post("/api/v1/jobs", content=b" " * (2 << 20), headers=headers).status_code == 413

    def pieces() -> Iterator[bytes]:
        for _ in range(20):
            yield b" " * (1 << 17)

    answer = http.post("/api/v1/jobs", content=pieces(), headers=headers)
    assert answer.status_code == 413 and answer.headers["content-type"] == PROBLEM
