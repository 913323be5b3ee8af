"""Redis is gone with everything in it: a job goes on from what lies beside its checkpoints, on the curve it had."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from api.cli.main import app
from api.client import Client
from api.job_files import job_file
from deploy.local import NodeSpec, down, up
from orchestrator.domain.ids import Generation
from orchestrator.domain.spec import CheckpointSpec, DataSpec, JobSpec, ParallelSpec
from orchestrator.domain.state import Running
from tests.desk import a_plan, first_generation
from tests.jobs import largest_gap
from tests.saved import save, state_of
from tests.served import serve
from tests.tiny_job import TEXT
from tests.tiny_model import a_spec

pytestmark = pytest.mark.timeout(300)


def everstep(state_dir: Path, *args: object) -> Result:
    env = {"EVERSTEP_URL": None, "EVERSTEP_STATE_DIR": str(state_dir), "COLUMNS": "160"}
    return CliRunner().invoke(app, [str(arg) for arg in args], env=env)


STEPS = 24


def a_job(folder: Path, **train: object) -> JobSpec:
    text = folder / "text.txt"
    text.write_text(TEXT * 400)
    train = {"steps": STEPS, "micro_batches": 4, "micro_batch_size": 1, "sequence": 32, **train}
    spec = a_spec(train=train, heads=2, kv_heads=2)
    return replace(
        spec,
        data=DataSpec(files=(str(text),)),
        parallel=ParallelSpec(tp=1, pp=1, dp=2),
        checkpoint=CheckpointSpec(every=64, policy="journal", keep_last=1000),
    )


def test_what_is_beside_the_checkpoints_is_submitted_again_once(tmp_path: Path) -> None:
    spec = a_job(tmp_path)
    folder = tmp_path / "jobs" / "job-1"
    older = save(folder / "checkpoints", spec, state_of(spec), step=5)
    newer = save(folder / "checkpoints", spec, state_of(spec), step=10)
    with serve(tmp_path) as served:
        (tmp_path / "server.json").write_text(json.dumps({"url": served.url, "pid": 1}))
        for _ in range(2):
            result = everstep(tmp_path, "adopt", folder, "--trust", "--json")
            assert result.exit_code == 0, result.output
        (id,) = served.desk.job_ids
        made = served.desk.record(id).spec
        assert made == replace(
            spec,
            checkpoint=replace(spec.checkpoint, restore_from=str(newer.path)),
            labels={"adopted-from": "job-1"},
        )
        chosen = everstep(tmp_path, "adopt", folder, "--trust", "--step", 5, "--json")
        assert served.desk.record(json.loads(chosen.stdout)["id"]).spec.checkpoint.restore_from == str(older.path)
        plan = a_plan()
        served.desk.add("job-1")
        served.desk.become("job-1", Running(generation=Generation(1), plan=plan), "running", "", **first_generation(plan))
        result = everstep(tmp_path, "adopt", folder, "--trust")
        assert result.exit_code == 2 and "the server knows job-1, which is RUNNING" in result.stderr


def test_a_damaged_checkpoint_or_another_text_is_not_gone_on_from(tmp_path: Path) -> None:
    spec = a_job(tmp_path)
    folder = tmp_path / "jobs" / "job-1"
    older = save(folder / "checkpoints", spec, state_of(spec), step=5)
    newer = save(folder / "checkpoints", spec, state_of(spec, seed=1), step=10)
    data = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".json"]
    file = max((path for path in data if "00000010" in str(path)), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with serve(tmp_path) as served:
        (tmp_path / "server.json").write_text(json.dumps({"url": served.url, "pid": 1}))
        result = everstep(tmp_path, "adopt", folder)
        assert result.exit_code == 0, result.output
        (id,) = served.desk.job_ids
        assert served.desk.record(id).spec.checkpoint.restore_from == str(older.path)
        assert "passed over" in result.output and file.name in result.output
        kept = next((folder / "checkpoints").glob("job-*.json"))
        honest = kept.read_text()
        kept.write_text(honest.replace('"seed": 0', '"seed": 1'))
        result = everstep(tmp_path, "adopt", folder, "--trust")
        assert result.exit_code == 1 and "is not what was written" in result.stderr
        kept.write_text(honest)
        (tmp_path / "text.txt").write_text("other words\n" * 400)
        result = everstep(tmp_path, "adopt", folder)
        assert result.exit_code == 1 and "is not the one the job was described with" in result.stderr
        assert len(served.desk.job_ids) == 1
    assert newer.path.exists()


def test_a_job_whose_server_lost_everything_goes_on_and_its_curve_is_the_undisturbed_one(tmp_path: Path) -> None:
    # Two micro-batches of four layers a rank: a fifth of a second in which a busy disk has written what a step gives it.
    spec = a_job(tmp_path, emulated_layer_s=0.025)
    state_dir = tmp_path / "state"
    nodes = [NodeSpec("A100", 2)]
    began = time.monotonic()

    def spent(what: str) -> None:
        print(f"{time.monotonic() - began:6.1f} s  {what}")

    try:
        with Client(up(state_dir, nodes).url) as client:
            first = client.submit(job_file(spec)).id
            deadline, begun = time.monotonic() + 120, 0
            while not begun:
                assert time.monotonic() < deadline, client.job(first).reason
                found = [one for one in client.checkpoints(first) if one.step > 5]
                # One after which another entry was made, whose vote says what the step after it has to give.
                begun = next((a.step for a, b in pairwise(found[::-1]) if a.kind == b.kind == "entry"), 0)
                time.sleep(0.02)
            spent("trained, and entries are kept")
            losses = {step.step: step.loss for step in client.all_metrics(first)}
        down(state_dir)
        spent("down")
        shutil.rmtree(state_dir / "redis")
        with Client(up(state_dir, nodes).url) as client:
            spent("up again")
            assert not client.jobs().jobs, "nothing is known any more"
            result = everstep(state_dir, "adopt", state_dir / "jobs" / first, "--step", begun, "--json")
            assert result.exit_code == 0, result.output
            spent("adopted")
            adopted = json.loads(result.stdout)
            assert (adopted["adopted_from"], adopted["step"]) == (first, begun)
            job = client.wait(adopted["id"], 180)
            assert job.succeeded, job.reason
            spent("trained to the end")
            proven = f"step {begun + 1} came out as after the checkpoint of step {begun}"
            assert [one.message for one in client.history(job.id) if one.type == "checkpoint_proven"] == [proven]
            after = {step.step: step.loss for step in client.all_metrics(job.id)}
            assert sorted(after) == list(range(adopted["step"] + 1, spec.train.steps + 1))
    finally:
        down(state_dir)
    spent("down")
    again = {step: loss for step, loss in losses.items() if step > adopted["step"]}
    assert all(after[step] == loss for step, loss in again.items()), "the same steps came out otherwise"
    spent("compared")
    assert largest_gap({**losses, **after}, spec) <= 1e-5  # type: ignore[dict-item]
