"""How a job looks in a terminal, and what a follower keeps of what it sees."""

from __future__ import annotations

import io
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from rich.console import Console, RenderableType

from api import projections
from api.cli import render, top
from api.cli.follow import Watch, sparkline
from api.views import EventView, JobView, StepView
from orchestrator.domain.copying import Copying
from orchestrator.domain.failure import Cause, Fault
from orchestrator.domain.ids import Device, Generation, JobId, NodeId, Step
from orchestrator.domain.incident import Incident
from orchestrator.domain.job import JobRecord
from orchestrator.domain.plan import Pipeline, Plan, Stage
from orchestrator.domain.spec import DataSpec, JobSpec, TrainSpec
from orchestrator.domain.state import Failed, Running

NOW = 1_790_000_000.0
A, B = (Device(NodeId(name), 0) for name in ("node-a", "node-b"))
PLAN = Plan(
    pipelines=(
        Pipeline(
            stages=(Stage(first=0, last=3, devices=(A,)), Stage(first=3, last=4, devices=(B,))), micro_batches=(0, 1, 3)
        ),
    )
)


def a_job(**changes: Any) -> JobView:
    train = TrainSpec(steps=100, micro_batches=4, micro_batch_size=1, sequence=8)
    spec = JobSpec(name="byte-gpt", program="causal_lm", data=DataSpec(files=("x",)), train=train)
    running = Running(generation=Generation(2), plan=PLAN)
    given: dict[str, Any] = {"state": running, "generation": Generation(2), "committed": Step(40)} | changes
    return projections.job(JobRecord(id=JobId("job-1"), spec=spec, created_at=NOW, **given), 1, NOW)


def an_incident(**changes: Any) -> Incident:
    fault = Fault(cause=Cause.NODE_LOST, message="node-c is gone", at=NOW)
    given: dict[str, Any] = {
        "phases": {"detect": 0.016, "first_step": 1.25},
        "pause_s": 0.142,
        "source": "memory",
    } | changes
    return Incident(number=1, fault=fault, generation=Generation(1), next_generation=Generation(2), **given)


def shown(what: RenderableType, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(what)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def a_step(number: int, **changes: Any) -> StepView:
    given: dict[str, Any] = {
        "loss": 5.0 - number / 50,
        "norm": 1.0,
        "tokens": 32,
        "seconds": 0.1,
        "generation": 1,
    } | changes
    return StepView(id=str(number), step=number, at=datetime.now(UTC), **given)


def test_a_page_shows_state_plan_and_recovery() -> None:
    page = shown(render.job_page(a_job(incidents=(an_incident(),), pids={A: 41, B: 42})))
    for words in ("● RUNNING", "generation 2", "step", "40 of 100", "tp1 x pp2 x dp1", "layers 0–2", "layer 3"):
        assert words in page, words
    for words in ("rank 1 node-b/0 pid 42", "0–1, 3", "node lost", "generation 1 → 2", "pause 142 ms", "16 ms", "1.25 s"):
        assert words in page, words
    assert "no committed step lost" in page


def test_copies_that_last_are_shown_with_how_far_and_how_fast_they_are() -> None:
    copies = {
        device.node: (
            Copying(
                device=device,
                what="saving",
                step=Step(40),
                done_bytes=1_200_000_000,
                total_bytes=3_400_000_000,
                seconds=6.0,
            ),
        )
        for device in (A, B)
    }
    job = a_job(copies=copies)
    assert [one.bytes_per_s for one in job.copies] == [2e8, 2e8]
    assert "saving step 40: 2.4 GB of 6.8 GB on 2 devices, 400 MB/s" in " ".join(shown(render.job_page(job)).split())


def test_false_alarms_are_said_where_there_were_any() -> None:
    assert "false alarms" not in shown(render.job_page(a_job()))
    job = a_job(false_alarms=3)
    assert job.false_alarms == 3 and "3, suspected hangs that were none" in shown(render.job_page(job))


def test_steps_that_were_rolled_back_are_said() -> None:
    assert "7 committed steps run again" in shown(render.incident_table(an_incident_view(rolled_back=7)))


def an_incident_view(**changes: Any) -> Any:
    return a_job(incidents=(an_incident(**changes),)).incidents[0]


def test_a_recovery_under_way_says_so() -> None:
    assert "under way" in shown(render.incident_line(an_incident_view(pause_s=None)))


def test_text_of_a_job_is_never_read_as_markup() -> None:
    failed = Failed(at=NOW, message="[bold]bad[/bold] batch", device=B, exit_code=1, log_tail=("[red]x[/red]", "[/]"))
    page = shown(render.outcome(a_job(state=failed, plans={Generation(2): PLAN})))
    for words in ("✗ FAILED", "[bold]bad[/bold] batch", "rank 1", "exit code 1", "[red]x[/red]", "[/]"):
        assert words in page, words


def test_a_list_fits_eighty_columns() -> None:
    job = a_job().model_copy(update={"id": "job-" + "0" * 26, "created_at": datetime.now(UTC) - timedelta(hours=3)})
    lines = shown(render.jobs_table([job]), width=80).splitlines()
    assert (
        lines[2].startswith(job.id)
        and "● RUNNING" in lines[2]
        and "40/100" in lines[2]
        and lines[2].rstrip().endswith("3 h")
    )
    assert "byte-gpt" in lines[2]


@pytest.mark.parametrize(
    ("total_s", "words"),
    [(0.4, "0 s"), (48, "48 s"), (185, "3 min 05 s"), (7800, "2 h 10 min"), (100 * 3600, "4 d 4 h"), (-3, "0 s")],
)
def test_durations_in_words(total_s: float, words: str) -> None:
    assert render.duration(total_s) == words


@pytest.mark.parametrize(("value", "words"), [(0.016, "16 ms"), (0.9994, "999 ms"), (1.0, "1.00 s"), (12.345, "12.35 s")])
def test_seconds_in_words(value: float, words: str) -> None:
    assert render.seconds(value) == words


def test_bars_grow_by_eighths_and_are_never_empty() -> None:
    assert [render.bar(share, 4) for share in (0.0, 0.5, 1.0, 2.0)] == ["▏", "██", "████", "████"]
    assert render.bar(1 / 32, 4) == "▏"


def test_a_sparkline_spans_the_whole_curve() -> None:
    assert sparkline((1.0,), 10) == ""
    assert sparkline(tuple(float(i) for i in range(8)), 8) == "▁▂▃▄▅▆▇█"
    long = sparkline(tuple(10.0 - i / 100 for i in range(1000)), 20)
    assert len(long) == 20 and long[0] == "█" and long[-1] == "▁"
    assert sparkline((3.0, 3.0), 5) == "▁▁"


def test_a_watch_shows_progress_rate_and_recovery() -> None:
    watch = Watch(a_job(incidents=(an_incident(),)))
    assert "waiting for the first step" in shown(watch)
    for number in range(1, 51):
        watch.see(a_step(number))
    event = EventView(
        id="60",
        type="x",
        at=datetime.now(UTC),
        message="node-c is gone",
        status="RECOVERING",
        generation=2,
        step=50,
        data={},
    )
    watch.see(event)
    picture = shown(watch)
    for words in (
        "step 50/100",
        "50 %",
        "loss 4.0000",
        "320 tokens/s",
        "100 ms per step",
        "RECOVERING",
        "generation 2",
        "detect",
    ):
        assert words in picture, words
    assert watch.tokens_per_s == pytest.approx(320)


def test_a_watch_that_begins_late_knows_when_it_has_caught_up() -> None:
    watch = Watch(a_job())
    watch.see(a_step(39))
    assert watch.is_catching_up
    watch.see(a_step(40))
    assert not watch.is_catching_up


def test_top_fits_a_narrow_terminal_whole() -> None:
    running = a_job(typical_step_s=0.25)
    others = [
        running.model_copy(update={"status": status, "step": 123_456, "steps": 1_000_000, "tokens_per_s": 1e7})
        for status in ("RECOVERING", "CANCELLED")
    ]
    narrow = shown(top.jobs_table([running, *others], 80), width=80)
    assert "GOODPUT\n" in narrow.replace(" ", "") and "byte-gpt" in narrow and "…" not in narrow
    assert "123456/1000000" in narrow and "RECOVERING" in narrow and "10,000,000" in narrow
    wide = shown(top.jobs_table([running], 150), width=150)
    assert "MFU" in wide and running.id in wide and "…" not in wide
