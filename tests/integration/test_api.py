"""The API over a real port: commands in, projections out, every error a problem, streams that resume and end."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml

from api.client import ApiError, Client, EventView, GapView, StepView, Unreachable
from orchestrator.domain.checkpoint import CheckpointRef
from orchestrator.domain.cluster import Node, NodeStatus
from orchestrator.domain.cordon import Cordon
from orchestrator.domain.errors import Unavailable
from orchestrator.domain.events import (
    CancelRequested,
    CheckpointNow,
    CordonRequested,
    NodeRequested,
    ReleaseRequested,
    ResizeRequested,
    UncordonRequested,
)
from orchestrator.domain.faults import FaultKind, FaultRequested, Injected, Verdict
from orchestrator.domain.ids import Device, Generation, JobId, NodeId, Step
from orchestrator.domain.job import (
    Cancelled,
    Cause,
    Closing,
    Failed,
    Fault,
    Incident,
    Queued,
    Reforming,
    Running,
    Succeeded,
)
from orchestrator.domain.quarantine import Quarantine, Standing
from orchestrator.domain.size import Size
from tests.desk import NOW, PlayedDesk, a_plan, first_generation
from tests.served import Served, eventually, serve

pytestmark = pytest.mark.timeout(120)
PROBLEM = "application/problem+json"
JOB = "job-1"


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with serve(tmp_path) as running:
        yield running


@pytest.fixture
def http(served: Served) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=served.url, trust_env=False) as client:
        yield client


@pytest.fixture
def client(served: Served) -> Iterator[Client]:
    with Client(served.url, retry_s=2) as client:
        yield client


def a_file(**train: Any) -> dict[str, Any]:
    steps = {"steps": 100, "micro_batches": 4, "micro_batch_size": 2, "sequence": 64}
    return {"name": "byte-gpt", "program": "causal_lm", "data": {"files": ["{stdlib}"]}, "train": steps | train}


def running(served: Served, steps: int = 0) -> None:
    plan = a_plan()
    served.desk.add(JOB)
    served.desk.become(JOB, Running(generation=Generation(1), plan=plan), "running", "trains", **first_generation(plan))
    for number in range(steps):
        served.desk.step(JOB, loss=5.0 - number)


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


def test_a_body_that_is_too_large_is_refused_with_or_without_a_length(served: Served, http: httpx2.Client) -> None:
    headers = {"content-type": "application/json"}
    assert http.post("/api/v1/jobs", content=b" " * (2 << 20), headers=headers).status_code == 413

    def pieces() -> Iterator[bytes]:
        for _ in range(20):
            yield b" " * (1 << 17)

    answer = http.post("/api/v1/jobs", content=pieces(), headers=headers)
    assert answer.status_code == 413 and answer.headers["content-type"] == PROBLEM


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


# --- commands ------------------------------------------------------------------------------------------------------------


def test_cancel_is_recorded_and_an_ended_job_refuses_it(served: Served, client: Client) -> None:
    running(served)
    client.cancel(JOB)
    client.cancel(JOB)
    assert served.desk.asked == [CancelRequested(job=JobId(JOB))] * 2
    served.desk.become(JOB, Cancelled(at=NOW), "ended", "cancelled")
    with pytest.raises(ApiError, match="is over \\(CANCELLED\\)") as caught:
        client.cancel(JOB)
    assert caught.value.status == 409


def test_nodes_are_listed_and_added(served: Served, client: Client) -> None:
    served.desk.set_nodes(Node(id=NodeId("node-1"), kind="H100", num_devices=2))
    assert [(node.id, node.status) for node in client.nodes()] == [("node-1", "UP")]
    client.add_node("B200", 4, {"rack": "r1"})
    assert served.desk.asked == [NodeRequested(kind="B200", num_devices=4, labels={"rack": "r1"})]
    with pytest.raises(ApiError, match="kind is 'B300': must be one of"):
        client.add_node("B300")


def test_nodes_are_kept_free_of_new_work_emptied_and_taken_away(served: Served, client: Client) -> None:
    served.desk.set_nodes(*(Node(id=NodeId(f"node-{number}"), kind="H100", num_devices=2) for number in (1, 2, 3, 4)))
    asked = [client.cordon_node("node-1"), client.drain_node("node-1"), client.remove_node("node-1", 2.5)]
    assert [one.message.count("node-1") for one in asked] == [1, 1, 1]
    cordon = CordonRequested(node=NodeId("node-1"))
    drain = replace(cordon, drain=True)
    assert served.desk.asked == [cordon, drain, replace(drain, remove=True, deadline_s=2.5)]
    found = Cordon(node=NodeId("node-1"), since=NOW), Cordon(node=NodeId("node-2"), since=NOW, drains=True)
    served.desk.write(cordons=(*found, Cordon(node=NodeId("node-3"), since=NOW, drains=True, is_empty=True)))
    assert [node.scheduling for node in client.nodes()] == ["cordoned", "draining", "drained", "open"]
    client.uncordon_node("node-1")
    assert served.desk.asked[3:] == [UncordonRequested(node=NodeId("node-1"))]
    with pytest.raises(ApiError, match="node-4 is not cordoned") as caught:
        client.uncordon_node("node-4")
    assert caught.value.status == 409
    for ask in (client.cordon_node, client.uncordon_node, client.drain_node, client.remove_node):
        with pytest.raises(ApiError, match="nodes: node-1, node-2, node-3, node-4") as caught:
            ask("node-9")
        assert caught.value.status == 404


def test_a_job_is_resized_within_bounds_that_make_sense(served: Served, client: Client) -> None:
    running(served)
    client.resize(JOB, target=4, max_devices=8)
    assert served.desk.asked == [ResizeRequested(job=JobId(JOB), size=Size(max_devices=8, target=4))]
    served.desk.change(served.desk.record(JOB), size=Size(min_devices=2, max_devices=8, target=4))
    assert client.job(JOB).size.target == 4
    for wanted, words in (
        ({"target": 9}, "target is 9, the job may have 2 to 8"),
        ({"target": 1}, "target is 1"),
        ({"target": 0, "min_devices": 9}, "max_devices is 8, below min_devices 9"),
        ({}, "nothing is to be changed"),
        ({"min_devices": 0}, "min_devices"),
    ):
        with pytest.raises(ApiError, match=words) as caught:
            client.resize(JOB, **wanted)
        assert caught.value.status == 422
    assert len(served.desk.asked) == 1


def test_devices_that_are_kept_out_are_shown_and_released(served: Served, client: Client) -> None:
    served.desk.set_nodes(*(Node(id=NodeId(name), kind="H100", num_devices=2) for name in ("node-1", "node-2")))
    held = Quarantine(
        device=Device(NodeId("node-1"), 1),
        reason="it differs",
        since=NOW,
        job=JobId(JOB),
        strikes=2,
        standing=Standing.HELD,
    )
    served.desk.write(quarantine=(held,))
    first, second = client.nodes()
    assert [(one.device, one.standing, one.strikes, one.job) for one in first.quarantine] == [("node-1/1", "held", 2, JOB)]
    assert second.quarantine == ()
    assert "node-1/1" in client.release_node("node-1").message
    assert served.desk.asked == [ReleaseRequested(node=NodeId("node-1"))]
    for name, status, words in (("node-2", 409, "nothing is held against"), ("node-9", 404, "nodes: node-1, node-2")):
        with pytest.raises(ApiError, match=words) as caught:
            client.release_node(name)
        assert caught.value.status == status


def test_faults_name_what_they_kill(served: Served, client: Client) -> None:
    running(served)
    up, lost = (Node(id=NodeId(name), kind="H100", num_devices=2) for name in ("node-1", "node-2"))
    served.desk.set_nodes(up, replace(lost, status=NodeStatus.LOST))
    client.kill_rank(JOB, 7)
    client.kill_node("node-1")
    assert [(item.fault, item.rank, item.node) for item in served.desk.asked if isinstance(item, FaultRequested)] == [
        (FaultKind.KILL, 7, None),
        (FaultKind.NODE_KILL, None, "node-1"),
    ]
    for call, status, words in (
        (lambda: client.kill_rank(JOB, 8), 422, "must be 0..7 in generation 1"),
        (lambda: client.kill_rank("job-x", 0), 404, "there is no job job-x"),
        (lambda: client.kill_node("node-9"), 404, "nodes: node-1, node-2"),
        (lambda: client.kill_node("node-2"), 409, "is LOST already"),
    ):
        with pytest.raises(ApiError, match=words) as caught:
            call()
        assert caught.value.status == status


def test_a_fault_has_an_id_by_which_its_verdict_is_found(served: Served, client: Client) -> None:
    running(served)
    accepted = client.inject({"kind": "kill", "job": JOB, "stage": 1, "at": "after_vote", "step": 9, "seed": 4})
    (asked,) = [item for item in served.desk.asked if isinstance(item, FaultRequested)]
    assert asked == FaultRequested(
        fault=FaultKind.KILL, job=JobId(JOB), stage=1, at="after_vote", step=Step(9), seed=4, id=accepted.fault
    )
    assert client.faults(JOB) == []
    injected = Injected(id=accepted.fault, asked=asked, asked_at=NOW, verdict=Verdict.RECOVERED, pause_s=0.2)
    served.desk.change(served.desk.record(JOB), injected=(injected,))
    (shown,) = client.faults(JOB)
    assert (shown.id, shown.kind, shown.at, shown.verdict, shown.pause_s) == (
        accepted.fault, "kill", "after_vote", "recovered", 0.2
    )  # fmt: skip
    assert shown.asked == {
        "fault": "kill",
        "job": JOB,
        "stage": 1,
        "at": "after_vote",
        "step": 9,
        "exit_code": 1,
        "seed": 4,
    }
    with pytest.raises(ApiError, match="there is no job job-x"):
        client.faults("job-x")


def test_faults_are_refused_unless_enabled_and_the_refusal_says_how(tmp_path: Path) -> None:
    with serve(tmp_path, chaos=False) as served, Client(served.url) as client:
        running(served)
        with pytest.raises(ApiError, match="everstep up --chaos") as caught:
            client.kill_rank(JOB, 0)
        assert caught.value.status == 403 and not served.desk.asked


# --- event streams -------------------------------------------------------------------------------------------------------


def test_a_stream_tells_history_and_steps_in_order_and_ends_after_the_terminal_event(
    served: Served, client: Client
) -> None:
    running(served, steps=2)
    seen: list[Any] = []
    reader = threading.Thread(target=lambda: seen.extend(client.events(JOB)))
    reader.start()
    eventually(lambda: len(seen) == 3)
    served.desk.step(JOB, loss=3.0)
    served.desk.become(JOB, Succeeded(at=NOW), "ended", "all steps are committed")
    reader.join(5)
    assert not reader.is_alive()
    assert [item.id for item in seen] == ["1", "2", "3", "4", "5"]
    assert [type(item) for item in seen] == [EventView, StepView, StepView, StepView, EventView]
    assert seen[-1].status == "SUCCEEDED"
    eventually(lambda: served.desk.readers == 0)


def test_a_reader_resumes_after_its_last_id(served: Served, http: httpx2.Client) -> None:
    running(served, steps=3)
    with http.stream("GET", f"/api/v1/jobs/{JOB}/events", headers={"Last-Event-ID": "2"}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["cache-control"] == "no-cache" and answer.headers["x-accel-buffering"] == "no"
        events = (event for event in httpx2.EventSource(answer) if event.data)
        assert [next(events).id for _ in range(2)] == ["3", "4"]


def test_a_reader_that_fell_behind_is_told_of_the_gap(tmp_path: Path) -> None:
    with serve(tmp_path, desk=PlayedDesk(history_cap=1, steps_cap=2)) as served, Client(served.url) as client:
        running(served, steps=4)
        served.desk.become(JOB, Succeeded(at=NOW), "ended", "done")
        seen = list(client.events(JOB))
        gaps = [item.resumes_at for item in seen if isinstance(item, GapView)]
        assert gaps == ["4", "6"], "one of the steps, one of the history"
        assert [item.id for item in seen if not isinstance(item, GapView)] == ["4", "5", "6"]
        assert [type(item) for item in client.history(JOB)] == [GapView, EventView]


def test_an_id_that_is_none_is_refused_before_the_stream_begins(served: Served, http: httpx2.Client) -> None:
    running(served)
    answer = http.get(f"/api/v1/jobs/{JOB}/events", headers={"Last-Event-ID": "what", "Accept": "text/event-stream"})
    assert answer.status_code == 422 and answer.headers["content-type"] == PROBLEM


def test_a_reader_that_had_seen_the_end_is_told_not_to_come_back(
    served: Served, http: httpx2.Client, client: Client
) -> None:
    running(served)
    served.desk.become(JOB, Succeeded(at=NOW), "ended", "done")
    headers = {"Last-Event-ID": "2", "Accept": "text/event-stream"}
    assert http.get(f"/api/v1/jobs/{JOB}/events", headers=headers).status_code == 204
    assert list(client.events(JOB, after="2")) == []
    assert [event.id for event in client.events(JOB, after="1")] == ["2"]


def test_a_stream_ends_when_the_job_is_over_even_without_a_terminal_event(served: Served, http: httpx2.Client) -> None:
    running(served)
    served.desk.change(served.desk.record(JOB), state=Succeeded(at=NOW))
    assert "trains" in http.get(f"/api/v1/jobs/{JOB}/events", headers={"Accept": "text/event-stream"}).text


def test_a_quiet_stream_pings(served: Served, http: httpx2.Client) -> None:
    running(served)
    with http.stream("GET", f"/api/v1/jobs/{JOB}/events") as answer:
        text = ""
        for piece in answer.iter_text():
            text += piece
            if ": ping" in text:
                break


@pytest.mark.parametrize("is_busy", [False, True])
def test_a_client_that_leaves_frees_its_stream(served: Served, http: httpx2.Client, is_busy: bool) -> None:
    running(served)
    with http.stream("GET", f"/api/v1/jobs/{JOB}/events") as answer:
        chunks = answer.iter_bytes()
        next(chunks)
        eventually(lambda: served.desk.readers == 1)
    deadline = time.monotonic() + 2
    while served.desk.readers and time.monotonic() < deadline:
        if is_busy:
            served.desk.step(JOB, loss=1.0)
        time.sleep(0.01)
    assert served.desk.readers == 0
    assert "everstep_event_stream_clients 0.0" in http.get("/metrics").text


def test_the_server_ends_within_seconds_though_streams_are_open(served: Served) -> None:
    running(served)
    clients = [httpx2.Client(base_url=served.url, trust_env=False) for _ in range(3)]
    streams = [client.stream("GET", f"/api/v1/jobs/{JOB}/events") for client in clients]
    # Kept: an abandoned iterator would close its connection.
    open_chunks = [stream.__enter__().iter_bytes() for stream in streams]
    for chunks in open_chunks:
        next(chunks)
    eventually(lambda: served.desk.readers == 3)
    assert served.stop() <= 5
    assert served.desk.readers == 0
    for client in clients:
        client.close()


def test_the_sdk_goes_on_where_it_was_when_the_server_comes_back(tmp_path: Path) -> None:
    seen: list[Any] = []
    with serve(tmp_path) as first:
        running(first, steps=2)
        with Client(first.url, retry_s=10) as client:
            reader = threading.Thread(target=lambda: seen.extend(client.events(JOB)))
            reader.start()
            eventually(lambda: first.desk.readers == 1)
            port = int(first.url.rpartition(":")[2])
            first.stop()
            first.desk.step(JOB, loss=1.0)
            first.desk.become(JOB, Succeeded(at=NOW), "ended", "done")
            with serve(tmp_path, port=port, desk=first.desk):
                reader.join(15)
                assert not reader.is_alive()
    assert [item.id for item in seen] == ["1", "2", "3", "4", "5"]


def test_events_as_json_are_the_history_alone(served: Served, http: httpx2.Client) -> None:
    running(served, steps=2)
    served.desk.tell(JOB, "checkpoint", "checkpoint of step 2 is committed")
    by_header = http.get(f"/api/v1/jobs/{JOB}/events", headers={"Accept": "application/json"}).json()
    assert [(item["id"], item["type"]) for item in by_header] == [("1", "running"), ("4", "checkpoint")]
    assert http.get(f"/api/v1/jobs/{JOB}/events?since=1&limit=10").json() == by_header[1:]


# --- logs ----------------------------------------------------------------------------------------------------------------


def test_logs_are_read_by_rank_device_tail_and_offset(served: Served, client: Client) -> None:
    running(served)
    path = served.write_log(JOB, "node-1/1", "one\ntwo\nthree\n")
    served.write_log(JOB, "node-2/0", "other\n")
    by_rank = client.logs(JOB, rank=1)
    assert (by_rank.text, by_rank.device, by_rank.next_offset) == ("one\ntwo\nthree\n", "node-1/1", 14)
    assert client.logs(JOB, device="node-1/1", tail=2).text == "two\nthree\n"
    assert client.logs(JOB).device == "node-1/1", "the first rank that has one"
    with path.open("ab") as file:
        file.write("ä".encode()[:1])
    more = client.logs(JOB, rank=1, offset=14)
    assert (more.text, more.next_offset) == ("", 14), "half a character is left for later"
    with path.open("ab") as file:
        file.write("ä".encode()[1:] + b"\n")
    assert client.logs(JOB, rank=1, offset=14).text == "ä\n"


def test_the_log_of_a_failed_job_is_of_the_rank_that_failed(served: Served, client: Client) -> None:
    running(served)
    served.write_log(JOB, "node-1/0", "fine\n")
    served.write_log(JOB, "node-2/0", "boom\n")
    failed = Failed(at=NOW, message="raised", device=Device(NodeId("node-2"), 0))
    served.desk.become(JOB, failed, "ended", "raised")
    assert client.logs(JOB).text == "boom\n"


def test_logs_never_leave_the_jobs_own_folder(served: Served, client: Client, tmp_path: Path) -> None:
    running(served)
    log = served.write_log(JOB, "node-1/0", "mine\n")
    secret = tmp_path / "secret-0.log"
    secret.write_text("secret")
    (log.parent / "node-1-1.log").symlink_to(secret)
    for device in ("../../secret/0", "node-1/1", "/etc/0", "node-1/x", "../../../secret/0"):
        with pytest.raises(ApiError) as caught:
            client.logs(JOB, device=device)
        assert caught.value.status in (404, 422)


def test_a_log_larger_than_one_answer_comes_in_pieces(served: Served, client: Client) -> None:
    running(served)
    text = "".join(f"line {number}\n" for number in range(200_000))
    served.write_log(JOB, "node-1/0", text)
    last = client.logs(JOB, rank=0).text
    assert len(last) <= 1 << 20 and text.endswith(last) and last.startswith("line ")
    pieces, offset = [], 0
    while chunk := client.logs(JOB, rank=0, offset=offset):
        if not chunk.text:
            break
        pieces.append(chunk.text)
        offset = chunk.next_offset
    assert "".join(pieces) == text


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
    began = time.monotonic()
    with (
        Client("http://127.0.0.1:9", retry_s=0.3) as client,
        pytest.raises(Unreachable, match=r"no answer from http://127\.0\.0\.1:9"),
    ):
        client.jobs()
    assert time.monotonic() - began < 3
