"""`everstep ckpt` on a real disk: checked, compared, collected and taken elsewhere, in a process of its own."""

from __future__ import annotations

import importlib.util
import json
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from api.cli.main import app
from orchestrator.adapters import manifest
from orchestrator.adapters.memory_keyring import MemoryKeyring
from orchestrator.adapters.starting_point import Found
from orchestrator.domain.checkpoint import CheckpointRef
from orchestrator.domain.ids import Generation, NodeId, Step
from orchestrator.domain.state import Failed, Running
from tests.builders import a_device, a_plan
from tests.desk import NOW
from tests.saved import gradient_of, save, save_entry, state_of, updated
from tests.served import Served, eventually, serve
from tests.tiny_model import a_spec

pytestmark = pytest.mark.timeout(300)
SPEC = a_spec()


def everstep(*args: object) -> Result:
    env = {"EVERSTEP_URL": None, "EVERSTEP_STATE_DIR": "/nowhere", "COLUMNS": "160"}
    return CliRunner().invoke(app, [str(arg) for arg in args], env=env)


@pytest.fixture
def job(tmp_path: Path) -> Path:
    return tmp_path / "jobs" / "job-1"


def saved(job: Path, step: int, seed: int = 0) -> Found:
    return save(job / "checkpoints", SPEC, state_of(SPEC, seed), step=step)


def spoil(job: Path, found: Found) -> None:
    """One bit of what this checkpoint alone has."""
    files = [path for path in (job / "checkpoints").rglob("*") if path.is_file() and path.suffix != ".json"]
    file = max((path for path in files if f"{found.manifest.step:08d}" in str(path)), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 3] ^= 8
    file.write_bytes(content)


def test_whole_checkpoints_are_verified_and_one_flipped_bit_is_named(job: Path) -> None:
    older, newer = saved(job, 5), saved(job, 10, seed=1)
    result = everstep("ckpt", "verify", job, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["step"], found["path"], found["bad"]) == (10, str(newer.path), [])
    spoil(job, newer)
    assert "every byte as it was written" in everstep("ckpt", "verify", job, "--step", 5).output
    damaged = everstep("ckpt", "verify", newer.path, "--json")
    assert damaged.exit_code == 3
    (bad,) = json.loads(damaged.stdout)["bad"]
    assert "elements" in bad and "hash" in bad
    assert everstep("ckpt", "verify", older.path).exit_code == 0


def test_a_newer_one_that_cannot_be_used_is_not_passed_over_in_silence(job: Path) -> None:
    found = [saved(job, step, seed=step) for step in (5, 10, 15, 20)]
    (found[3].path / "manifest.json").write_text("{}")
    (found[2].path / found[2].manifest.shards[0].index).unlink()
    result = everstep("ckpt", "verify", job)
    assert result.exit_code == 3 and "step 10: " in result.output
    assert all(f"{one.path} is not what was written" in result.stderr for one in found[2:])
    assert everstep("ckpt", "verify", job, "--step", 10).exit_code == 0


def test_all_that_are_there_are_checked_where_that_is_asked_for(job: Path) -> None:
    found = [saved(job, step, seed=step) for step in (5, 10, 15)]
    result = everstep("ckpt", "verify", job, "--all")
    assert result.exit_code == 0 and "step 15: " in result.output and "so are 2 others" in result.output
    spoil(job, found[0])
    assert everstep("ckpt", "verify", job).exit_code == 0
    result = everstep("ckpt", "verify", job, "--all", "--json")
    assert result.exit_code == 3
    said = json.loads(result.stdout)
    assert [(Path(one["path"]), len(one["bad"])) for one in said["others"]] == [(found[1].path, 0), (found[0].path, 1)]


def test_checkpoints_are_compared_element_by_element(job: Path, tmp_path: Path) -> None:
    state = state_of(SPEC)
    first = save(job / "checkpoints", SPEC, state, step=5)
    state["layers.1.q"][0, 7] += 0.25
    second = save(tmp_path / "other", SPEC, state, step=6)
    result = everstep("ckpt", "diff", first.path, second.path, "--json")
    assert result.exit_code == 3, result.output
    found = json.loads(result.stdout)
    (one,) = found["unlike"]
    assert (one["line"], one["kind"], one["unlike"], one["elements"]) == ("layers.1.q", "p", 1, 1024)
    assert one["largest"] == pytest.approx(0.25)
    assert found["steps"] == [5, 6] and not found["only_a"] + found["only_b"]
    assert "layers.1.q" in everstep("ckpt", "diff", first.path, second.path).output
    assert "alike in every bit" in everstep("ckpt", "diff", job, first.path).output


def test_a_journals_entries_are_checked_compared_and_exported_through_what_they_are_read_through(
    job: Path, tmp_path: Path
) -> None:
    folder, state = job / "checkpoints", state_of(SPEC)
    base = save(folder, SPEC, state, step=5)
    entries = []
    for step in (6, 7):
        state = updated(SPEC, state, gradient_of(SPEC, step), step)
        entries.append(save_entry(folder, SPEC, gradient_of(SPEC, step), step))
    whole = save(tmp_path / "other", SPEC, state, step=7)
    assert "alike in every bit" in everstep("ckpt", "diff", entries[1].path, whole.path).output
    changed = json.loads(everstep("ckpt", "diff", base.path, entries[0].path, "--json").stdout)
    assert changed["steps"] == [5, 6] and {one["kind"] for one in changed["unlike"]} == {"p", "m", "v"}
    assert changed["shared_bytes"] == base.manifest.total_bytes, "of an entry all but its gradient is its base's"
    assert changed["new_bytes"] == entries[0].manifest.new_bytes
    for out, found in (("one", entries[1].path), ("other", whole.path)):
        assert everstep("ckpt", "export", found, tmp_path / out / "model").exit_code == 0
    models = [(tmp_path / out / "model" / "model.safetensors").read_bytes() for out in ("one", "other")]
    assert models[0] == models[1]
    spoil(job, entries[0])
    damaged = everstep("ckpt", "verify", job, "--json")
    assert damaged.exit_code == 3 and "00000006" in json.loads(damaged.stdout)["bad"][0], "what it is read through is bad"
    assert everstep("ckpt", "verify", base.path).exit_code == 0
    said = everstep("ckpt", "export", entries[1].path, tmp_path / "third")
    assert said.exit_code == 1 and "restore an older checkpoint" in said.stderr and not (tmp_path / "third").exists()


def test_what_a_kept_entry_is_read_through_is_not_removed(job: Path) -> None:
    folder = job / "checkpoints"
    old, base = (save(folder, SPEC, state_of(SPEC, step), step=step) for step in (3, 5))
    entries = [save_entry(folder, SPEC, gradient_of(SPEC, step), step) for step in (6, 7)]
    removed = everstep("ckpt", "gc", job, "--keep-last", 1, "--remove", "--json")
    assert removed.exit_code == 0, removed.output
    assert {Path(path) for path in json.loads(removed.stdout)["kept"]} == {base.path, *(one.path for one in entries)}
    assert not old.path.exists() and everstep("ckpt", "verify", job).exit_code == 0
    assert manifest.latest(folder) == entries[1].reference


def test_what_nobody_needs_is_shown_first_and_removed_when_asked(job: Path) -> None:
    found = [saved(job, step) for step in (5, 10, 15)]
    (job / "checkpoints" / "step-00000012.g1").mkdir()
    shown = json.loads(everstep("ckpt", "gc", job, "--keep-last", 1, "--json").stdout)
    gone = {Path(one["path"]).name for one in shown["going"] if Path(one["path"]).is_dir()}
    assert gone == {*(path.path.name for path in found[:2]), "step-00000012.g1"}
    assert not shown["removed"] and all(one.path.exists() for one in found), "nothing is changed unless asked"
    removed = everstep("ckpt", "gc", job, "--keep-last", 1, "--remove")
    assert removed.exit_code == 0 and "3 removed" in removed.output
    assert manifest.latest(job / "checkpoints") == found[2].reference
    assert everstep("ckpt", "verify", job).exit_code == 0


def test_nothing_is_removed_of_a_job_that_is_not_over(job: Path, tmp_path: Path) -> None:
    found = [saved(job, step) for step in (5, 10, 15)]
    with serve(tmp_path) as served:
        served.desk.add("job-1")
        for reference in (job, found[0].path):
            result = CliRunner().invoke(app, ["--url", served.url, "ckpt", "gc", str(reference), "--remove"])
            assert result.exit_code == 2 and "job-1 is PENDING and removes by itself" in result.stderr
        assert all(one.path.exists() for one in found)
        served.desk.change(served.desk.record("job-1"), state=Failed(at=NOW, message="it is over"))
        result = CliRunner().invoke(app, ["--url", served.url, "ckpt", "gc", str(job), "--remove", "--json"])
        assert result.exit_code == 0 and not found[0].path.exists() and found[1].path.exists()


def test_nothing_is_removed_while_nobody_can_say_that_the_job_is_over(job: Path, tmp_path: Path) -> None:
    found = [saved(job, step) for step in (5, 10, 15)]

    def remove(url: str, reference: object) -> Result:
        return CliRunner().invoke(app, ["--url", url, "ckpt", "gc", str(reference), "--remove"])

    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # and listens to nobody
        result = remove(f"http://127.0.0.1:{held.getsockname()[1]}", job)
    assert result.exit_code == 2 and "whether job-1 is over cannot be asked" in result.stderr
    with serve(tmp_path, keyring=MemoryKeyring(lambda: NOW)) as served:
        assert remove(served.url, job).exit_code == 3, "it does not say so to anybody"
    assert all(one.path.exists() for one in found)
    with serve(tmp_path) as served:
        assert remove(served.url, job).exit_code == 0, "nobody knows it"
    assert not found[0].path.exists()


def test_what_a_job_began_with_is_not_removed_with_its_own(job: Path, tmp_path: Path) -> None:
    found = [saved(job, step) for step in (5, 10, 15)]
    with serve(tmp_path) as served:
        served.desk.add("job-2")
        served.desk.change(served.desk.record("job-2"), checkpoint=found[0].reference)
        result = CliRunner().invoke(app, ["--url", served.url, "ckpt", "gc", "job-2", "--remove"])
        assert result.exit_code == 2 and "job-2 has no checkpoint of its own yet" in result.stderr
    assert all(one.path.exists() for one in found)


def test_a_checkpoint_that_is_asked_for_is_waited_for_and_a_job_that_ends_without_one_is_said(tmp_path: Path) -> None:
    made = CheckpointRef(step=Step(7), generation=Generation(1), path="/shared/7", local=(NodeId("n0"),))

    def ask(served: Served) -> Result:
        return CliRunner().invoke(app, ["--url", served.url, "ckpt", "now", "job-1", "--wait", "--json"])

    with serve(tmp_path) as served, ThreadPoolExecutor(1) as pool:
        served.desk.add("job-1")
        served.desk.change(served.desk.record("job-1"), state=Running(generation=Generation(1), plan=a_plan([a_device(0)])))
        asked = pool.submit(ask, served)
        eventually(lambda: len(served.desk.asked) == 1)
        assert not asked.done()
        served.desk.change(served.desk.record("job-1"), checkpoint=made)
        result = asked.result(60)
        assert result.exit_code == 0, result.output
        said = json.loads(result.stdout)
        assert (said["step"], said["tier"], said["local"]) == (7, "local+shared", ["n0"])
        asked = pool.submit(ask, served)
        eventually(lambda: len(served.desk.asked) == 2)
        served.desk.change(served.desk.record("job-1"), state=Failed(at=NOW, message="it is over"))
        result = asked.result(60)
        assert result.exit_code == 3 and "has made no checkpoint since" in result.stderr


def test_a_model_is_exported_from_the_folder_alone(job: Path, tmp_path: Path) -> None:
    saved(job, 5)
    result = everstep("ckpt", "export", job, tmp_path / "model", "--dtype", "bf16", "--json")
    assert result.exit_code == 0, result.output
    made = json.loads(result.stdout)
    assert (made["step"], made["dtype"], made["path"]) == (5, "bf16", str(tmp_path / "model"))
    assert json.loads((tmp_path / "model" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    again = everstep("ckpt", "export", job, tmp_path / "model")
    assert again.exit_code == 1 and "is there already" in again.stderr


def test_what_is_not_there_or_not_installed_is_said_in_a_sentence(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.mkdir(parents=True)
    result = everstep("ckpt", "verify", job)
    assert result.exit_code == 1 and "there is no checkpoint that can be read" in result.stderr
    assert "is no folder" in everstep("ckpt", "verify", tmp_path / "nowhere").stderr
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else find_spec(name))
    result = everstep("ckpt", "export", job, tmp_path / "model")
    assert result.exit_code == 2 and "export needs torch; run: pip install 'everstep[worker]'" in result.stderr
