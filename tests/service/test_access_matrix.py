"""Every route, asked by every role and by owners and strangers of the job it is about. No route may be missing here."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import httpx2
import pytest
from fastapi.routing import APIRoute, iter_route_contexts

from api import live
from api.access import NEEDS, OPEN
from orchestrator.domain.access import Role
from orchestrator.domain.cluster import Node
from orchestrator.domain.ids import NodeId
from tests.desk import a_spec
from tests.keys import Guarded, guarded

pytestmark = pytest.mark.timeout(120)
JOB_FILE = {
    "name": "byte-gpt",
    "program": "causal_lm",
    "data": {"files": ["{stdlib}"]},
    "train": {"steps": 3, "micro_batches": 4, "micro_batch_size": 2, "sequence": 64},
}
VIEWER, OPERATOR, ADMIN, CHAOS = Role.VIEWER, Role.OPERATOR, Role.ADMIN, Role.CHAOS
About = Literal["job", "jobs", "new", "cluster", "self"]
"""Whose it is: of one job, of many, of none yet, of nobody's project, of whoever asks."""


@dataclass(frozen=True)
class Asked:
    """role: the least that may. path: {job} is the job in question."""

    role: Role
    about: About
    method: str
    path: str
    body: Any = None


J = "/api/v1/jobs/{job}"
W = "/api/v1/webhooks"  # whose they are: test_webhooks.py
ROUTES: dict[str, Asked] = {
    "submit": Asked(OPERATOR, "jobs", "POST", "/api/v1/jobs", JOB_FILE),
    "list_jobs": Asked(VIEWER, "jobs", "GET", "/api/v1/jobs"),
    "get_job": Asked(VIEWER, "job", "GET", J),
    "list_plans": Asked(VIEWER, "job", "GET", f"{J}/plans"),
    "cancel": Asked(OPERATOR, "job", "POST", f"{J}:cancel"),
    "pause": Asked(OPERATOR, "job", "POST", f"{J}:pause"),
    "resume": Asked(OPERATOR, "job", "POST", f"{J}:resume"),
    "resize": Asked(OPERATOR, "job", "PATCH", J, {"target": 2}),
    "cancel_many": Asked(OPERATOR, "jobs", "POST", "/api/v1/jobs:cancel", {"name": "byte-gpt", "dry_run": True}),
    "pause_many": Asked(OPERATOR, "jobs", "POST", "/api/v1/jobs:pause", {"name": "byte-gpt", "dry_run": True}),
    "resume_many": Asked(OPERATOR, "jobs", "POST", "/api/v1/jobs:resume", {"name": "byte-gpt", "dry_run": True}),
    "resize_many": Asked(
        OPERATOR, "jobs", "POST", "/api/v1/jobs:resize", {"name": "byte-gpt", "dry_run": True, "resize": {"target": 2}}
    ),
    "submit_as": Asked(OPERATOR, "new", "PUT", J, JOB_FILE),
    "list_checkpoints": Asked(VIEWER, "job", "GET", f"{J}/checkpoints"),
    "checkpoint_now": Asked(OPERATOR, "job", "POST", f"{J}:checkpoint"),
    "events": Asked(VIEWER, "job", "GET", f"{J}/events"),
    "metrics": Asked(VIEWER, "job", "GET", f"{J}/metrics"),
    "logs": Asked(VIEWER, "job", "GET", f"{J}/logs"),
    "log_lines": Asked(VIEWER, "job", "GET", f"{J}/logs/lines"),
    "list_faults": Asked(VIEWER, "job", "GET", f"{J}/faults"),
    "plan": Asked(OPERATOR, "self", "POST", "/api/v1/plans", {"job": {}}),  # refused before a program is imported
    "validate": Asked(OPERATOR, "self", "POST", "/api/v1/jobs:validate", {"name": "refused"}),
    "live": Asked(VIEWER, "job", "GET", "/api/v1/live?watch={job}"),
    "get_queue": Asked(VIEWER, "self", "GET", "/api/v1/queue"),
    "list_projects": Asked(VIEWER, "self", "GET", "/api/v1/projects"),
    "get_project": Asked(VIEWER, "self", "GET", "/api/v1/projects/mine"),
    "set_quota": Asked(ADMIN, "cluster", "PUT", "/api/v1/projects/mine", {"max_devices": 4}),
    "list_nodes": Asked(VIEWER, "self", "GET", "/api/v1/nodes"),
    "add_node": Asked(OPERATOR, "cluster", "POST", "/api/v1/nodes", {"kind": "A100"}),
    "cordon": Asked(OPERATOR, "cluster", "POST", "/api/v1/nodes/node-1:cordon"),
    "uncordon": Asked(OPERATOR, "cluster", "POST", "/api/v1/nodes/node-1:uncordon"),
    "drain": Asked(OPERATOR, "cluster", "POST", "/api/v1/nodes/node-1:drain"),
    "remove_node": Asked(OPERATOR, "cluster", "DELETE", "/api/v1/nodes/node-1"),
    "release_node": Asked(OPERATOR, "cluster", "POST", "/api/v1/nodes/node-1:release"),
    "cause_fault": Asked(CHAOS, "cluster", "POST", "/api/v1/faults", {"kind": "node_kill", "node": "node-1"}),
    "version": Asked(VIEWER, "self", "GET", "/api/v1/version"),
    "prometheus": Asked(VIEWER, "cluster", "GET", "/metrics"),
    "config_schema": Asked(VIEWER, "self", "GET", "/api/v1/schemas/config"),
    "job_schema": Asked(VIEWER, "self", "GET", "/api/v1/schemas/job"),
    "whoami": Asked(VIEWER, "self", "GET", "/api/v1/whoami"),
    "sign_out": Asked(VIEWER, "self", "DELETE", "/api/v1/session"),
    "make_login_code": Asked(VIEWER, "self", "POST", "/api/v1/session/codes"),
    "create_token": Asked(ADMIN, "cluster", "POST", "/api/v1/tokens", {"name": "new", "roles": ["viewer"]}),
    "list_tokens": Asked(ADMIN, "cluster", "GET", "/api/v1/tokens"),
    "revoke_token": Asked(ADMIN, "cluster", "DELETE", "/api/v1/tokens/tok-none"),
    "audit_log": Asked(ADMIN, "cluster", "GET", "/api/v1/audit"),
    "create_webhook": Asked(ADMIN, "self", "POST", W, {"name": "ops", "url": "https://hooks.example/"}),
    "list_webhooks": Asked(ADMIN, "self", "GET", W),
    "get_webhook": Asked(ADMIN, "self", "GET", f"{W}/wh-0"),
    "delete_webhook": Asked(ADMIN, "self", "DELETE", f"{W}/wh-0"),
    "pause_webhook": Asked(ADMIN, "self", "POST", f"{W}/wh-0:pause"),
    "resume_webhook": Asked(ADMIN, "self", "POST", f"{W}/wh-0:resume"),
    "test_webhook": Asked(ADMIN, "self", "POST", f"{W}/wh-0:test"),
    "list_deliveries": Asked(ADMIN, "self", "GET", f"{W}/wh-0/deliveries"),
    "redeliver": Asked(ADMIN, "self", "POST", f"{W}/wh-0/deliveries/msg-0:redeliver"),
}
MINE, FOREIGN = "job-mine", "job-foreign"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    with guarded(tmp_path_factory.mktemp("matrix"), mistakes_burst=1e9) as found:
        desk = found.served.desk
        desk.set_nodes(Node(id=NodeId("node-1"), kind="A100", num_devices=2))
        for job, project in ((MINE, "mine"), (FOREIGN, "foreign")):
            desk.add(job)
            desk.change(desk.record(job), spec=replace(a_spec(), project=project))
            found.served.write_log(job, "node-1/0", "words\n")
        yield found


@pytest.fixture(scope="module")
def tokens(server: Guarded) -> dict[tuple[str, bool], str]:
    """By role, and whether it is limited to the project `mine`."""
    return {
        (role.value, limited): server.token(f"{role}-{limited}", role, projects=("mine",) if limited else ())
        for role in Role
        for limited in (False, True)
    }


def test_no_route_is_missing_from_this_matrix_or_from_the_table(server: Guarded) -> None:
    found = {name for name, _, _ in _routes(server)}
    assert found == set(ROUTES) | OPEN, "say here and in api/access.py who may ask for it"
    assert set(NEEDS) == set(ROUTES), "a route needs a line in api/access.py, and a line there a route"
    for name, method, path in _routes(server):
        asked = ROUTES.get(name)
        assert asked is None or (asked.method == method and _fits(asked.path, path)), f"{name}: {method} {path}"


@pytest.mark.parametrize("name", sorted(ROUTES))
def test_who_may(server: Guarded, tokens: dict[tuple[str, bool], str], name: str) -> None:
    asked = ROUTES[name]
    anybody = _ask(server, None, asked, MINE)
    assert anybody.status_code == 401 and anybody.headers["WWW-Authenticate"].startswith("Bearer")
    assert _ask(server, "evst_" + "0" * 72, asked, MINE).status_code == 401
    for (role, limited), token in tokens.items():
        answer = _ask(server, token, asked, MINE)
        may = _includes(Role(role), asked.role) and not (limited and asked.about == "cluster")
        assert (answer.status_code not in (401, 403)) == may, (
            f"{role}{' of mine' * limited}: {answer.status_code} {answer.text}"
        )
        if not may:
            assert answer.status_code == 403 and answer.json()["type"] == "urn:everstep:problem:forbidden"
        if may and asked.about == "job":
            _see_no_stranger(server, token, asked, limited)


def _see_no_stranger(server: Guarded, token: str, asked: Asked, limited: bool) -> None:
    """Another project's job is answered in the very words of one that never was."""
    foreign = _ask(server, token, asked, FOREIGN)
    if not limited:
        assert foreign.status_code < 300, foreign.text
        return
    unknown = _ask(server, token, asked, "job-unknown")
    assert foreign.status_code == unknown.status_code == 404
    assert foreign.json()["detail"].replace(FOREIGN, "?") == unknown.json()["detail"].replace("job-unknown", "?")


def test_a_limited_token_finds_counts_and_submits_to_its_projects_only(
    server: Guarded, tokens: dict[tuple[str, bool], str]
) -> None:
    http, all_jobs = server.http(tokens["operator", True]), server.http(tokens["operator", False])
    assert {job["project"] for job in http.get("/api/v1/jobs").json()["jobs"]} == {"mine"}
    assert {job["project"] for job in all_jobs.get("/api/v1/jobs").json()["jobs"]} >= {"mine", "foreign"}
    everything = {"state": ["PENDING"], "dry_run": True}
    mine, theirs = (one.post("/api/v1/jobs:cancel", json=everything).json() for one in (http, all_jobs))
    assert FOREIGN not in mine["jobs"] and FOREIGN in theirs["jobs"] and MINE in mine["jobs"]
    refused = http.post("/api/v1/jobs", json=JOB_FILE | {"project": "foreign"})
    assert refused.status_code == 403 and "this token submits to mine" in refused.json()["detail"]
    made = http.post("/api/v1/jobs", json=JOB_FILE).json()
    assert server.served.desk.record(made["id"]).spec.project == "mine", "its only project needs no naming"


def test_the_live_stream_tells_a_limited_token_of_its_projects_only(
    server: Guarded, tokens: dict[tuple[str, bool], str]
) -> None:
    seen: set[str] = set()
    with server.http(tokens["viewer", True]).stream("GET", "/api/v1/live") as answer:
        for sse in httpx2.EventSource(answer):
            if sse.event == "summary":
                seen.add(sse.json()["project"])
            if sse.event == "pulse":  # told after every summary there is
                break
    assert seen == {"mine"}


def test_jobs_of_others_hide_none_of_ones_own_from_the_dashboard(
    server: Guarded, tokens: dict[tuple[str, bool], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "SHOWN_JOBS", 2)
    monkeypatch.setattr(live, "PAGE", 2)
    for number in range(6):
        server.served.desk.add(f"job-newer-{number}", spec=replace(a_spec(), project="foreign"))
    seen: dict[tuple[str, bool], set[str]] = {}
    for who in (("viewer", True), ("viewer", False)):
        seen[who] = set()
        with server.http(tokens[who]).stream("GET", "/api/v1/live") as answer:
            for sse in httpx2.EventSource(answer):
                if sse.event == "summary":
                    seen[who].add(sse.json()["id"])
                if sse.event == "pulse":
                    break
    assert seen["viewer", False] == {"job-newer-4", "job-newer-5"}
    assert MINE in seen["viewer", True] and not any("newer" in job for job in seen["viewer", True])


def test_a_key_of_one_token_is_none_of_another(server: Guarded, tokens: dict[tuple[str, bool], str]) -> None:
    key = {"Idempotency-Key": "the-same"}
    first, second = (
        server.http(tokens[who]).post("/api/v1/jobs", json=JOB_FILE, headers=key)
        for who in (("operator", False), ("operator", True))
    )
    assert first.status_code == second.status_code == 201 and first.json()["id"] != second.json()["id"]


# --- asking ------------------------------------------------------------------------------------------------------------


def _ask(server: Guarded, token: str | None, asked: Asked, job: str) -> httpx2.Response:
    job = f"job-{secrets.token_hex(8)}" if asked.about == "new" else job
    http, path = server.http(token), asked.path.format(job=job)
    content = {} if asked.body is None else {"json": asked.body}
    if "/live" in path:  # never ends by itself
        with http.stream("GET", path) as answer:
            if not answer.is_success:
                answer.read()
            return answer
    accept = {"Accept": "application/json"} if path.endswith("/events") else {}
    return http.request(asked.method, path, headers=accept, **content)


def _routes(server: Guarded) -> list[tuple[str, str, str]]:
    """Name, method and path of every route of the API."""
    app = server.served.server.config.app
    found = []
    for context in iter_route_contexts(app.routes):  # type: ignore[union-attr]
        route = context.original_route
        if isinstance(route, APIRoute) and context.include_in_schema:
            (method,) = context.methods
            found.append((route.name, method, context.path))
    return found


def _fits(asked: str, template: str) -> bool:
    filled = (
        template.replace("{job_id}", "{job}")
        .replace("{node}", "node-1")
        .replace("{token_id}", "tok-none")
        .replace("{webhook_id}", "wh-0")
        .replace("{delivery_id}", "msg-0")
        .replace("{name}", "mine")
    )
    return filled == asked.partition("?")[0]


def _includes(role: Role, wanted: Role) -> bool:
    order = (VIEWER, OPERATOR, ADMIN)
    if wanted is CHAOS or role is CHAOS:
        return role is wanted or wanted is VIEWER
    return order.index(role) >= order.index(wanted)
