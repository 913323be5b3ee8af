"""Changes of the API are told apart: what breaks a client of today, and what does not. No promise is broken."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deploy.api_diff import changes
from deploy.describe import document

PROMISED = Path(__file__).parent.parent / "golden" / "openapi-1.json"
"""What clients rely on. Something that breaks it needs another file, and another version of the API."""
Change = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def today() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(document())
    return found


def test_nothing_that_was_promised_is_broken(today: dict[str, Any]) -> None:
    broken = [change for change in changes(json.loads(PROMISED.read_text()), today) if change.is_breaking]
    assert not broken, "\n".join(map(str, broken))


def shapes(api: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = api["components"]["schemas"]
    return found


def route(api: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = api["paths"]["/api/v1/jobs/{job_id}/logs"]["get"]
    return found


BREAKING: dict[str, tuple[Change, str]] = {
    "a route is gone": (lambda api: api["paths"].pop("/api/v1/queue"), "GET /api/v1/queue: is gone"),
    "an answer is gone": (lambda api: route(api)["responses"].pop("200"), "is answered no more"),
    "an answer is another kind": (
        lambda api: route(api)["responses"]["200"].update(content={"application/json": {"schema": {}}}),
        "is text/plain no more",
    ),
    "a field that was told is gone": (lambda api: shapes(api)["JobView"]["properties"].pop("step"), ".step: is gone"),
    "a field that was told may be missing": (
        lambda api: shapes(api)["JobView"]["required"].remove("step"),
        ".step: may be left out now",
    ),
    "a field may be null": (
        lambda api: shapes(api)["JobView"]["properties"].update(step={"anyOf": [{"type": "integer"}, {"type": "null"}]}),
        ".step: may be null now",
    ),
    "a field is another type": (
        lambda api: shapes(api)["JobView"]["properties"].update(step={"type": "string"}),
        ".step: may be string now",
    ),
    "a field that was asked is not read": (
        lambda api: shapes(api)["JobFile"]["properties"].pop("priority"),
        ".priority: is gone",
    ),
    "a field is needed": (lambda api: shapes(api)["JobFile"]["required"].append("labels"), ".labels: is needed now"),
    "a bound is tighter": (
        lambda api: shapes(api)["TrainSection"]["properties"]["steps"].update(maximum=10),
        ".steps: has maximum 10 now",
    ),
    "a word is not taken any more": (
        lambda api: shapes(api)["TrainSection"]["properties"]["dtype"]["enum"].remove("bf16"),
        ".dtype: is never bf16 any more",
    ),
    "a parameter is gone": (lambda api: route(api)["parameters"].pop(), "is not read any more"),
    "a parameter is needed": (
        lambda api: route(api)["parameters"].append({"in": "query", "name": "x", "required": True, "schema": {}}),
        "query x: is needed now",
    ),
}
HARMLESS: dict[str, Change] = {
    "a route": lambda api: api["paths"].update({"/api/v1/new": {"get": {"responses": {}}}}),
    "a field that is told": lambda api: shapes(api)["JobView"]["properties"].update(new={"type": "string"}),
    "a field that may be asked": lambda api: shapes(api)["JobFile"]["properties"].update(new={"type": "string"}),
    "a parameter": lambda api: route(api)["parameters"].append({"in": "query", "name": "x", "schema": {}}),
    "a word that is told": lambda api: shapes(api)["JobStatus"]["enum"].append("SLEEPING"),
    "a wider bound": lambda api: shapes(api)["TrainSection"]["properties"]["steps"].update(minimum=0),
    "words": lambda api: route(api).update(description="in other words"),
}


@pytest.mark.parametrize("name", BREAKING)
def test_what_breaks_a_client_is_found_and_said(today: dict[str, Any], name: str) -> None:
    change, said = BREAKING[name]
    changed = copy.deepcopy(today)
    change(changed)
    found = changes(today, changed)
    assert found and found[0].is_breaking and any(said in str(one) for one in found if one.is_breaking), found


@pytest.mark.parametrize("name", HARMLESS)
def test_what_is_only_more_breaks_nobody(today: dict[str, Any], name: str) -> None:
    changed = copy.deepcopy(today)
    HARMLESS[name](changed)
    found = changes(today, changed)
    assert not [one for one in found if one.is_breaking] and (found or name == "words" or "bound" in name)
