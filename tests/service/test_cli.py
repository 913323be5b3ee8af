"""The `everstep` command against a real server: what it prints, and the exit status of everything it may meet."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from api.cli.main import app
from orchestrator.domain.access import Submitter
from orchestrator.domain.checkpoint import CheckpointRef
from orchestrator.domain.cluster import Node
from orchestrator.domain.events import (
    CancelRequested,
    CheckpointNow,
    CordonRequested,
    NodeRequested,
    PauseRequested,
    ReleaseRequested,
    ResizeRequested,
    ResumeRequested,
)
from orchestrator.domain.faults import FaultKind, FaultRequested, Injected, Verdict
from orchestrator.domain.ids import Device, Generation, JobId, NodeId, Step
from orchestrator.domain.quarantine import Quarantine, Standing
from orchestrator.domain.size import Size
from orchestrator.domain.state import Cancelled, Failed, Running, Succeeded
from tests.desk import NOW, a_plan, first_generation
from tests.served import Served, eventually, serve

pytestmark = pytest.mark.timeout(120)
JOB = "job-1"
FILE = {
    "name": "byte-gpt",
    "program": "causal_lm",
    "data": {"files": ["{stdlib}", "texts/*.txt", "/abs/*.py"]},
    "train": {"steps": 3, "micro_batches": 4, "micro_batch_size": 2, "sequence": 64},
}


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with serve(tmp_path) as running:
        (tmp_path / "server.json").write_text(json.dumps({"url": running.url, "pid": os.getpid()}))
        yield running


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(FILE))
    return path


def everstep(served: Served | Path, *args: str) -> Result:
    state_dir = served if isinstance(served, Path) else served.state_dir
    env = {"EVERSTEP_URL": None, "EVERSTEP_STATE_DIR": str(state_dir), "COLUMNS": "100"}
    return CliRunner().invoke(app, args, env=env)


def running(served: Served, steps: int = 0) -> None:
    plan = a_plan()
    served.desk.add(JOB)
    served.desk.become(JOB, Running(generation=Generation(1), plan=plan), "running", "trains", **first_generation(plan))
    for number in range(steps):
        served.desk.step(JOB, loss=5.0 - number)


def later(*actions: object) -> threading.Timer:
    timer = threading.Timer(0.3, lambda: [action() for action in actions])  # type: ignore[operator]
    timer.start()
    return timer


# --- submit --------------------------------------------------------------------------------------------------------------


def test_submit_prints_the_id_and_what_to_do_next(served: Served, job_file: Path) -> None:
    result = everstep(served, "submit", str(job_file))
    job = served.desk.job_ids[0]
    assert result.exit_code == 0
    assert f"✓ {job} submitted (byte-gpt)" in result.output and f"everstep events -f {job}" in result.output


def test_globs_count_from_the_job_files_folder(served: Served, job_file: Path) -> None:
    everstep(served, "submit", str(job_file))
    files = served.desk.record(served.desk.job_ids[0]).spec.data.files
    assert files == ("{stdlib}", str(job_file.parent / "texts/*.txt"), "/abs/*.py")


def test_a_job_can_begin_with_a_checkpoint(served: Served, job_file: Path) -> None:
    assert everstep(served, "submit", str(job_file), "--from", "/state/jobs/job-0", "--weights-only").exit_code == 0
    found = served.desk.record(served.desk.job_ids[0]).spec.checkpoint
    assert (found.restore_from, found.weights_only, found.every) == ("/state/jobs/job-0", True, 25)
    job_file.write_text(yaml.safe_dump({**FILE, "checkpoint": {"every": 7, "restore_from": "old/step-00000005.g1"}}))
    assert everstep(served, "submit", str(job_file)).exit_code == 0
    found = served.desk.record(served.desk.job_ids[0]).spec.checkpoint
    assert (found.restore_from, found.every) == (str(job_file.parent / "old/step-00000005.g1"), 7), "from the file's folder"


def test_the_same_key_makes_one_job(served: Served, job_file: Path) -> None:
    ids = {json.loads(everstep(served, "submit", str(job_file), "--key", "k", "--json").stdout)["id"] for _ in range(2)}
    assert len(ids) == 1 == len(served.desk.job_ids)


def test_a_job_file_that_cannot_work_is_exit_2_with_one_clear_sentence(served: Served, job_file: Path) -> None:
    job_file.write_text(yaml.safe_dump(FILE).replace("steps:", "stepz:"))
    result = everstep(served, "submit", str(job_file))
    assert result.exit_code == 2
    assert 'Refused: unknown key "stepz" of train; did you mean "steps"?' in result.stderr
    assert "train.steps: is required" in result.stderr
    job_file.write_text("a: [")
    result = everstep(served, "submit", str(job_file))
    assert result.exit_code == 2 and "not YAML at line 1" in result.stderr
    assert everstep(served, "submit", "/no/such/file").exit_code == 2
    assert not served.desk.job_ids


# --- following -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("end", "code", "words"),
    [
        (Succeeded(at=NOW), 0, "✓ SUCCEEDED  step 2 of 100"),
        (Failed(at=NOW, message="rank 3 raised", device=Device(NodeId("node-1"), 0), exit_code=1), 100, "rank 3 raised"),
        (Cancelled(at=NOW), 103, "■ CANCELLED"),
    ],
    ids=["succeeded", "failed", "cancelled"],
)
@pytest.mark.parametrize("command", ["events -f job-1", "wait job-1", "logs -f job-1"])
def test_followers_end_with_the_jobs_result(
    served: Served, command: str, end: Succeeded | Failed | Cancelled, code: int, words: str
) -> None:
    running(served, steps=1)
    served.write_log(JOB, "node-1/0", "hello from rank 0\n")
    timer = later(lambda: served.desk.step(JOB, 4.0), lambda: served.desk.become(JOB, end, "ended", "over"))
    result = everstep(served, *command.split())
    timer.join()
    assert result.exit_code == code
    assert ("hello from rank 0" if "logs" in command else words) in result.output


def test_a_followed_submission_shows_steps_events_and_the_end(served: Served, job_file: Path) -> None:
    def play() -> None:
        eventually(lambda: bool(served.desk.job_ids))
        job, plan = served.desk.job_ids[0], a_plan()
        state = Running(generation=Generation(1), plan=plan)
        served.desk.become(job, state, "running", "generation 1 trains", **first_generation(plan))
        for loss in (5.0, 4.0, 3.0):
            served.desk.step(job, loss)
        served.desk.become(job, Succeeded(at=NOW), "ended", "all 3 steps are committed")

    player = threading.Thread(target=play)
    player.start()
    result = everstep(served, "submit", str(job_file), "--follow")
    player.join()
    assert result.exit_code == 0
    for words in ("submitted", "generation 1 trains", "step 3/3  loss 3.0000", "all 3 steps are committed", "✓ SUCCEEDED"):
        assert words in result.output, words


def test_following_as_json_prints_a_line_per_event_and_the_job_last(served: Served) -> None:
    running(served, steps=2)
    served.desk.become(JOB, Succeeded(at=NOW), "ended", "done")
    result = everstep(served, "events", "-f", JOB, "--json")
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line.get("step") for line in lines[:-1]] == [0, 1, 2, 2]
    assert lines[-1]["id"] == JOB and lines[-1]["status"] == "SUCCEEDED"


def test_waiting_too_briefly_is_exit_101(served: Served) -> None:
    running(served)
    result = everstep(served, "wait", JOB, "--timeout", "0")
    assert result.exit_code == 101 and "is RUNNING at step 0 of 100" in result.stderr


def test_ctrl_c_detaches_with_130_and_the_job_goes_on(served: Served) -> None:
    running(served, steps=1)
    command = [sys.executable, "-m", "api.cli", "--url", served.url, "events", "-f", JOB]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored where the tests run in the background
    )
    eventually(lambda: served.desk.readers == 1, within_s=60)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"detached; {JOB} goes on" in output
    assert not served.desk.asked


# --- looking -------------------------------------------------------------------------------------------------------------


def test_ls_sorts_counts_and_finds_what_somebody_submitted(served: Served) -> None:
    for number, by in enumerate((Submitter(id="tok-1", name="ci"), None, None)):
        served.desk.add(f"job-{number}", by=by)
    served.desk.change(served.desk.record("job-1"), state=Succeeded(at=NOW))

    def listed(*args: str) -> list[str]:
        return [job["id"] for job in json.loads(everstep(served, "ls", "--json", *args).stdout)["jobs"]]

    assert listed("--sort", "created_at") == ["job-0", "job-1", "job-2"]
    assert listed("--sort=-finished_at") == ["job-1"] and listed("--user", "ci") == ["job-0"]
    assert "3 in all" in everstep(served, "ls", "--limit", "1", "--total").output
    assert "ci" in everstep(served, "get", "job-0").output
    assert everstep(served, "ls", "--sort", "name").exit_code == 2


def test_ls_get_and_names(served: Served) -> None:
    assert "no jobs yet" in everstep(served, "ls").output
    running(served, steps=2)
    served.desk.add("job-2", state=Succeeded(at=NOW))
    listed = everstep(served, "ls").output
    assert JOB in listed and "● RUNNING" in listed and "2/100" in listed
    assert [job["id"] for job in json.loads(everstep(served, "ls", "-s", "SUCCEEDED", "--json").stdout)["jobs"]] == [
        "job-2"
    ]
    assert json.loads(everstep(served, "get", "last", "--json").stdout)["id"] == "job-2"
    assert json.loads(everstep(served, "get", "byte-gpt", "--json").stdout)["id"] == "job-2"
    page = everstep(served, "get", JOB).output
    assert "tp2 x pp2 x dp2" in page and "rank 7 node-4/1 pid 4007" in page


def test_checkpoints_of_a_job_are_listed(served: Served) -> None:
    running(served)
    assert f"{JOB} has no checkpoint yet" in everstep(served, "ckpt", "ls", JOB).output
    path = f"/state/jobs/{JOB}/checkpoints/step-00000020.g1"
    one = CheckpointRef(
        step=Step(20), generation=Generation(1), path=path, seconds=0.25, total_bytes=3_000_000, new_bytes=1500
    )
    served.desk.change(served.desk.record(JOB), checkpoint=one)
    shown = everstep(served, "ckpt", "ls", "last").output
    assert "1.5 kB" in shown and "3 MB" in shown and "250 ms" in shown
    assert path in shown.replace("\n", "").replace(" ", "")
    assert [item["step"] for item in json.loads(everstep(served, "ckpt", "ls", JOB, "--json").stdout)] == [20]


@pytest.mark.parametrize(
    "command", ["get job-x", "cancel job-x", "wait job-x", "logs job-x", "events job-x", "events -f job-x", "ckpt ls job-x"]
)
def test_an_unknown_job_is_exit_102(served: Served, command: str) -> None:
    result = everstep(served, *command.split())
    assert result.exit_code == 102 and "Not found" in result.stderr


def test_an_unknown_name_is_exit_102_and_points_at_the_list(served: Served) -> None:
    result = everstep(served, "get", "nope")
    assert result.exit_code == 102 and "see everstep ls" in result.stderr


def test_events_and_logs_of_the_past(served: Served) -> None:
    running(served, steps=1)
    served.write_log(JOB, "node-1/0", "one\ntwo\n")
    assert "RUNNING     trains" in everstep(served, "events", JOB).output
    assert json.loads(everstep(served, "events", JOB, "--json").stdout)["type"] == "running"
    assert everstep(served, "logs", JOB, "--rank", "0", "-n", "1").stdout == "two\n"
    assert json.loads(everstep(served, "logs", JOB, "--json").stdout)["device"] == "node-1/0"
    assert everstep(served, "logs", JOB, "--rank", "9").exit_code == 2


def test_lines_of_many_ranks_are_merged_searched_and_followed_to_the_jobs_end(served: Served) -> None:
    running(served)
    served.write_log(JOB, "node-1/0", "one\nbad one\n")
    served.write_log(JOB, "node-2/1", "two\nbad two\n")
    assert everstep(served, "logs", JOB, "--all").stdout.count("rank") == 4
    found = everstep(served, "logs", JOB, "-g", "bad", "--json").stdout.splitlines()
    assert {(one["rank"], one["text"]) for one in map(json.loads, found)} == {(0, "bad one"), (3, "bad two")}
    assert "rank 3" in everstep(served, "logs", JOB, "--rank", "0", "--rank", "3", "--since", "10m").stdout
    assert everstep(served, "logs", JOB, "--since", "soon").exit_code == 2
    assert everstep(served, "logs", JOB, "--since", "9999999d").exit_code == 2, "before there was time"
    served.desk.become(JOB, Failed(at=NOW, message="no"), "failed", "no")
    followed = everstep(served, "logs", JOB, "-f", "--all", "-n", "1")
    assert followed.exit_code == 100 and followed.stdout.count("rank") == 1


# --- commanding ----------------------------------------------------------------------------------------------------------


def test_a_change_may_rest_on_what_was_seen(served: Served) -> None:
    running(served)
    seen = json.loads(everstep(served, "get", JOB, "--json").stdout)["revision"]
    assert f"revision  {seen}" in everstep(served, "get", JOB).stdout
    assert everstep(served, "scale", JOB, "2", "--if-revision", str(seen)).exit_code == 0
    late = everstep(served, "cancel", JOB, "--if-revision", str(seen))
    assert late.exit_code == 1 and f"is at revision {seen + 1}" in late.stderr
    assert [type(one) for one in served.desk.asked] == [ResizeRequested]
    assert everstep(served, "cancel", "-l", "a=b", "--if-revision", "1").exit_code == 2


def test_commands_reach_the_supervisor(served: Served) -> None:
    running(served)
    served.desk.set_nodes(Node(id=NodeId("node-1"), kind="H100", num_devices=2))
    results = [
        everstep(served, *command.split())
        for command in (
            "cancel job-1",
            "ckpt now job-1",
            "nodes add B200 --devices 4 --count 2",
            "nodes cordon node-1",
            "nodes drain node-1",
            "nodes rm node-1 --deadline 30",
            "scale job-1 4 --max 8",
            "pause job-1",
            "resume job-1",
            "kill rank job-1 3",
            "kill node node-1",
        )
    ]
    assert not any(result.exit_code for result in results)
    assert [type(command) for command in served.desk.asked] == [
        CancelRequested,
        CheckpointNow,
        NodeRequested,
        CordonRequested,
        CordonRequested,
        CordonRequested,
        ResizeRequested,
        PauseRequested,
        ResumeRequested,
        FaultRequested,
        FaultRequested,
    ]
    assert served.desk.asked[2] == NodeRequested(kind="B200", num_devices=4, count=2)
    assert served.desk.asked[5] == CordonRequested(node=NodeId("node-1"), drain=True, remove=True, deadline_s=30.0)
    assert served.desk.asked[6] == ResizeRequested(job=JobId(JOB), size=Size(max_devices=8, target=4))
    assert served.desk.asked[0] == CancelRequested(job=JobId(JOB))
    assert "H100" in everstep(served, "nodes").output
    assert json.loads(everstep(served, "nodes", "--json").stdout)[0]["id"] == "node-1"


def test_nodes_name_devices_that_are_kept_out_and_release_lets_them_back(served: Served) -> None:
    served.desk.set_nodes(Node(id=NodeId("node-1"), kind="H100", num_devices=2))
    quarantine = Quarantine(
        device=Device(NodeId("node-1"), 1),
        reason="it differs",
        since=NOW,
        job=JobId(JOB),
        standing=Standing.HELD,
        said="3 wrong",
    )
    served.desk.write(quarantine=(quarantine,))
    shown = " ".join(everstep(served, "nodes").output.split())
    assert "node-1/1 is kept out until you release it: it differs (3 wrong)" in shown and "release node-1" in shown
    assert everstep(served, "nodes", "release", "node-1").exit_code == 0
    assert served.desk.asked == [ReleaseRequested(node=NodeId("node-1"))]
    assert everstep(served, "nodes", "release", "node-2").exit_code != 0


def test_what_is_refused_is_exit_1_and_bad_values_are_exit_2(served: Served) -> None:
    running(served)
    served.desk.become(JOB, Cancelled(at=NOW), "ended", "cancelled")
    assert everstep(served, "cancel", JOB).exit_code == 1
    assert everstep(served, "scale", JOB, "4").exit_code == 1
    assert everstep(served, "scale", JOB).exit_code == 2
    assert everstep(served, "nodes", "add", "B300").exit_code == 2
    assert everstep(served, "kill", "node", "node-9").exit_code == 102


# --- faults on purpose ---------------------------------------------------------------------------------------------------


def test_kinds_of_fault_need_no_server(tmp_path: Path) -> None:
    assert "after_vote" in everstep(tmp_path, "chaos", "kinds").output
    assert set(json.loads(everstep(tmp_path, "chaos", "kinds", "--json").stdout)["kinds"]) == set(FaultKind)


def test_a_fault_is_asked_for_and_its_verdict_reported(served: Served) -> None:
    running(served, steps=3)
    result = everstep(served, "chaos", "inject", "kill", JOB, "--rank", "2", "--at", "in_vote", "--json")
    accepted = json.loads(result.stdout)
    (asked,) = [item for item in served.desk.asked if isinstance(item, FaultRequested)]
    assert (asked.fault, asked.rank, asked.at, asked.id) == (FaultKind.KILL, 2, "in_vote", accepted["fault"])
    one = Injected(
        id=asked.id, asked=asked, asked_at=NOW, carried_out_at=NOW, devices=(Device(NodeId("node-2"), 0),), step=Step(2),
        cause="rank_lost", detected_s=0.01, pause_s=0.234, verdict=Verdict.RECOVERED,
    )  # fmt: skip
    served.desk.change(served.desk.record(JOB), injected=(one,))
    shown = everstep(served, "chaos", "report", JOB).output
    assert "in_vote 2" in shown and "0.234" in shown and "1 recovered" in shown and "0 steps lost" in shown
    found = json.loads(everstep(served, "chaos", "report", JOB, "--json").stdout)
    assert (found["num_faults"], found["points"], found["pauses_s"]) == (1, {"in_vote": 1}, [0.234])


def test_a_fault_that_cannot_be_is_exit_2_with_its_sentence(served: Served) -> None:
    running(served)
    for command, words in (
        ("chaos inject kill last --at in_voting", "in_compute, before_reduce"),
        ("chaos inject explode last", "kind is 'explode'"),
        ("chaos inject clock_jump", "clock_jump needs jump_s"),
        ("chaos run last --schedule nowhere.yaml", "nowhere.yaml cannot be read"),
    ):
        result = everstep(served, *command.split())
        assert result.exit_code == 2 and words in result.stderr, result.output


def test_a_schedule_runs_until_every_fault_has_its_verdict_and_can_be_replayed(served: Served, tmp_path: Path) -> None:
    running(served, steps=3)

    def play() -> None:
        """A supervisor that carries out at once whatever is asked."""
        done = 0
        while done < 4:
            asked = [item for item in served.desk.asked if isinstance(item, FaultRequested)]
            for one in asked[done:]:
                hit = Injected(
                    id=one.id, asked=one, asked_at=NOW, carried_out_at=NOW, step=Step(2), verdict=Verdict.HARMLESS,
                    devices=(Device(NodeId("node-2"), 0),),
                )  # fmt: skip
                record = served.desk.record(JOB)
                served.desk.change(record, injected=(*record.injected, hit))
            done = len(asked)

    thread = threading.Thread(target=play)
    thread.start()
    schedule = tmp_path / "schedule.yaml"
    schedule.write_text(yaml.safe_dump({"seed": 5, "num_faults": 2, "kinds": {"kill": 1}, "rate_per_minute": 6000}))
    first = everstep(served, "chaos", "run", JOB, "--schedule", str(schedule), "--json")
    recorded = tmp_path / "report.json"
    recorded.write_text(first.stdout)
    again = everstep(served, "chaos", "replay", str(recorded), JOB, "--json")
    thread.join(60)
    assert first.exit_code == again.exit_code == 0, first.output + again.output
    assert json.loads(first.stdout)["verdicts"] == json.loads(again.stdout)["verdicts"] == {"harmless": 2}
    asked = [item for item in served.desk.asked if isinstance(item, FaultRequested)]
    assert [(item.device, item.step) for item in asked[2:]] == [(Device(NodeId("node-2"), 0), 2)] * 2
    assert [item.seed for item in asked[:2]] == [item.seed for item in asked[2:]]


# --- the server ----------------------------------------------------------------------------------------------------------


def test_no_server_is_exit_4_and_says_how_to_start_one(tmp_path: Path) -> None:
    result = everstep(tmp_path, "ls")
    assert result.exit_code == 4
    assert f"no server is running from {tmp_path}" in result.stderr and "everstep up" in result.stderr
    (tmp_path / "server.json").write_text('{"url": "http://127.0.0.1:9", "pid": 1}')
    assert everstep(tmp_path, "ls").exit_code == 4
    assert "none running" in everstep(tmp_path, "version").output


def test_version_names_client_and_server(served: Served) -> None:
    found = json.loads(everstep(served, "version", "--json").stdout)
    assert found["server"] == "1.2.3" and found["client"]


def test_the_cli_loads_no_server_library() -> None:
    loaded = (
        "import sys, api.cli.main; print([m for m in ('fastapi', 'ray', 'torch', 'redis', 'uvicorn') if m in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", loaded], text=True) == "[]\n"


def test_what_runs_here_is_told_as_json(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "api.cli", "down", "--state-dir", str(tmp_path / "never"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    said = json.loads(done.stdout)
    assert said["url"] is None and not any(said["processes"].values()) and said["nodes"] == {}
    assert "nothing was ever started" in done.stderr
