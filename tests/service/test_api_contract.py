"""Whatever the OpenAPI document allows, sent to the API's own process on a real Redis: nothing of it is a bug."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error

from deploy.describe import document
from deploy.owner import own_token
from orchestrator.adapters.embedded_redis import EmbeddedRedis, free_port

pytestmark = pytest.mark.timeout(120)
LEFT_OUT = ("/live", "/events", "/plans", ":validate", "/readyz")
"""Streams that never end, what imports the program that a body names, and readiness: no supervisor runs here."""
SIGN_IN = "POST /api/v1/session"
SCHEMA = schemathesis.openapi.from_dict(json.loads(document()))
OPERATIONS = {
    operation.label: operation
    for operation in (found.ok() for found in SCHEMA.get_all_operations())
    if not operation.path.endswith(LEFT_OUT)
}
PROBLEM = "application/problem+json"


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, dict[str, str]]]:
    """Its address, and what authorizes its owner."""
    state_dir, port = tmp_path_factory.mktemp("contract"), free_port()
    redis = EmbeddedRedis(state_dir)
    redis.start()
    command = [sys.executable, "-m", "deploy.api_server", "--state-dir", str(state_dir), "--port", str(port), "--chaos"]
    process = subprocess.Popen(command, stderr=(state_dir / "log").open("wb"))
    url = f"http://127.0.0.1:{port}"
    try:
        _until_it_answers(url, state_dir / "log")
        yield url, {"Authorization": f"Bearer {own_token(state_dir)}"}
    finally:
        process.terminate()
        process.wait(20)
        redis.stop()


@pytest.mark.parametrize("label", sorted(OPERATIONS))
def test_no_request_is_a_bug(api: tuple[str, dict[str, str]], label: str) -> None:
    url, headers = api

    @given(case=OPERATIONS[label].as_strategy())
    @settings(
        max_examples=4,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def send(case: schemathesis.Case) -> None:
        answer = case.call(base_url=url, headers=headers, timeout=20)
        case.validate_response(answer, checks=[not_a_server_error])
        assert answer.status_code != 401 or label == SIGN_IN, "its owner asks"
        if answer.status_code >= 400:
            (kind,) = answer.headers["content-type"]
            problem = answer.json()
            assert kind == PROBLEM and problem["status"] == answer.status_code and problem["detail"], answer.text

    send()


def _until_it_answers(url: str, log: Path) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            if httpx2.get(f"{url}/healthz", trust_env=False).is_success:
                return
        except httpx2.TransportError:
            time.sleep(0.1)
    raise AssertionError(log.read_text())
