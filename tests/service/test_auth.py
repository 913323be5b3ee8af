"""Tokens, sessions and the record of what was asked for, over a real port."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest
from fastapi import FastAPI
from typer.testing import CliRunner, Result

from api.cli.main import app
from api.cli.session import find_job
from api.client import ApiError, Client
from api.client.credentials import find_token, forget_server, note_server
from api.config import Config
from api.identities import Identities
from api.tokens import FILE, PATTERN, digest, is_whole, mint
from deploy.api_server import PROXIES, server_config
from deploy.owner import own_token, require_auth
from orchestrator.adapters.memory_keyring import MemoryKeyring
from orchestrator.domain.access import LOCAL, Role
from orchestrator.domain.errors import Conflict, Refused, Unavailable
from tests.keys import Guarded, guarded
from tests.served import eventually

pytestmark = pytest.mark.timeout(120)
JOB_FILE = {
    "name": "byte-gpt",
    "program": "causal_lm",
    "data": {"files": ["{stdlib}"]},
    "train": {"steps": 3, "micro_batches": 4, "micro_batch_size": 2, "sequence": 64},
}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Guarded]:
    with guarded(tmp_path) as found:
        yield found


def test_a_token_is_made_shown_once_used_and_refused_within_a_second_of_being_revoked(server: Guarded) -> None:
    with Client(server.url, token=server.owner) as owner:
        made = owner.create_token("ci", ["viewer"], projects=["mine"])
        assert is_whole(made.token) and PATTERN.fullmatch(made.token)
        assert made.token not in repr(owner.tokens()) and made.token not in repr(server.keyring.__dict__)
        with Client(server.url, token=made.token, retry_s=0) as ci:
            who = ci.whoami()
            assert (who.name, who.roles, who.projects) == ("ci", (Role.VIEWER,), ("mine",))
            (listed,) = owner.tokens()
            assert listed.is_valid and listed.last_used_at is not None and listed.created_by == "local admin"
            owner.revoke_token(made.id)
            with pytest.raises(ApiError, match="revoked or has run out") as refused:
                ci.jobs()
            assert refused.value.status == 401
        assert not owner.tokens()[0].is_valid


def test_another_server_forgets_a_revoked_token_within_a_second(server: Guarded) -> None:
    """What it remembered of it is the only thing that can be old."""
    token = server.token("ci", Role.VIEWER)
    http = server.http(token)
    assert http.get("/api/v1/jobs").status_code == 200
    server.served.desk.now(server.keyring.revoke("tok-ci", time.time()))
    server.let_pass(1.0)
    assert http.get("/api/v1/jobs").status_code == 401


@pytest.mark.parametrize("by", ["token", "cookie"])
def test_a_stream_ends_with_what_it_was_opened_with(server: Guarded, by: str) -> None:
    token = server.token("ci", Role.VIEWER)
    http = server.http(token if by == "token" else None)
    if by == "cookie":
        assert http.post("/api/v1/session", json={"token": token}).status_code == 200
    with http.stream("GET", "/api/v1/live") as stream, Client(server.url, token=server.owner) as owner:
        lines = stream.iter_lines()
        assert next(lines)
        owner.revoke_token("tok-ci")
        began = time.monotonic()
        for _ in lines:
            assert time.monotonic() - began < 60, "it goes on"


def test_a_token_runs_out(server: Guarded) -> None:
    http = server.http(server.token("brief", Role.VIEWER, lasts_s=60))
    assert http.get("/api/v1/jobs").status_code == 200
    server.let_pass(61)
    assert http.get("/api/v1/jobs").status_code == 401


def test_what_is_no_token_is_refused_in_one_way(server: Guarded) -> None:
    own = server.owner
    almost = own[:-1] + ("0" if own[-1] != "0" else "1")
    for shown in ("", "Bearer", "Bearer x", "Basic eDp5", f"Bearer {own} x", f"Token {own}", f"Bearer {almost}"):
        answer = server.http(None, Authorization=shown).get("/api/v1/jobs")
        assert answer.status_code == 401 and answer.json()["type"] == "urn:everstep:problem:unauthenticated", shown
        assert own not in answer.text


def test_nobody_gives_out_more_than_he_has(server: Guarded) -> None:
    admin = server.http(server.token("admin", Role.ADMIN))
    for roles in (["chaos"], ["viewer", "chaos"]):
        assert admin.post("/api/v1/tokens", json={"name": "more", "roles": roles}).status_code == 403
    assert admin.post("/api/v1/tokens", json={"name": "less", "roles": ["operator"]}).status_code == 201
    wrong = admin.post("/api/v1/tokens", json={"name": "bad", "roles": ["root"]})
    assert wrong.status_code == 422 and wrong.json()["errors"][0]["field"].startswith("roles")


def test_health_is_told_to_everybody_and_nothing_else_is(server: Guarded) -> None:
    http = server.http(None)
    assert http.get("/healthz").status_code == http.get("/readyz").status_code == 200
    for path in ("/openapi.json", "/metrics", "/api/v1/version", "/api/v1/none", "/none", "/api/v1/jobs/../tokens"):
        assert http.get(path).status_code == 401, path
    assert http.get("/").status_code in (200, 501), "the page asks who one is; nothing is in it"


# --- a browser ---------------------------------------------------------------------------------------------------------


def test_a_browser_signs_in_by_token_or_link_and_out(server: Guarded) -> None:
    origin = {"Origin": server.url}
    http = server.http(None)
    answer = http.post("/api/v1/session", json={"token": server.owner})
    cookie = answer.headers["Set-Cookie"]
    assert "HttpOnly" in cookie and "SameSite=strict" in cookie and server.owner not in cookie
    assert answer.json()["is_session"] and http.get("/api/v1/whoami").json()["id"] == "local"
    with Client(server.url, token=server.owner) as owner:
        code = owner.login_link().partition("#login=")[2]
    other = server.http(None)
    assert other.post("/api/v1/session", json={"code": code}).status_code == 200
    assert other.get("/api/v1/jobs").status_code == 200
    again = server.http(None).post("/api/v1/session", json={"code": code})
    assert again.status_code == 401 and "everstep login" in again.json()["detail"], "a link is good once"
    assert http.delete("/api/v1/session", headers=origin).status_code == 204
    assert http.get("/api/v1/whoami").status_code == 401 and other.get("/api/v1/whoami").status_code == 200


def test_a_session_ends_with_the_token_it_was_opened_with(server: Guarded) -> None:
    http = server.http(None)
    assert http.post("/api/v1/session", json={"token": server.token("ci", Role.OPERATOR)}).status_code == 200
    with Client(server.url, token=server.owner) as owner:
        owner.revoke_token("tok-ci")
    for said in ("revoked", "without a token"):  # the browser forgets it, and makes no mistake each time that it asks
        answer = http.get("/api/v1/jobs")
        assert answer.status_code == 401 and said in answer.json()["detail"]


def test_a_session_of_the_owner_ends_where_the_owners_token_is_replaced() -> None:
    async def ends() -> None:
        keyring = MemoryKeyring(time.time)
        old, new, none = (Identities(keyring, one, time.time) for one in (digest(mint()), digest(mint()), ""))
        session, code = await old.open_session(LOCAL), await old.make_code(LOCAL)
        assert await old.of_session(session) == LOCAL
        assert await new.of_session(session) is None and await none.of_session(session) is None
        assert await new.of_code(code) is None

    asyncio.run(ends())


ORIGINS: tuple[tuple[dict[str, str], bool], ...] = (
    ({}, False),
    ({"Origin": "null"}, False),
    ({"Origin": "http://127.0.0.1:1"}, False),
    ({"Origin": "https://evil.example"}, False),
    ({"Sec-Fetch-Site": "cross-site"}, False),
    ({"Sec-Fetch-Site": "same-site"}, False),
    ({"Sec-Fetch-Site": "none"}, False),
    ({"Origin": "https://evil.example", "Sec-Fetch-Site": "same-origin"}, False),
    ({"Origin": "{own}"}, True),
    ({"Sec-Fetch-Site": "same-origin"}, True),
)


def test_a_cookie_changes_nothing_from_anothers_page(server: Guarded) -> None:
    http, by_token = server.http(None), server.http(server.owner)
    assert http.post("/api/v1/session", json={"token": server.owner}).status_code == 200
    for method in ("POST", "PUT", "PATCH", "DELETE"):
        for headers, allowed in ORIGINS:
            given = {name: value.format(own=server.url) for name, value in headers.items()}
            answer = http.request(method, "/api/v1/jobs/job-none", headers=given, json={})
            assert (answer.status_code != 403) == allowed, f"{method} {given}: {answer.text}"
        assert by_token.request(method, "/api/v1/jobs/job-none", json={}).status_code != 403, "a token is no cookie"


def test_what_a_form_can_send_is_not_read(server: Guarded) -> None:
    http = server.http(server.owner)
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
        answer = http.post("/api/v1/jobs", content=json.dumps(JOB_FILE), headers={"Content-Type": kind})
        assert answer.status_code == 415 and not server.served.desk.job_ids, kind


def test_names_that_are_not_this_servers_are_refused_before_anybody_is_asked(server: Guarded) -> None:
    for host in ("evil.example", "127.0.0.1.evil.example", "localhost@evil.example", ""):
        answer = server.http(server.owner).get("/api/v1/jobs", headers={"Host": host})
        assert answer.status_code == 400, host


# --- too much ----------------------------------------------------------------------------------------------------------


def test_who_asks_too_often_waits_and_others_do_not(tmp_path: Path) -> None:
    with guarded(tmp_path, requests_per_s=0.01, burst=5.0) as server:
        busy, calm = (server.http(server.token(name, Role.VIEWER)) for name in ("busy", "calm"))
        answers = [busy.get("/api/v1/jobs") for _ in range(8)]
        refused = [answer for answer in answers if answer.status_code == 429]
        assert refused and int(refused[0].headers["Retry-After"]) >= 1 and "try again in" in refused[0].json()["detail"]
        assert calm.get("/api/v1/jobs").status_code == 200


def test_who_guesses_is_not_answered_any_more(tmp_path: Path) -> None:
    with guarded(tmp_path, mistakes_per_s=0.01, mistakes_burst=3.0) as server:
        codes = [server.http(mint()).get("/api/v1/jobs").status_code for _ in range(5)]
        assert codes[:3] == [401] * 3 and codes[-1] == 429
        assert server.http(None).post("/api/v1/session", json={"token": mint()}).status_code == 429
        assert server.http(server.owner).get("/api/v1/jobs").status_code == 200, "nor is anybody else kept out by it"


def test_nobody_writes_the_record_full(tmp_path: Path) -> None:
    with guarded(tmp_path, mistakes_per_s=0.01, mistakes_burst=3.0) as server:
        for path in ("/", "/jobs/x", "/assets/x", "/healthz"):
            assert server.http(None).post(path, json={}).status_code == 401, path
        codes = [server.http(None).post("/api/v1/session", json={}).status_code for _ in range(6)]
        assert codes == [422] * 3 + [429] * 3
        with Client(server.url, token=server.owner) as owner:
            assert [one.status for one in owner.audit().entries] == [422] * 3


def test_refusals_push_only_so_much_out_of_the_record_and_what_was_done_is_all_there(tmp_path: Path) -> None:
    with guarded(tmp_path, refusals_per_s=0.001, refusals_burst=3.0) as server:
        viewer, operator = (server.http(server.token(role, role)) for role in (Role.VIEWER, Role.OPERATOR))
        for _ in range(10):
            assert viewer.post("/api/v1/jobs:cancel", json={"name": "x"}).status_code == 403
            assert operator.post("/api/v1/jobs:cancel", json={"name": "x"}).status_code == 202
        with Client(server.url, token=server.owner) as owner:
            kept = Counter(one.status for one in owner.audit().entries)
        assert kept == {403: 3, 202: 10}


def test_names_of_this_server_may_be_written_in_capitals(tmp_path: Path) -> None:
    with guarded(tmp_path, allowed_hosts=("Train.Example",)) as server:
        assert server.http(server.owner).get("/api/v1/jobs", headers={"Host": "train.example:80"}).status_code == 200


def test_streams_of_one_token_have_a_bound(tmp_path: Path) -> None:
    with guarded(tmp_path, max_open_requests=2) as server:
        http = server.http(server.token("many", Role.VIEWER))
        with http.stream("GET", "/api/v1/live"), http.stream("GET", "/api/v1/live"):
            assert http.get("/api/v1/jobs").status_code == 429
            assert server.http(server.owner).get("/api/v1/jobs").status_code == 200
        eventually(lambda: http.get("/api/v1/jobs").status_code == 200)


# --- the record --------------------------------------------------------------------------------------------------------


def test_each_request_that_is_to_change_something_leaves_one_record(server: Guarded) -> None:
    http = server.http(server.token("ci", Role.OPERATOR))
    http.get("/api/v1/jobs")
    job = http.post("/api/v1/jobs", json=JOB_FILE).json()["id"]
    http.post(f"/api/v1/jobs/{job}:cancel")
    http.post("/api/v1/jobs", json={})
    http.post("/api/v1/tokens", json={"name": "more"})
    with Client(server.url, token=server.owner) as owner:
        found = owner.audit(limit=3)
        rest = owner.audit(cursor=found.next_cursor)
    both = (*found.entries, *rest.entries)
    seen = [(one.name, one.method, one.operation, one.path, one.status, one.source) for one in both]
    assert seen == [
        ("ci", "POST", "create_token", "/api/v1/tokens", 403, "127.0.0.1"),
        ("ci", "POST", "submit", "/api/v1/jobs", 422, "127.0.0.1"),
        ("ci", "POST", "cancel", f"/api/v1/jobs/{job}:cancel", 202, "127.0.0.1"),
        ("ci", "POST", "submit", "/api/v1/jobs", 201, "127.0.0.1"),
    ]
    assert len({one.request_id for one in both}) == 4


def test_what_ends_in_a_bug_is_recorded_and_counted(server: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have been done all the same."""

    async def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    http = server.http(server.owner)
    job = http.post("/api/v1/jobs", json=JOB_FILE).json()["id"]
    monkeypatch.setattr(server.served.desk, "command", broken)
    assert http.post(f"/api/v1/jobs/{job}:cancel").status_code == 500
    later = server.http(server.owner)  # after a bug its connection goes
    newest = later.get("/api/v1/audit").json()["entries"][0]
    assert (newest["operation"], newest["status"]) == ("cancel", 500)
    assert 'everstep_http_requests_total{code="500",method="POST",route="/api/v1/jobs/{job_id}:cancel"} 1.0' in (
        later.get("/metrics").text
    )


def test_nobody_says_for_another_where_he_asks_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PROXIES, raising=False)
    assert not server_config(FastAPI(), Config()).proxy_headers
    monkeypatch.setenv(PROXIES, "10.0.0.1")
    assert server_config(FastAPI(), Config()).proxy_headers


def test_a_store_that_is_away_is_said_and_lets_nobody_in(server: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    async def away(digest: str) -> None:
        raise Unavailable("Redis did not answer; see that it runs")

    monkeypatch.setattr(server.keyring, "token_with", away)
    answer = server.http(server.token("ci", Role.VIEWER)).get("/api/v1/jobs")
    assert answer.status_code == 503 and answer.headers["Retry-After"] == "1"
    assert server.http(server.owner).get("/api/v1/jobs").status_code == 200, "its owner's token is in the state folder"


# --- files and the command line ----------------------------------------------------------------------------------------


def test_the_owners_token_is_made_once_and_is_the_owners_alone(tmp_path: Path) -> None:
    token = own_token(tmp_path)
    path = tmp_path / FILE
    assert is_whole(token) and own_token(tmp_path) == token and stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [one.name for one in tmp_path.iterdir()] == [FILE]
    assert own_token(tmp_path / "not" / "there")
    (tmp_path / "shared").mkdir()
    with ThreadPoolExecutor(8) as many:
        assert len(set(many.map(own_token, [tmp_path / "shared"] * 32))) == 1
    path.chmod(0o644)
    with pytest.raises(Conflict, match="can be read by others"):
        own_token(tmp_path)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "example.org"])
def test_where_others_can_reach_it_auth_is_not_turned_off(host: str) -> None:
    with pytest.raises(Refused, match="auth is off"):
        require_auth(host, False)
    require_auth(host, True)
    require_auth("127.0.0.1", False)


def test_a_client_finds_the_token_of_a_server_its_user_has_started(
    server: Guarded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))
    (tmp_path / FILE).write_text(server.owner)
    (tmp_path / "server.json").write_text(json.dumps({"url": server.url, "pid": os.getpid()}))
    assert find_token(server.url) is None
    note_server(server.url, tmp_path)
    with Client(server.url) as client:
        assert client.whoami().name == "local admin"
    assert find_token("http://example.org:80") is None and find_token(f"{server.url}1") is None
    (tmp_path / "server.json").write_text(json.dumps({"url": server.url, "pid": 2**22 + 1}))
    assert find_token(server.url) is None, "nobody that runs: whoever listens there now is somebody else"
    (tmp_path / "server.json").write_text(json.dumps({"url": server.url, "pid": os.getpid()}))
    monkeypatch.setenv("EVERSTEP_TOKEN_FILE", str(tmp_path / "given"))
    (tmp_path / "given").write_text("of-a-file\n")
    assert find_token(server.url) == "of-a-file"
    monkeypatch.setenv("EVERSTEP_TOKEN", "of-the-environment")
    assert find_token(server.url) == "of-the-environment" and find_token(server.url, "given") == "given"
    forget_server(server.url)


def test_the_command_line_makes_lists_and_revokes_tokens(server: Guarded, tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(server.owner)
    (tmp_path / "server.json").write_text(json.dumps({"url": server.url, "pid": os.getpid()}))

    def everstep(*arguments: str, token: str | None = None) -> Result:
        given = {"EVERSTEP_TOKEN": token or ""}
        return CliRunner(env=given).invoke(app, ["--state-dir", str(tmp_path), *arguments])

    assert "local admin (local): admin, chaos" in everstep("whoami").stdout
    made = everstep("token", "create", "ci", "--role", "viewer", "--project", "mine", "--expires", "12h")
    token = next(word for word in made.stdout.split() if is_whole(word))
    assert "viewer in mine" in everstep("whoami", token=token).stdout
    listed = everstep("token", "ls")
    assert "ci" in listed.stdout and "mine" in listed.stdout and token not in listed.stdout
    refused = everstep("token", "create", "more", token=token)
    assert refused.exit_code == 3 and "needs the role admin" in refused.stderr
    (one,) = json.loads(everstep("token", "ls", "--json").stdout)
    assert everstep("token", "revoke", one["id"]).exit_code == 0
    wrong = everstep("ls", token=token)
    assert wrong.exit_code == 3 and "revoked" in wrong.stderr and token not in wrong.output
    assert everstep("login").stdout.startswith(f"{server.url}/#login=")
    seen = everstep("audit").stdout
    assert "revoke_token" in seen and "create_token /api/v1/tokens 403" in " ".join(seen.split())
    assert everstep("token", "create", "x", "--expires", "soon").exit_code == 2


def test_the_newest_job_is_found_among_those_of_others(server: Guarded) -> None:
    owner = server.http(server.owner)
    mine = owner.post("/api/v1/jobs", json={**JOB_FILE, "project": "mine"}).json()["id"]
    for _ in range(51):
        assert owner.post("/api/v1/jobs", json={**JOB_FILE, "project": "theirs"}).status_code == 201
    with Client(server.url, token=server.token("me", Role.VIEWER, projects=["mine"])) as client:
        assert find_job(client, "last") == mine


def test_without_a_token_the_command_line_says_what_is_wanted(server: Guarded) -> None:
    answer = CliRunner().invoke(app, ["--url", server.url, "ls"])
    assert answer.exit_code == 3 and "EVERSTEP_TOKEN" in answer.stderr


def test_no_answer_names_the_software_below(server: Guarded) -> None:
    for path in ("/healthz", "/api/v1/none", "/api/v1/jobs"):
        headers = httpx2.get(f"{server.url}{path}", trust_env=False).headers
        assert headers["X-Content-Type-Options"] == "nosniff"
