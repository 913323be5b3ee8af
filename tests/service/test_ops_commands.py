"""`everstep top`, `bundle` and `config` against a real server, and that no command forgets --json, help or its status."""

from __future__ import annotations

import json
import os
import stat
import tarfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import httpx2
import pytest
import typer
from typer.testing import CliRunner, Result

from api.cli.main import app
from api.config import Config
from api.redaction import redacted, redacted_text
from api.schemas import load_job_file
from api.tokens import mint
from orchestrator.domain.cluster import Node
from orchestrator.domain.failure import Cause, Fault
from orchestrator.domain.ids import Device, Generation, NodeId
from orchestrator.domain.incident import Incident
from orchestrator.domain.state import Succeeded
from tests.desk import NOW
from tests.served import JOB, Served, running, serve

CANARY = "canary-5f2e9"


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with serve(tmp_path) as made:
        (tmp_path / "server.json").write_text(json.dumps({"url": made.url, "pid": os.getpid()}))
        made.desk.set_nodes(*(Node(id=NodeId(f"node-{n}"), kind="A100", num_devices=2) for n in range(1, 5)))
        running(made, steps=3)
        yield made


def everstep(state_dir: Path, *args: str, **variables: str | None) -> Result:
    env = {"EVERSTEP_URL": None, "EVERSTEP_STATE_DIR": str(state_dir), "COLUMNS": "140", **variables}
    return CliRunner().invoke(app, args, env=env)


def recovered(served: Served) -> None:
    device = Device(NodeId("node-2"), 1)
    fault = Fault(cause=Cause.RANK_LOST, message=f"killed; token={CANARY}", at=NOW, devices=(device,))
    done = Incident(
        number=1,
        fault=fault,
        generation=Generation(1),
        next_generation=Generation(2),
        pause_s=0.25,
        phases={"detect": 0.01},
    )
    served.desk.change(served.desk.record(JOB), incidents=(done,))


def test_top_shows_jobs_ranks_step_times_and_pauses_once_where_nobody_looks(served: Served) -> None:
    recovered(served)
    shown = everstep(served.state_dir, "top")
    assert shown.exit_code == 0
    for words in (
        "byte-gpt",
        "RUNNING",
        "3/100",
        "200 ms",
        "250 ms",
        "1 of 1 jobs train, 4 of 4 nodes up, 8 devices",
        "node-4",
    ):
        assert words in shown.output, shown.output
    told = json.loads(everstep(served.state_dir, "top", "--json").stdout)
    (job,) = told["jobs"]
    assert (job["ranks"], job["step_s"], job["last_pause_s"], job["recoveries"]) == (8, 0.2, 0.25, 1)
    assert len(told["nodes"]) == 4


def test_a_bundle_holds_what_happened_and_no_secret(served: Served, tmp_path: Path) -> None:
    recovered(served)
    spec = served.desk.record(JOB).spec
    model = {
        "kind": "tiny",
        "api_key": CANARY,
        "url": f"https://me:{CANARY}@example.org/x",
        "nested": [{"password": CANARY}],
    }
    served.desk.change(served.desk.record(JOB), spec=replace(spec, model=model, secrets={"HF_TOKEN": "hf-token"}))
    served.desk.tell(JOB, "rank_lost", f"rank 3 said: Authorization: Bearer {CANARY}", secret=CANARY)
    served.write_log(JOB, "node-2/1", f"hello\nHF_TOKEN={CANARY}\nthe end\n")
    served.desk.become(JOB, Succeeded(at=NOW), "succeeded", "done")
    path = tmp_path / "b.tar.gz"
    done = everstep(served.state_dir, "bundle", JOB, "-o", str(path))
    assert done.exit_code == 0 and "look through it" in done.output and "tar tzf" in done.output
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and [one.name for one in tmp_path.glob("*.partial")] == []
    found = unpacked(path)
    assert CANARY not in "".join(found.values())
    assert json.loads(found["manifest.json"])["format"] == "everstep-bundle"
    assert json.loads(found["manifest.json"])["server"]["version"] == "1.2.3"
    assert [json.loads(line)["step"] for line in found["steps.jsonl"].splitlines()] == [1, 2, 3]
    assert json.loads(found["events.jsonl"].splitlines()[-1])["type"] == "succeeded"
    (incident,) = (json.loads(line) for line in found["incidents.jsonl"].splitlines())
    assert incident["pause_s"] == 0.25 and "[redacted]" in incident["message"]
    assert found["logs/node-2-1.log"] == "hello\nHF_TOKEN=[redacted]\nthe end\n"
    assert len(found["nodes.jsonl"].splitlines()) == 4 and json.loads(found["job.json"])["status"] == "SUCCEEDED"
    # The file is a job file: what is not secret can be submitted again as it is.
    again = json.loads(found["config.json"])
    submitted = load_job_file(json.dumps(again), "application/json")
    assert submitted.train == spec.train and submitted.secrets == {"HF_TOKEN": "hf-token"}


def unpacked(path: Path) -> dict[str, str]:
    with tarfile.open(path) as archive:
        read = {one.name: archive.extractfile(one) for one in archive.getmembers()}
        return {name.partition("/")[2]: file.read().decode() for name, file in read.items() if file is not None}


def test_a_bundle_of_no_job_leaves_no_file(served: Served, tmp_path: Path) -> None:
    path = tmp_path / "none.tar.gz"
    assert everstep(served.state_dir, "bundle", "job-none", "-o", str(path)).exit_code == 102
    assert not path.exists()


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("password: hunter22 and so on", False),
        ("AWS_SECRET_ACCESS_KEY=hunter22", False),
        ("redis://user:hunter22@host:6379/0", False),
        ("Authorization: Basic hunter22hunter22", False),
        ("tokens per second 1234.5, token count: 12", True),
        ("tokenizer=hunter22", True),
    ],
)
def test_text_that_looks_like_a_secret_is_blotted(text: str, kept: bool) -> None:
    assert ("hunter22" in redacted_text(text) or "1234.5" in redacted_text(text)) is kept


@pytest.mark.parametrize("word", ["a_", "a", "a-", "token_", "bearer ", "token= ", "://a:", "a://"])
def test_no_text_keeps_the_api_busy_for_looking_like_the_beginning_of_a_secret(word: str) -> None:
    """Time that grows with the square of a job file's length takes minutes for this one, and nobody else is answered."""
    began = time.process_time()
    redacted_text(word * (100_000 // len(word)))
    assert time.process_time() - began < 20


def test_a_token_of_ours_is_blotted_wherever_it_stands() -> None:
    token = mint()
    assert token not in redacted_text(f"['--verbose', '{token}'] {token}.")


def test_names_that_say_secret_are_blotted_and_figures_are_not() -> None:
    value: Any = {"db_password": "x", "apiKey": "x", "tokens_per_s": 3.5, "token_file": "/x", "num_tokens": 4, "key": "k"}
    assert redacted(value) == {**value, "db_password": "[redacted]", "apiKey": "[redacted]"}


def test_config_says_what_counts_and_who_said_it(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('[api]\nport = 7\n[redis]\npassword = "canary-5f2e9"\n')
    shown = everstep(tmp_path, "config", "show", "--set", "api.grace_s=4", EVERSTEP_LOG_LEVEL="debug")
    assert shown.exit_code == 0 and CANARY not in shown.output
    told = json.loads(everstep(tmp_path, "config", "show", "--json", EVERSTEP_LOG_LEVEL="debug").stdout)
    assert told["file"] == str(tmp_path / "config.toml") and CANARY not in json.dumps(told)
    assert told["settings"]["api.port"] == {
        "value": 7, "from": f"file {tmp_path / 'config.toml'}", "variable": "EVERSTEP_API_PORT",
    }  # fmt: skip
    assert told["settings"]["log.level"]["from"] == "environment EVERSTEP_LOG_LEVEL"
    assert told["settings"]["api.chaos"]["from"] == "default"


def test_config_validates_a_file_and_refuses_with_what_was_meant(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text("api: {port: 8265}\n")
    bad.write_text("api: {prot: 8265}\n")
    valid = everstep(tmp_path, "config", "validate", str(good), EVERSTEP_STATE_DIR=None)
    assert valid.exit_code == 0 and "1 of" in valid.output
    refused = everstep(tmp_path, "config", "validate", str(bad))
    assert refused.exit_code == 2 and 'did you mean "port"' in refused.output
    assert everstep(tmp_path, "config", "validate", str(tmp_path / "none.yaml")).exit_code == 2


def test_schemas_are_printed_and_served(served: Served) -> None:
    printed = json.loads(everstep(served.state_dir, "config", "schema").stdout)
    with httpx2.Client(base_url=served.url, trust_env=False) as http:
        assert http.get("/api/v1/schemas/config").json() == printed
        of_job = http.get("/api/v1/schemas/job").json()
    assert set(printed["properties"]) == set(Config.model_fields)
    assert of_job["additionalProperties"] is False and "train" in of_job["properties"]
    assert set(json.loads(everstep(served.state_dir, "config", "schema", "--job").stdout)["properties"]) == set(
        of_job["properties"]
    )


def commands() -> Iterator[tuple[str, click.Command]]:
    def walk(command: Any, name: str) -> Iterator[tuple[str, Any]]:
        if hasattr(command, "commands"):
            for part, inner in command.commands.items():
                yield from walk(inner, f"{name} {part}".strip())
            if not command.invoke_without_command:
                return
        yield name, command

    yield from walk(typer.main.get_command(app), "")


def test_every_command_says_what_it_does_and_speaks_json() -> None:
    known = dict(commands())
    assert len(known) > 30
    # These become another program, which reads its own options, or print nothing but a schema, which is JSON.
    without = {"api", "supervisor", "join", "secret", "config schema"}
    for name, command in known.items():
        assert (command.help or "").strip().endswith((".", ")", "options.")), name
        options = {option for parameter in command.params for option in parameter.opts}
        assert "--json" in options or name in without, name
    assert {"--install-completion", "--show-completion"} <= {
        option for parameter in typer.main.get_command(app).params for option in parameter.opts
    }


def test_job_files_may_be_toml(served: Served, tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(
        'name = "by-toml"\nprogram = "causal_lm"\n[data]\nfiles = ["{stdlib}", "texts/*.txt"]\n'
        "[train]\nsteps = 3\nmicro_batches = 4\nmicro_batch_size = 2\nsequence = 64\n"
    )
    done = everstep(served.state_dir, "submit", str(path), "--json")
    assert done.exit_code == 0, done.output
    spec = served.desk.record(json.loads(done.stdout)["id"]).spec
    assert spec.name == "by-toml" and spec.data.files == ("{stdlib}", str(tmp_path / "texts/*.txt"))
