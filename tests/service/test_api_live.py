"""The stream a dashboard shows: jobs and nodes as they are, several jobs at once, resumed where the reader was."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import httpx2
import pytest

from api.live import MAX_PAGES, PAGE, SHOWN_JOBS
from orchestrator.adapters.redis_desk import MAX_DECODED
from orchestrator.domain.cluster import Node, NodeStatus
from orchestrator.domain.ids import Generation, NodeId
from orchestrator.domain.state import Running, Succeeded
from tests.desk import NOW, PlayedDesk, a_plan, first_generation
from tests.served import JOB, Served, eventually, running, serve

pytestmark = pytest.mark.timeout(120)
NODE = Node(id=NodeId("node-1"), kind="H100", num_devices=2)


@dataclass(frozen=True, slots=True)
class Told:
    kind: str
    data: Any
    id: str


def test_a_reader_is_told_the_present_then_what_changes(served: Served, http: httpx2.Client) -> None:
    running(served, steps=2)
    served.desk.set_nodes(NODE)
    with live(http) as told:
        first = until(told, "pulse")
        assert [(one.kind, one.data["id"]) for one in first if one.kind == "summary"] == [("summary", JOB)]
        assert [[node["status"] for node in one.data] for one in first if one.kind == "nodes"] == [["UP"]]
        served.desk.set_nodes(replace(NODE, status=NodeStatus.LOST))
        assert until(told, "nodes")[-1].data[0]["status"] == "LOST"
        served.desk.become(JOB, Succeeded(at=NOW), "ended", "done")
        assert until(told, "summary")[-1].data["status"] == "SUCCEEDED"


def test_several_jobs_are_told_in_one_stream_each_from_its_own_place(served: Served, http: httpx2.Client) -> None:
    running(served, steps=3)
    other(served, "job-2")
    with live(http, watch=[f"{JOB}:2", "job-2"]) as told:
        seen = gather(told, lambda seen: len(seen) == 4)
        assert [one.data["id"] for one in seen if one.data["job"] == JOB] == ["3", "4"], "nothing before its place"
        second = [(one.kind, one.data["id"]) for one in seen if one.data["job"] == "job-2"]
        assert second == [("history", "1"), ("step", "2")]
        assert sorted(seen[-1].id.split(",")) == [f"{JOB}:4", "job-2:2"]


def test_a_reader_resumes_by_the_last_id_in_every_job(served: Served, http: httpx2.Client) -> None:
    running(served, steps=3)
    other(served, "job-2")
    served.desk.step("job-2", loss=1.0)
    headers = {"Last-Event-ID": f"{JOB}:3,job-2:2"}
    with live(http, headers, watch=[JOB, "job-2"]) as told:
        seen = gather(told, lambda seen: len(seen) == 2)
        assert sorted((one.data["job"], one.data["id"]) for one in seen) == [(JOB, "4"), ("job-2", "3")]


def test_the_page_of_a_watched_job_follows_what_happens_to_it_and_not_every_step(
    served: Served, http: httpx2.Client
) -> None:
    running(served, steps=1)
    with live(http, watch=[JOB]) as told:
        assert until(told, "job")[-1].data["plan"]["generation"] == 1
        for _ in range(5):
            served.desk.step(JOB, loss=1.0)
        small = a_plan(("node-1", "node-2"))
        state = Running(generation=Generation(2), plan=small)
        served.desk.become(JOB, state, "running", "fewer", **(first_generation(small) | {"generation": Generation(2)}))
        assert until(told, "job")[-1].data["plan"]["generation"] == 2, "the next page, and none for a step"


def test_a_reader_that_fell_behind_is_told_of_the_gap(tmp_path: Any) -> None:
    with serve(tmp_path, desk=PlayedDesk(history_cap=1, steps_cap=2)) as served:
        running(served, steps=5)
        with (
            httpx2.Client(base_url=served.url, trust_env=False, timeout=60) as http,
            live(http, watch=[f"{JOB}:1"]) as told,
        ):
            assert until(told, "gap")[-1].data["resumes_at"] == "5"


def test_wrong_places_too_many_jobs_and_unknown_ones_are_refused(served: Served, http: httpx2.Client) -> None:
    running(served)
    for watch, status, words in (
        ([f"{JOB}:what"], 422, "names no place in a job"),
        ([f"{JOB}:٣"], 422, "names no place in a job"),
        ([f"job-{number}" for number in range(17)], 422, "at most 16"),
        (["job-x"], 404, "there is no job job-x"),
    ):
        answer = http.get("/api/v1/live", params={"watch": watch})
        assert answer.status_code == status and words in answer.json()["detail"]


def test_a_reader_that_leaves_frees_everything_it_had_read(served: Served, http: httpx2.Client) -> None:
    running(served, steps=1)
    with live(http, watch=[JOB]) as told:
        until(told, "job")
        eventually(lambda: served.desk.readers == 1)
    eventually(lambda: served.desk.readers == 0)
    assert "everstep_event_stream_clients 0.0" in http.get("/metrics").text


def test_a_look_at_the_newest_jobs_decodes_none_of_them_twice() -> None:
    assert SHOWN_JOBS + PAGE * (MAX_PAGES - 1) < MAX_DECODED


def other(served: Served, job: str) -> None:
    plan = a_plan()
    served.desk.add(job)
    served.desk.become(job, Running(generation=Generation(1), plan=plan), "running", "trains", **first_generation(plan))
    served.desk.step(job, loss=2.0)


@contextmanager
def live(http: httpx2.Client, headers: dict[str, str] | None = None, **params: Any) -> Iterator[Iterator[Told]]:
    with http.stream("GET", "/api/v1/live", params=params, headers=headers) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = (event for event in httpx2.EventSource(answer) if event.data)
        yield (Told(event.event, json.loads(event.data), event.id) for event in events)


def until(told: Iterator[Told], kind: str) -> list[Told]:
    seen = [next(told)]
    while seen[-1].kind != kind:
        seen.append(next(told))
    return seen


def gather(told: Iterator[Told], is_enough: Any) -> list[Told]:
    """What happened, states left out."""
    seen: list[Told] = []
    while not is_enough(seen):
        one = next(told)
        if one.kind in ("history", "step", "gap"):
            seen.append(one)
    return seen
