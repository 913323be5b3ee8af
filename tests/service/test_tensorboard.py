"""A job's curves as TensorBoard reads them: a step that was run again replaces what was rolled back."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from typer.testing import CliRunner, Result

from api.cli.main import app
from orchestrator.domain.ids import Generation, Step
from orchestrator.domain.state import Succeeded
from tests.desk import NOW
from tests.served import JOB, Served, running

LOSS = "loss_metrics/global_avg_loss"


def everstep(served: Served, *args: str) -> Result:
    (served.state_dir / "server.json").write_text(json.dumps({"url": served.url, "pid": os.getpid()}))
    env = {"EVERSTEP_URL": None, "EVERSTEP_STATE_DIR": str(served.state_dir), "COLUMNS": "140"}
    return CliRunner().invoke(app, args, env=env)


def rolled_back(served: Served, to: int) -> None:
    record = served.desk.record(JOB)
    served.desk.change(replace(record, committed=Step(to), generation=Generation(record.generation + 1)))


def test_steps_that_were_run_again_replace_what_was_rolled_back(served: Served, tmp_path: Path) -> None:
    running(served, steps=0)
    for number in range(1, 7):
        served.desk.step(JOB, loss=100.0 + number, at=NOW + number)
    rolled_back(served, to=3)
    for number in range(4, 9):
        served.desk.step(JOB, loss=200.0 + number, at=NOW + 10 + number)
    rolled_back(served, to=7)
    served.desk.step(JOB, loss=308.0, seconds=0.4, at=NOW + 30)
    served.desk.become(JOB, Succeeded(at=NOW + 31), "succeeded", "done")
    done = everstep(served, "tensorboard", JOB, "--logdir", str(tmp_path / "runs"), "--follow")
    assert done.exit_code == 0 and "12 steps, 2 times from an earlier step on again" in done.output, done.output
    read = EventAccumulator(str(tmp_path / "runs" / JOB), size_guidance={"scalars": 0})
    read.Reload()
    curve = {event.step: event.value for event in read.Scalars(LOSS)}
    assert [event.step for event in read.Scalars(LOSS)] == list(range(1, 9))
    assert curve == {1: 101, 2: 102, 3: 103, 4: 204, 5: 205, 6: 206, 7: 207, 8: 308}
    assert read.Scalars("throughput(tps)")[-1].value == 1024 / 0.4
    assert [event.value for event in read.Scalars("everstep/generation")][-1] == 3
    assert read.Scalars(LOSS)[0].wall_time == NOW + 1


def test_the_same_steps_are_never_written_twice_into_one_folder(served: Served, tmp_path: Path) -> None:
    running(served, steps=2)
    told = json.loads(everstep(served, "tensorboard", JOB, "--logdir", str(tmp_path), "--json").stdout)
    assert told == {"job": JOB, "logdir": str(tmp_path / JOB), "steps": 2, "purges": 0}
    again = everstep(served, "tensorboard", JOB, "--logdir", str(tmp_path))
    assert again.exit_code == 2 and "holds event files" in again.output
