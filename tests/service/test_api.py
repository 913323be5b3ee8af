"""The API over a real port: jobs are submitted, looked at and ended; it says whether it is well."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml

from api.client import ApiError, Client, Unreachable
from orchestrator.domain.access import Role, Submitter
from orchestrator.domain.checkpoint import CheckpointRef
from orchestrator.domain.cluster import Node
from orchestrator.domain.codec import encode
from orchestrator.domain.errors import Unavailable
from orchestrator.domain.events import (
    CancelRequested,
    CheckpointNow,
)
from orchestrator.domain.failure import Cause, Fault
from orchestrator.domain.ids import Device, Generation, JobId, NodeId, Step
from orchestrator.domain.incident import Incident
from orchestrator.domain.kinds import KINDS
from orchestrator.domain.state import Cancelled, Closing, Failed, Queued, Reforming, Running, Succeeded
from tests.desk import NOW, a_plan, first_generation
from tests.keys import guarded
from tests.samples import PROFILE
from tests.served import JOB, Served, eventually, running

pytestmark = pytest.mark.timeout(120)
PROBLEM = "application/problem+json"


def a_file(**train: Any) -> dict[str, Any]:
    steps = {"steps": 100, "micro_batches": 4, "micro_batch_size": 2, "sequence": 64}
    return {"name": "byte-gpt", "program": "causal_lm", "data": {"files": ["{stdlib}"]}, "train": steps | train}


# --- submitting ----------------------------------------------------------------------------------------------------------


def test_a_submitted_job_is_recorded_and_located(served: Served, http: httpx2.Client) -> None:
    answer = http.post("/api/v1/jobs", json=a_file())
    assert answer.status_code == 201
    job = answer.json()["id"]
    assert job.startswith("job-") and len(job) == 30
    assert answer.headers["location"] == f"/api/v1/jobs/{job}"
    found = http.get(answer.headers["location"]).json()
    assert (found["status"], found["step"], found["steps"]) == ("PENDING", 0, 100)
    assert found["spec"]["train"]["warmup_steps"] == 10, "defaults are written out"
    assert found["created_at"].endswith("Z")


def test_yaml_is_read_by_its_content_type(served: Served, http: httpx2.Client) -> None:
    text = yaml.safe_dump(a_file() | {"name": "y"})
    answer = http.post("/api/v1/jobs", content=text, headers={"content-type": "application/yaml; charset=utf-8"})
    assert answer.status_code == 201 and answer.json()["name"] == "y"
    assert http.post("/api/v1/jobs", content=text, headers={"content-type": "text/plain"}).status_code == 415


def test_a_repeated_key_replays_the_first_answer_and_makes_no_second_job(served: Served, http: httpx2.Client) -> None:
    headers = {"Idempotency-Key": "k1"}
    first = http.post("/api/v1/jobs", json=a_file(), headers=headers)
    again = http.post("/api/v1/jobs", json=a_file(), headers=headers)
    assert (first.status_code, again.status_code) == (201, 200)
    assert again.json() == first.json()
    assert "idempotency-replayed" not in first.headers and again.headers["idempotency-replayed"] == "true"
    assert len(served.desk.job_ids) == 1


def test_a_key_used_for_another_job_is_refused(served: Served, http: httpx2.Client) -> None:
    headers = {"Idempotency-Key": "k1"}
    http.post("/api/v1/jobs", json=a_file(), headers=headers)
    answer = http.post("/api/v1/jobs", json=a_file(steps=101), headers=headers)
    assert answer.status_code == 422 and answer.json()["type"] == "urn:everstep:problem:key-reused"
    assert http.post("/api/v1/jobs", json=a_file(), headers={"Idempotency-Key": "k" * 256}).status_code == 422
    assert len(served.desk.job_ids) == 1


def test_a_bad_field_is_named_with_its_value_and_range_and_nothing_is_recorded(served: Served, http: httpx2.Client) -> None:
    answer = http.post("/api/v1/jobs", json=a_file(steps=0))
    assert answer.status_code == 422 and answer.headers["content-type"] == PROBLEM
    problem = answer.json()
    assert problem["detail"] == "train.steps is 0: must be a whole number 1..1000000000"
    assert problem["errors"] == [
        {
            "field": "train.steps",
            "value": 0,
            "message": "must be a whole number 1..1000000000",
            "allowed": "a whole number 1..1000000000",
        }
    ]
    assert problem["request_id"] == answer.headers["x-request-id"]
    assert not served.desk.job_ids


def test_a_job_may_have_an_id_of_its_users_own_which_never_names_another(served: Served, http: httpx2.Client) -> None:
    path = "/api/v1/jobs/job-nightly-7"
    first, again = (http.put(path, json=a_file()) for _ in range(2))
    assert (first.status_code, again.status_code) == (201, 200) and first.json() == again.json()
    assert again.headers["idempotency-replayed"] == "true" and first.headers["location"] == path
    other = http.put(path, json=a_file(steps=101))
    assert other.status_code == 409 and "choose another one" in other.json()["detail"]
    assert served.desk.job_ids == ["job-nightly-7"] and served.desk.record("job-nightly-7").spec.train.steps == 100
    for bad in ("nightly", "job-", "job-A", "job-a_b", f"job-{'x' * 60}"):
        refused = http.put(f"/api/v1/jobs/{bad}", json=a_file())
        assert refused.status_code == 422, bad


def test_twenty_who_submit_one_id_at_once_make_one_job(served: Served, client: Client) -> None:
    with ThreadPoolExecutor(20) as pool:
        made = list(pool.map(lambda _: client.submit(a_file(), id="job-one").id, range(20)))
    assert set(made) == {"job-one"} and served.desk.job_ids == ["job-one"]


# --- only if it is as it was seen -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["PATCH", "cancel", "pause", "resume", "checkpoint"])
def test_what_rests_on_an_outdated_look_is_refused_whole(served: Served, http: httpx2.Client, verb: str) -> None:
    running(served)
    path = f"/api/v1/jobs/{JOB}" + ("" if verb == "PATCH" else f":{verb}")
    method, body = ("PATCH", {"target": 2, "priority": 3}) if verb == "PATCH" else ("POST", None)

    def ask(tag: str) -> httpx2.Response:
        return http.request(method, path, json=body, headers={"If-Match": tag})

    seen = http.get(f"/api/v1/jobs/{JOB}")
    tag = seen.headers["etag"]
    assert tag == f'"{seen.json()["revision"]}"'
    served.desk.step(JOB, loss=4.0)
    assert http.get(f"/api/v1/jobs/{JOB}").headers["etag"] == tag, "a step changes nothing that anybody decides on"
    assert ask(tag).status_code == 202
    asked = len(served.desk.asked)
    assert asked == (2 if verb == "PATCH" else 1), "both parts of one request are written"
    late = ask(tag)
    assert late.status_code == 412 and late.headers["content-type"] == PROBLEM
    assert late.json()["type"] == "urn:everstep:problem:outdated" and "look at it again" in late.json()["detail"]
    assert len(served.desk.asked) == asked
    assert ask(http.get(f"/api/v1/jobs/{JOB}").headers["etag"]).status_code == 412, "what was asked shows nowhere yet"
    assert ask("*").status_code == 202
    served.desk.take_up()
    assert ask(http.get(f"/api/v1/jobs/{JOB}").headers["etag"]).status_code == 202
    assert ask('W/"1"').status_code == ask("1").status_code == 422


def test_two_people_who_scale_what_both_have_seen_do_not_undo_each_other(served: Served, client: Client) -> None:
    running(served)
    seen = client.job(JOB).revision
    client.resize(JOB, target=2, if_revision=seen)
    blind = client.job(JOB)
    assert blind.size.target != 2, "nobody has answered yet"
    with pytest.raises(ApiError, match="look at it again"):
        client.resize(JOB, max_devices=8, if_revision=blind.revision)
    with pytest.raises(ApiError, match="look at it again") as refused:
        client.resize(JOB, target=8, if_revision=seen)
    assert (refused.value.status, refused.value.kind) == (412, "outdated")


# --- checkpoints ---------------------------------------------------------------------------------------------------------


def test_checkpoints_are_listed_newest_first_with_what_they_cost(served: Served, client: Client) -> None:
    running(served)
    assert client.checkpoints(JOB) == []
    newest = CheckpointRef(
        step=Step(20), generation=Generation(2), path="/c/step-00000020.g2", total_bytes=3000, new_bytes=100, seconds=0.5,
        at=NOW, is_proven=True,
    )  # fmt: skip
    before = CheckpointRef(step=Step(10), generation=Generation(1), path="/c/step-00000010.g1")
    served.desk.change(served.desk.record(JOB), checkpoint=newest, older=(before,))
    found = client.checkpoints(JOB)
    assert [(one.step, one.generation, one.path) for one in found] == [(20, 2, newest.path), (10, 1, before.path)]
    one = found[0]
    assert (one.kind, one.new_bytes, one.total_bytes, one.seconds, one.verified, one.tier) == (
        *("base", 100, 3000, 0.5, True),
        "shared",
    )
    assert (found[1].total_bytes, found[1].seconds, found[1].verified) == (None, None, False), "an earlier version wrote it"
    assert client.job(JOB).checkpoint == one
    with pytest.raises(ApiError, match="there is no job job-2"):
        client.checkpoints("job-2")


def test_a_checkpoint_is_asked_for_while_the_job_is_not_over(served: Served, client: Client) -> None:
    running(served)
    assert client.checkpoint_now(JOB).message == f"a checkpoint of {JOB} has been asked for"
    assert served.desk.asked == [CheckpointNow(job=JobId(JOB))]
    served.desk.become(JOB, Succeeded(at=NOW), "ended", "done")
    with pytest.raises(ApiError, match="is over"):
        client.checkpoint_now(JOB)


# --- looking -------------------------------------------------------------------------------------------------------------


def test_jobs_are_listed_in_pages_newest_first_and_by_state(served: Served, client: Client) -> None:
    for number in range(7):
        served.desk.add(f"job-{number}", state=Succeeded(at=NOW) if number % 2 else Queued(reason="busy"))
    first = client.jobs(limit=3)
    assert [job.id for job in first.jobs] == ["job-6", "job-5", "job-4"]
    assert [job.id for job in client.jobs(limit=3, cursor=first.next_cursor).jobs] == ["job-3", "job-2", "job-1"]
    assert [job.id for job in client.all_jobs()] == [f"job-{number}" for number in reversed(range(7))]
    done = client.jobs(state=["SUCCEEDED"], limit=2)
    assert [job.id for job in done.jobs] == ["job-5", "job-3"]
    assert [job.id for job in client.jobs(state=["SUCCEEDED"], limit=2, cursor=done.next_cursor).jobs] == ["job-1"]


def test_jobs_are_listed_by_name_project_and_when_they_were_submitted(
    served: Served, client: Client, http: httpx2.Client
) -> None:
    for number in range(4):
        served.desk.add(f"job-{number}", created_at=NOW + 60 * number)
    record = served.desk.record("job-2")
    served.desk.change(record, spec=replace(record.spec, project="nlp", name="other"))

    def listed(**asked: Any) -> list[str]:
        return [job.id for job in client.jobs(**asked).jobs]

    at = datetime.fromtimestamp(NOW, UTC)
    assert listed(project="nlp") == listed(name="other") == listed(name="other", project="nlp") == ["job-2"]
    assert listed(project="nlp", name=record.spec.name) == []
    assert listed(since=at + timedelta(seconds=60)) == ["job-3", "job-2", "job-1"]
    assert listed(since=at + timedelta(seconds=60), until=at + timedelta(seconds=180)) == ["job-2", "job-1"]
    assert listed(until=at) == []
    refused = http.get("/api/v1/jobs?since=2026-05-01T12:00:00")
    assert refused.status_code == 422, "an instant without a zone is nobody's"


def test_jobs_are_sorted_counted_on_request_and_found_by_who_submitted_them(
    served: Served, client: Client, http: httpx2.Client
) -> None:
    ci, lab = Submitter(id="tok-1", name="ci"), Submitter(id="tok-2", name="lab")
    for number, by in enumerate((ci, lab, ci, None)):
        served.desk.add(f"job-{number}", by=by)
    for number, at in ((0, NOW + 9), (2, NOW + 3)):
        served.desk.change(served.desk.record(f"job-{number}"), state=Succeeded(at=at))

    def listed(**asked: Any) -> list[str]:
        return [job.id for job in client.jobs(**asked).jobs]

    assert listed(sort="created_at") == [f"job-{number}" for number in range(4)]
    assert listed(sort="finished_at") == ["job-2", "job-0"] and listed(sort="-finished_at") == ["job-0", "job-2"]
    first = client.jobs(sort="finished_at", limit=1)
    assert listed(sort="finished_at", limit=1, cursor=first.next_cursor) == ["job-0"]
    with pytest.raises(ApiError, match="is not an id"):
        client.jobs(cursor=first.next_cursor)
    assert listed(user="ci") == listed(user="tok-1") == ["job-2", "job-0"] and listed(user="nobody") == []
    assert client.job("job-1").user == "lab" and client.job("job-3").user is None
    assert client.jobs().total is None, "it is counted only where that is asked for"
    assert client.jobs(limit=1, total=True).total == 4
    assert client.jobs(limit=1, total=True, user="ci").total == 2
    assert client.jobs(total=True, sort="finished_at").total == 2 and client.jobs(total=True).total_is_whole
    assert http.get("/api/v1/jobs?sort=name").status_code == 422


def test_who_submits_a_job_is_kept_with_it(tmp_path: Path) -> None:
    with guarded(tmp_path) as server, Client(server.url, token=server.token("ci", Role.OPERATOR)) as client:
        own = client.submit(a_file(), id="job-own")
        other = client.submit(a_file())
        with Client(server.url, token=server.owner) as owner:
            owner.submit(a_file())
            assert {job.id for job in owner.jobs(user="ci").jobs} == {own.id, other.id}
            assert len(owner.jobs(user="local admin").jobs) == 1


def test_a_running_job_shows_its_plan_seats_and_rate(served: Served, client: Client) -> None:
    running(served, steps=2)
    job = client.job(JOB)
    assert (job.status, job.step, job.loss, job.generation) == ("RUNNING", 2, 4.0, 1)
    assert job.tokens_per_s == pytest.approx(4 * 2 * 64 / 0.2)
    assert job.plan is not None and (job.plan.tp, job.plan.pp, job.plan.dp) == (2, 2, 2)
    seat = job.plan.seats[5]
    assert (seat.rank, seat.device, seat.pipeline, seat.stage, seat.tp, seat.pid) == (5, "node-3/1", 1, 0, 1, 4005)
    assert job.spec["model"] == {"kind": "tiny"}, "a program's own settings come back untouched"


def test_a_recovering_job_shows_the_incident(served: Served, client: Client) -> None:
    running(served, steps=2)
    fault = Fault(cause=Cause.RANK_LOST, message="rank 3 exited by SIGKILL", at=NOW, devices=(Device(NodeId("node-2"), 1),))
    incident = Incident(number=1, fault=fault, generation=Generation(1), phases={"detect": 0.01}, committed=Step(2))
    closing = Closing(generation=Generation(1), awaited=frozenset())
    state = Reforming(fault=fault, closing=closing, forming=None)
    served.desk.become(JOB, state, "rank_lost", fault.message, incidents=(incident,))
    job = client.job(JOB)
    assert (job.status, job.reason, job.recoveries, job.tokens_per_s) == ("RECOVERING", fault.message, 1, None)
    assert job.incidents[0].devices == ("node-2/1",) and job.incidents[0].phases == {"detect": 0.01}


def test_a_failed_job_tells_rank_exit_code_and_last_lines(served: Served, client: Client) -> None:
    running(served)
    failed = Failed(at=NOW, message="raised", device=Device(NodeId("node-2"), 0), exit_code=1, log_tail=("a", "b"))
    served.desk.become(JOB, failed, "ended", "raised")
    failure = client.job(JOB).failure
    assert failure is not None
    assert (failure.message, failure.rank, failure.exit_code, failure.log_tail) == ("raised", 2, 1, ("a", "b"))


def test_a_loss_that_is_no_number_is_null(served: Served, http: httpx2.Client) -> None:
    running(served)
    served.desk.step(JOB, loss=float("nan"))
    assert http.get(f"/api/v1/jobs/{JOB}").json()["loss"] is None
    assert http.get(f"/api/v1/jobs/{JOB}/metrics").json()[0]["loss"] is None


def test_metrics_keep_a_step_that_was_run_again_under_its_generation(served: Served, client: Client) -> None:
    running(served, steps=3)
    served.desk.change(served.desk.record(JOB), committed=Step(1), generation=Generation(2))
    served.desk.step(JOB, loss=4.0)
    steps = client.metrics(JOB)
    assert [(step.generation, step.step) for step in steps] == [(1, 1), (1, 2), (1, 3), (2, 2)]
    assert [step.step for step in client.metrics(JOB, since=steps[1].id)] == [3, 2]
    assert steps[0].tokens == 1024 and steps[0].seconds == 0.2 and steps[0].norm == 1.5
    assert list(client.all_metrics(JOB)) == steps


def test_a_step_tells_for_how_long_each_rank_computes(served: Served, client: Client) -> None:
    running(served)
    served.desk.step(JOB, loss=4.0, busy={Device(NodeId("node-1"), 0): 0.15, Device(NodeId("node-2"), 1): 0.1})
    served.desk.step(JOB, loss=3.9)
    assert [step.busy for step in client.metrics(JOB)] == [{"node-1/0": 0.15, "node-2/1": 0.1}, {}]


def test_mfu_is_of_the_data_sheets_of_the_plans_devices(served: Served, client: Client) -> None:
    running(served, steps=1)
    served.desk.change(served.desk.record(JOB), profile=PROFILE)
    assert client.job(JOB).mfu is None, "nobody knows what its nodes are"
    kinds = ("H100", "H100", "A100", "A100")
    served.desk.set_nodes(*(Node(id=NodeId(f"node-{i}"), kind=kind, num_devices=2) for i, kind in enumerate(kinds, 1)))
    eventually(lambda: client.job(JOB).mfu is not None)  # nodes are looked at now and then, for everybody
    found = client.job(JOB)
    peak = 4 * (KINDS["H100"].bf16_tflops + KINDS["A100"].bf16_tflops) * 1e12
    assert found.tokens_per_s is not None
    assert found.mfu == pytest.approx(6 * PROFILE.num_params * found.tokens_per_s / peak)
    served.desk.become(JOB, Cancelled(at=NOW), "ended", "cancelled")
    assert client.job(JOB).mfu is None, "it does not step"


# --- ending --------------------------------------------------------------------------------------------------------------


def test_cancel_is_recorded_and_an_ended_job_refuses_it(served: Served, client: Client) -> None:
    running(served)
    client.cancel(JOB)
    client.cancel(JOB)
    assert served.desk.asked == [CancelRequested(job=JobId(JOB))] * 2
    served.desk.become(JOB, Cancelled(at=NOW), "ended", "cancelled")
    with pytest.raises(ApiError, match="is over \\(CANCELLED\\)") as caught:
        client.cancel(JOB)
    assert caught.value.status == 409


def test_whoever_asks_something_of_a_job_is_named(tmp_path: Path) -> None:
    with guarded(tmp_path) as found, Client(found.url, token=found.token("ci", Role.OPERATOR)) as client:
        running(found.served)
        client.pause(JOB)
        client.resume(JOB)
        client.checkpoint_now(JOB)
        client.resize(JOB, target=4, priority=2)
        client.cancel(JOB)
        client.to_many("cancel", state=["RUNNING"])
        assert [command.by for command in found.served.desk.asked] == ["ci"] * 7  # type: ignore[union-attr]


def test_a_deadline_is_shown_as_long_as_it_can_pass(served: Served, client: Client) -> None:
    running(served)
    record = served.desk.record(JOB)
    assert client.job(JOB).next_action_at is None
    limited = replace(record.spec, start_by_s=600, max_runtime_s=3600)
    served.desk.change(record, spec=limited, started_at=None)
    assert client.job(JOB).next_action_at == datetime.fromtimestamp(NOW + 600, UTC)
    on_devices = replace(record.turn, held_s=100.0, held_since=NOW + 50)
    served.desk.change(record, spec=limited, started_at=NOW + 50, turn=on_devices)
    assert client.job(JOB).next_action_at == datetime.fromtimestamp(NOW + 50 + 3500, UTC)
    served.desk.change(record, spec=limited, state=Cancelled(at=NOW))
    assert client.job(JOB).next_action_at is None


# --- health --------------------------------------------------------------------------------------------------------------


def test_readiness_names_every_check(served: Served, http: httpx2.Client) -> None:
    served.desk.checks = {"store": "ok", "durability": "ok"}
    assert http.get("/readyz").json() == {"status": "ok", "checks": {"store": "ok", "durability": "ok"}}
    served.desk.checks["durability"] = "appendonly is off; turn it on"
    answer = http.get("/readyz")
    assert answer.status_code == 503 and answer.headers["content-type"] == PROBLEM
    assert answer.json()["checks"] == served.desk.checks
    assert answer.json()["detail"] == "durability: appendonly is off; turn it on"
    assert http.get("/healthz").json() == {"status": "ok", "version": "1.2.3"}


def test_prometheus_reads_jobs_requests_and_steps_of_unfinished_jobs_only(served: Served, http: httpx2.Client) -> None:
    running(served, steps=3)
    served.desk.add("job-2", state=Succeeded(at=NOW))
    http.get(f"/api/v1/jobs/{JOB}")
    http.get("/nope/anything")
    text = http.get("/metrics").text
    assert 'everstep_jobs{state="RUNNING"} 1.0' in text and 'everstep_jobs{state="SUCCEEDED"} 1.0' in text
    assert f'everstep_job_committed_step{{job="{JOB}"}} 3.0' in text and "job-2" not in text
    assert 'everstep_http_requests_total{code="200",method="GET",route="/api/v1/jobs/{job_id}"} 1.0' in text
    assert 'route="unmatched"' in text and "anything" not in text
    assert 'everstep_build_info{version="1.2.3"} 1.0' in text


def test_the_api_describes_itself(http: httpx2.Client) -> None:
    described = http.get("/openapi.json").json()
    assert described["openapi"].startswith("3.1")
    assert set(described["paths"]) >= {
        "/api/v1/jobs",
        "/api/v1/jobs/{job_id}",
        "/api/v1/jobs/{job_id}:cancel",
        "/api/v1/jobs/{job_id}/events",
        "/api/v1/jobs/{job_id}/metrics",
        "/api/v1/jobs/{job_id}/logs",
        "/api/v1/nodes",
        "/api/v1/faults",
        "/api/v1/jobs/{job_id}/faults",
    }
    body = described["paths"]["/api/v1/jobs"]["post"]["requestBody"]["content"]
    assert set(body) == {"application/json", "application/yaml"}
    json.dumps(described)


# --- the SDK's patience --------------------------------------------------------------------------------------------------


def test_the_sdk_waits_out_a_store_that_is_away_for_a_moment(served: Served, client: Client) -> None:
    running(served)
    served.desk.broken = Unavailable("away")
    threading.Timer(0.3, lambda: setattr(served.desk, "broken", None)).start()
    assert client.job(JOB).id == JOB


def test_the_sdk_gives_up_on_a_server_that_is_not_there() -> None:
    with (
        Client("http://127.0.0.1:9", retry_s=0.3) as client,
        pytest.raises(Unreachable, match=r"no answer from http://127\.0\.0\.1:9"),
    ):
        client.jobs()


def test_where_each_generation_trained_is_kept_in_the_history(served: Served, client: Client, http: httpx2.Client) -> None:
    before, now = a_plan(), a_plan(("node-1", "node-3"))
    running(served)
    served.desk.tell(JOB, "running", "generation 1 trains", plan=encode(before))
    state = Running(generation=Generation(2), plan=now)
    changes = first_generation(now) | {"generation": Generation(2)}
    served.desk.become(JOB, state, "running", "generation 2 trains", **changes)
    first, second = http.get(f"/api/v1/jobs/{JOB}/plans").json()
    assert (first["generation"], first["summary"], first["seats"][0]["pid"]) == (1, before.describe(), None)
    assert (second["generation"], second["summary"], second["seats"][0]["pid"]) == (2, now.describe(), 4000)
