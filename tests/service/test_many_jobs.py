"""Many jobs at once: selected by state, name and labels, counted before anything is done to them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from api.cli.main import app
from api.client import ApiError, Client
from orchestrator.domain.events import (
    CancelRequested,
    PauseRequested,
    PriorityRequested,
    ResizeRequested,
    ResumeRequested,
)
from orchestrator.domain.ids import JobId
from orchestrator.domain.size import Size
from orchestrator.domain.state import Cancelled, Paused
from tests.desk import NOW, a_spec
from tests.served import Served


@pytest.fixture
def mixed(served: Served) -> Served:
    """job-1 and job-2 of one team, job-3 of another, job-4 of the first and over; job-2 is paused."""
    for number, team in ((1, "nlp"), (2, "nlp"), (3, "vision"), (4, "nlp")):
        spec = replace(a_spec(name=f"run-{number}"), labels={"team": team, "run": str(number)})
        served.desk.add(f"job-{number}", spec=spec)
    served.desk.change(served.desk.record("job-2"), state=Paused(at=NOW))
    served.desk.change(served.desk.record("job-4"), state=Cancelled(at=NOW))
    return served


def test_lists_are_narrowed_by_labels(mixed: Served, client: Client) -> None:
    assert {job.id for job in client.jobs(labels={"team": "nlp"}).jobs} == {"job-1", "job-2", "job-4"}
    (one,) = client.jobs(labels={"team": "nlp", "run": "2"}).jobs
    assert one.id == "job-2" and one.status == "PAUSED" and one.labels == {"team": "nlp", "run": "2"}
    assert not client.jobs(labels={"team": "nlp"}, state=["RUNNING"]).jobs


def test_what_a_filter_selects_is_counted_first_and_then_asked_for_each(mixed: Served, client: Client) -> None:
    counted = client.to_many("cancel", labels={"team": "nlp"}, dry_run=True)
    assert counted.count == 2 and set(counted.jobs) == {"job-1", "job-2"} and not mixed.desk.asked
    assert client.to_many("cancel", labels={"team": "nlp"}).count == 2
    assert client.to_many("cancel", project="nobody", dry_run=True).count == 0
    assert client.to_many("cancel", project="default", dry_run=True).count > 2
    assert sorted(mixed.desk.asked, key=str) == [CancelRequested(job=JobId(job)) for job in ("job-1", "job-2")]
    assert client.to_many("pause", name="run-3").jobs == ("job-3",)
    assert client.to_many("resume", state=["PAUSED"]).jobs == ("job-2",)
    assert mixed.desk.asked[2:] == [PauseRequested(job=JobId("job-3")), ResumeRequested(job=JobId("job-2"))]


def test_many_are_resized_and_who_may_not_be_stays_as_it_is(mixed: Served, client: Client) -> None:
    mixed.desk.change(mixed.desk.record("job-2"), size=Size(min_devices=4))
    counted = client.resize_many(target=2, labels={"team": "nlp"}, dry_run=True)
    assert counted.jobs == ("job-1",) and not mixed.desk.asked
    assert len(counted.refused) == 1 and counted.refused[0].startswith("job-2: target is 2, the job may have 4 upwards")
    done = client.resize_many(target=2, priority=3, state=["PENDING"])
    assert done.count == 2 and set(done.jobs) == {"job-1", "job-3"}
    assert {(type(one), one.job) for one in mixed.desk.asked} == {  # type: ignore[union-attr]
        (kind, JobId(job)) for kind in (PriorityRequested, ResizeRequested) for job in ("job-1", "job-3")
    }
    with pytest.raises(ApiError, match="nothing is to be changed") as caught:
        client.resize_many(name="run-1")
    assert caught.value.status == 422


def test_everything_is_never_meant_by_saying_nothing(mixed: Served, client: Client) -> None:
    with pytest.raises(ApiError, match="send state, name, project or labels") as caught:
        client.to_many("cancel")
    assert caught.value.status == 422 and not mixed.desk.asked


def test_the_command_asks_before_it_does_it(mixed: Served) -> None:
    def everstep(*args: str, typed: str = "") -> tuple[int, str]:
        env = {"EVERSTEP_URL": None, "EVERSTEP_STATE_DIR": str(mixed.state_dir), "COLUMNS": "100"}
        result = CliRunner().invoke(app, args, env=env, input=typed)
        return result.exit_code, result.output

    (mixed.state_dir / "server.json").write_text(json.dumps({"url": mixed.url, "pid": 1}))
    code, said = everstep("cancel", "--label", "team=nlp", typed="n\n")
    assert code == 0 and "2 jobs would be cancelled" in said and "job-1" in said and not mixed.desk.asked
    assert everstep("pause", "--label", "team=vision", typed="y\n")[0] == 0
    assert mixed.desk.asked == [PauseRequested(job=JobId("job-3"))]
    assert everstep("resume", "--state", "PAUSED", "--yes")[0] == 0 and len(mixed.desk.asked) == 2
    code, said = everstep("scale", "-l", "team=nlp", "4", "--dry-run")
    assert code == 0 and "2 jobs would be resized" in said and len(mixed.desk.asked) == 2
    assert everstep("scale", "-l", "run=3", "2", "--yes")[0] == 0 and len(mixed.desk.asked) == 3
    for wrong in (
        ["scale", "4"],
        ["scale", "job-1", "4", "-l", "a=b"],
        ["cancel"],
        ["cancel", "job-1", "--label", "a=b"],
        ["cancel", "--label", "team"],
    ):
        assert everstep(*wrong)[0] == 2
    assert len(mixed.desk.asked) == 3
