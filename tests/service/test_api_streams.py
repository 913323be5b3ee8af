"""The API over a real port: streams of events that resume and end, and logs in pieces."""

from __future__ import annotations

import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx2
import pytest

from api.client import ApiError, Client, EventView, GapView, StepView
from orchestrator.domain.ids import Device, NodeId
from orchestrator.domain.state import Failed, Succeeded
from tests.desk import NOW, PlayedDesk
from tests.served import JOB, Served, eventually, running, serve

pytestmark = pytest.mark.timeout(120)


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
    reader.join(60)
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
    assert answer.status_code == 422 and answer.headers["content-type"] == "application/problem+json"


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
    deadline = time.monotonic() + 60
    while served.desk.readers and time.monotonic() < deadline:
        if is_busy:
            served.desk.step(JOB, loss=1.0)
        time.sleep(0.01)
    assert served.desk.readers == 0
    assert "everstep_event_stream_clients 0.0" in http.get("/metrics").text


def test_the_server_ends_within_seconds_though_streams_are_open(served: Served) -> None:
    running(served)
    clients = [httpx2.Client(base_url=served.url, trust_env=False, timeout=60) for _ in range(3)]
    streams = [client.stream("GET", f"/api/v1/jobs/{JOB}/events") for client in clients]
    # Kept: an abandoned iterator would close its connection.
    open_chunks = [stream.__enter__().iter_bytes() for stream in streams]
    for chunks in open_chunks:
        next(chunks)
    eventually(lambda: served.desk.readers == 3)
    served.stop()
    assert served.desk.readers == 0
    for client in clients:
        client.close()


def test_the_sdk_goes_on_where_it_was_when_the_server_comes_back(tmp_path: Path) -> None:
    seen: list[Any] = []
    with serve(tmp_path) as first:
        running(first, steps=2)
        with Client(first.url, retry_s=60) as client:
            reader = threading.Thread(target=lambda: seen.extend(client.events(JOB)))
            reader.start()
            eventually(lambda: first.desk.readers == 1)
            port = int(first.url.rpartition(":")[2])
            first.stop()
            first.desk.step(JOB, loss=1.0)
            first.desk.become(JOB, Succeeded(at=NOW), "ended", "done")
            with serve(tmp_path, port=port, desk=first.desk):
                reader.join(60)
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


def test_lines_of_many_ranks_are_one_log_that_goes_on(served: Served, client: Client) -> None:
    running(served)
    served.write_log(JOB, "node-1/0", "one\nbad one\n")
    served.write_log(JOB, "node-2/1", "two\nbad two\n")
    page = client.log_lines(JOB)
    assert {(line.rank, line.text) for line in page.lines} == {(0, "one"), (0, "bad one"), (3, "two"), (3, "bad two")}
    assert [line.text for line in client.log_lines(JOB, ranks=[3], grep="bad").lines] == ["bad two"]
    assert [line.offset for line in client.log_lines(JOB, devices=["node-1/0"], tail=1).lines] == [4]
    assert client.log_lines(JOB, since=datetime.now(UTC) + timedelta(hours=1)).lines == ()
    served.write_log(JOB, "node-2/1", "two\nbad two\nthree\n")
    assert [line.text for line in client.log_lines(JOB, after=page.next).lines] == ["three"]
    for bad in ({"after": "node-1/0"}, {"after": "x:1"}, {"ranks": [9]}, {"devices": ["../0/x"]}):
        with pytest.raises(ApiError) as refused:
            client.log_lines(JOB, **bad)  # type: ignore[arg-type]
        assert refused.value.status == 422
