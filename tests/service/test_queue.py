"""The queue and projects over a real port, as the client, the command line and a job's page see them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from click.testing import Result
from typer.testing import CliRunner

from api.cli.main import app
from api.client import ApiError, Client
from orchestrator.domain.events import PriorityRequested, QuotaRequested, ResizeRequested
from orchestrator.domain.ids import JobId
from orchestrator.domain.queue import Project, Turn, Waiting, WaitReason
from orchestrator.domain.size import Size
from orchestrator.domain.state import Queued
from tests.desk import NOW, a_spec
from tests.served import JOB, Served, running

pytestmark = pytest.mark.timeout(120)
WAITS = "waits for 2 more A100: 4 of 6 are held by job-1 (priority 5)"


def everstep(served: Served, *args: str) -> Result:
    return CliRunner().invoke(app, args, env={"EVERSTEP_URL": served.url, "COLUMNS": "200"})


def waiting(served: Served) -> None:
    running(served)
    served.desk.add("job-2", state=Queued(reason="it waits"), spec=replace(a_spec(), priority=3, project="vision"))
    line = Waiting(
        job=JobId("job-2"),
        position=1,
        reason=WaitReason.BUSY,
        message=WAITS,
        priority=3,
        project="vision",
        least=4,
        since=NOW,
    )
    served.desk.write(queue=(line,), projects=(Project(name="vision", max_devices=8),))


def test_who_waits_and_why_is_seen_everywhere(served: Served, client: Client) -> None:
    assert client.queue() == []
    waiting(served)
    (one,) = client.queue()
    assert (one.job, one.position, one.reason, one.message, one.least) == ("job-2", 1, "busy", WAITS, 4)
    job = client.job("job-2")
    assert (
        job.waiting == one
        and job.reason == f"{WAITS} (number 1 in the queue)"
        and (job.priority, job.project) == (3, "vision")
    )
    assert client.job(JOB).waiting is None
    assert {row.id: row.waiting for row in client.jobs().jobs} == {"job-2": one, JOB: None}
    shown = everstep(served, "get", "job-2").output
    assert "number 1 (busy), needs 4 devices" in shown and "held by job-1 (priority 5)" in shown
    assert "#1 busy" in everstep(served, "ls").output
    assert "held by job-1" in everstep(served, "queue").output.replace("\n", " ")
    assert json.loads(everstep(served, "queue", "--json").stdout)[0]["position"] == 1


def test_a_priority_is_changed_while_a_job_waits_or_runs(served: Served, client: Client) -> None:
    running(served)
    assert client.resize(JOB, priority=7).message == "job-1 is to have priority 7"
    client.resize(JOB, priority=0, target=4)
    assert not everstep(served, "scale", JOB, "--priority", "-2").exit_code
    asked = [PriorityRequested(job=JobId(JOB), priority=n) for n in (7, 0, -2)]
    assert [c for c in served.desk.asked if isinstance(c, PriorityRequested)] == asked
    assert [c for c in served.desk.asked if isinstance(c, ResizeRequested)] == [
        ResizeRequested(job=JobId(JOB), size=Size(target=4))
    ]
    with pytest.raises(ApiError, match="priority"):
        client.resize(JOB, priority=1001)
    served.desk.change(served.desk.record(JOB), turn=Turn(priority=7))
    assert client.job(JOB).priority == 7


def test_quotas_are_set_and_shown_with_what_is_held(served: Served, client: Client) -> None:
    waiting(served)
    found = {one.name: (one.max_devices, one.num_waiting) for one in client.projects()}
    assert found == {"default": (None, 0), "vision": (8, 1)}
    assert client.project("default").num_devices == len(client.job(JOB).plan.seats)  # type: ignore[union-attr]
    client.set_quota("vision", 4)
    assert not everstep(served, "projects", "set-quota", "vision", "none").exit_code
    assert served.desk.asked == [QuotaRequested(project="vision", max_devices=n) for n in (4, None)]
    assert everstep(served, "projects", "set-quota", "vision", "many").exit_code == 2
    with pytest.raises(ApiError, match="projects: default, vision") as caught:
        client.project("speech")
    assert caught.value.status == 404
    assert "vision" in everstep(served, "projects").output
