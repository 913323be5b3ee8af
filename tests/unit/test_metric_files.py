"""What the board and the alerts name exists: each metric in the API's or the supervisor's own answer to Prometheus."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from api.metrics import Metrics
from deploy import metrics as supervisor
from orchestrator.domain.checkpoint import CheckpointRef
from orchestrator.domain.cluster import Node
from orchestrator.domain.failure import Cause, Fault
from orchestrator.domain.ids import Generation, JobId, NodeId, Step
from orchestrator.domain.incident import Incident
from orchestrator.domain.job import JobRecord
from orchestrator.domain.state import Running, Succeeded
from tests.desk import NOW as AT
from tests.desk import PlayedDesk, a_plan, a_spec, first_generation

ROOT = Path(__file__).resolve().parent.parent.parent
RULES = ROOT / "deploy" / "prometheus" / "rules.yml"
BOARD = ROOT / "deploy" / "grafana" / "everstep.json"
RUNBOOK = ROOT / "docs" / "runbook.md"
LABELS = {
    "state", "cause", "phase", "kind", "status", "code", "route", "method", "job", "to", "outcome", "command", "version",
    "le",
}  # fmt: skip
PROMTOOL = shutil.which("promtool") or shutil.which("promtool", path=str(Path(sys.executable).parent))


def told() -> str:
    """Both answers, of a job that trains and one that has recovered and saved."""
    desk = PlayedDesk()
    plan = a_plan()
    desk.set_nodes(*(Node(id=NodeId(f"node-{number}"), kind="A100", num_devices=2) for number in range(1, 5)))
    desk.add("job-1")
    desk.become("job-1", Running(generation=Generation(1), plan=plan), "running", "trains", **first_generation(plan))
    desk.step("job-1", 2.5)
    before = JobRecord(id=JobId("job-2"), spec=a_spec(), state=Running(generation=Generation(1), plan=plan), created_at=AT)
    fault = Fault(cause=Cause.RANK_LOST, message="rank 3 was killed", at=AT)
    incident = Incident(
        number=1, fault=fault, generation=Generation(1), phases={"detect": 0.01}, pause_s=0.2, rolled_back=2
    )
    saved = CheckpointRef(step=Step(3), generation=Generation(1), path="/c", new_bytes=10, seconds=0.5)
    supervisor.count(before, replace(before, incidents=(incident,), checkpoint=saved, state=Succeeded(at=AT)))
    return asyncio.run(Metrics("1.2.3", 50).render(desk)).decode() + generate_latest(supervisor.REGISTRY).decode()


def expressions() -> dict[str, str]:
    rules = yaml.safe_load(RULES.read_text())["groups"][0]["rules"]
    found = {rule["alert"]: rule["expr"] for rule in rules}
    for panel in json.loads(BOARD.read_text())["panels"]:
        for target in panel.get("targets", ()):
            found[f"{panel['title']} {target['refId']}"] = target["expr"]
    return found


def test_every_metric_of_board_and_alerts_exists() -> None:
    names: set[str] = set()
    for family in text_string_to_metric_families(told()):
        names |= {family.name, *(sample.name for sample in family.samples)}
        suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(family.type, ())
        names |= {family.name + suffix for suffix in suffixes}
    said = expressions()
    assert len(said) > 40
    for where, expression in said.items():
        used = set(re.findall(r"\beverstep_[a-z0-9_]+", expression))
        assert used <= names, f"{where}: {used - names}"
        assert used or "up{" in expression, where


def test_labels_are_a_closed_vocabulary_and_names_have_the_prefix() -> None:
    for family in text_string_to_metric_families(told()):
        assert family.name.startswith("everstep_"), family.name
        for sample in family.samples:
            assert set(sample.labels) <= LABELS, sample


def test_labels_that_expressions_choose_by_are_there() -> None:
    samples = [sample for family in text_string_to_metric_families(told()) for sample in family.samples]
    known = {name for sample in samples for name in sample.labels} | {"code", "route", "command", "kind", "le", "cause"}
    for where, expression in expressions().items():
        chosen = set(re.findall(r"([a-z_]+)\s*=~?\"", expression))
        chosen |= {name.strip() for names in re.findall(r"by \(([^)]*)\)", expression) for name in names.split(",")}
        assert chosen <= known, f"{where}: {chosen - known}"


def test_figures_of_a_job_that_trains_are_right() -> None:
    values = {
        (sample.name, sample.labels.get("job", "")): sample.value
        for family in text_string_to_metric_families(told())
        for sample in family.samples
    }
    assert values["everstep_job_tokens_per_second", "job-1"] == pytest.approx(4 * 2 * 64 / 0.2)
    assert values["everstep_job_committed_step", "job-1"] == 1 and values["everstep_job_devices", "job-1"] == 8
    assert values["everstep_job_slowest_rank_ratio", "job-1"] == 1
    assert values["everstep_steps_lost_total", ""] >= 2
    assert 0 <= values["everstep_goodput_ratio", ""] <= 1


def test_every_alert_has_its_words_and_a_section_of_the_runbook() -> None:
    headings = {line.removeprefix("## ").lower() for line in RUNBOOK.read_text().splitlines() if line.startswith("## ")}
    rules: list[dict[str, Any]] = yaml.safe_load(RULES.read_text())["groups"][0]["rules"]
    assert {rule["alert"].lower() for rule in rules} == headings
    for rule in rules:
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        assert rule["annotations"]["summary"] and rule["annotations"]["description"]
        assert rule["annotations"]["runbook"] == f"docs/runbook.md#{rule['alert'].lower()}"


def test_the_board_is_one_that_grafana_can_show() -> None:
    board = json.loads(BOARD.read_text())
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids) and board["uid"] and board["schemaVersion"] >= 36
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24 and not cells & taken, panel["title"]
        taken |= cells
        assert panel["type"] in ("row", "stat", "timeseries") and (panel["type"] == "row") != bool(panel.get("targets"))


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not here: setup.sh takes it out of Debian's prometheus package")
def test_promtool_takes_the_rules_and_every_expression_of_the_board(tmp_path: Path) -> None:
    assert PROMTOOL is not None
    board = [
        {"record": f"board:{number}", "expr": expression.replace("$__rate_interval", "5m")}
        for number, expression in enumerate(expressions().values())
    ]
    (tmp_path / "board.yml").write_text(yaml.safe_dump({"groups": [{"name": "board", "rules": board}]}))
    for file in (RULES, tmp_path / "board.yml"):
        done = subprocess.run([PROMTOOL, "check", "rules", str(file)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    tests = ROOT / "deploy" / "prometheus" / "rules_test.yml"
    done = subprocess.run([PROMTOOL, "test", "rules", str(tests)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
