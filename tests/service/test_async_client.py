"""The asynchronous client against the same server: it can what the other one can, and handles to jobs say what happens."""

from __future__ import annotations

import asyncio
import inspect
import threading
from pathlib import Path

import pytest

from api.client import ApiError, AsyncClient, AsyncJob, Client, Job, StillRunning, Unreachable
from deploy import sync_client
from orchestrator.domain.state import Succeeded
from tests.desk import NOW
from tests.served import JOB, Served, running, serve

JOB_FILE = {
    "name": "quick",
    "program": "causal_lm",
    "data": {"files": ["{stdlib}"]},
    "train": {"steps": 3, "micro_batches": 2, "micro_batch_size": 1, "sequence": 8},
}


def signatures(kind: type) -> dict[str, str]:
    found = {name: value for name, value in vars(kind).items() if inspect.isfunction(value) and not name.startswith("_")}
    return {name: str(inspect.signature(value)).replace("Async", "") for name, value in found.items()}


def test_both_clients_and_both_handles_have_the_same_methods() -> None:
    assert sync_client.MADE.read_text() == sync_client.made(), "make client"
    assert signatures(AsyncClient) == signatures(Client) and len(signatures(Client)) > 25
    assert signatures(AsyncJob) == signatures(Job)


def finish_soon(served: Served) -> threading.Timer:
    def finish() -> None:
        served.desk.step(JOB, 2.0)
        served.desk.become(JOB, Succeeded(at=NOW + 5), "succeeded", "done")

    timer = threading.Timer(0.2, finish)
    timer.start()
    return timer


def test_a_job_is_awaited_while_its_steps_stream(served: Served) -> None:
    running(served, steps=2)

    async def scenario() -> None:
        async with AsyncClient(served.url) as client:
            job = client.attach(JOB)
            with pytest.raises(StillRunning, match="is RUNNING at step 2"):
                await job.wait(timeout_s=0)

            async def losses() -> list[float | None]:
                return [step.loss async for step in job.stream_metrics()]

            timer = finish_soon(served)
            streamed, ended = await asyncio.gather(losses(), job.wait())
            timer.join()
            assert streamed == [5.0, 4.0, 2.0] and ended.succeeded and ended.step == 3
            assert [one.step async for one in client.all_metrics(JOB)] == [1, 2, 3]
            assert [one.id async for one in client.all_jobs()] == [JOB]

    asyncio.run(scenario())


def test_a_handle_streams_waits_and_shows_itself_in_a_notebook(served: Served, client: Client) -> None:
    running(served, steps=1)
    job = client.attach(JOB)
    assert "<td>RUNNING</td>" in job._repr_html_() and JOB in repr(job)
    timer = finish_soon(served)
    assert [step.step for step in job.stream_metrics()] == [1, 2]
    timer.join()
    assert job.wait().succeeded
    served.desk.add("job-2")
    assert "<script>" not in client.attach("job-2<script>")._repr_html_()
    submitted = client.run(JOB_FILE, key="handle-1")
    assert client.run(JOB_FILE, key="handle-1").id == submitted.id and submitted.view().status == "PENDING"


def test_refusals_and_silence_are_the_same_errors(served: Served) -> None:
    async def scenario() -> None:
        async with AsyncClient(served.url, retry_s=0) as client:
            with pytest.raises(ApiError) as caught:
                await client.job("job-none")
            assert caught.value.status == 404
            with pytest.raises(ApiError, match="steps"):
                await client.submit({**JOB_FILE, "train": {**JOB_FILE["train"], "steps": 0}})  # type: ignore[dict-item]
            assert (await client.ready())["store"] == "ok"
        async with AsyncClient("http://127.0.0.1:9", retry_s=0) as nobody:
            with pytest.raises(Unreachable):
                await nobody.nodes()

    asyncio.run(scenario())


def test_a_stream_goes_on_through_a_restart_of_the_server(tmp_path: Path) -> None:
    """Without a gap and without a step told twice, inside a loop that somebody else runs, as a notebook's is."""

    async def scenario() -> list[int]:
        seen: list[int] = []
        async with AsyncClient(first.url, retry_s=60) as client:
            async for step in client.attach(JOB).stream_metrics():
                seen.append(step.step)
                if step.step == 2:
                    reached.set()
        return seen

    reached = threading.Event()
    with serve(tmp_path) as first:
        running(first, steps=2)
        port = int(first.url.rpartition(":")[2])
        found: list[list[int]] = []
        reader = threading.Thread(target=lambda: found.append(asyncio.run(scenario())))
        reader.start()
        assert reached.wait(60)
        first.stop()
    with serve(tmp_path, port=port, desk=first.desk) as second:
        second.desk.step(JOB, 3.0)
        second.desk.become(JOB, Succeeded(at=NOW), "succeeded", "done")
        reader.join(60)
        assert found == [[1, 2, 3]]
