"""`everstep plan` and POST /api/v1/plans: a job's plan before it runs, on clusters that are there and that are not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner, Result

from api.cli import plan_tables
from api.cli.main import app
from api.client import ApiError, Client
from api.plan_views import ForecastView
from orchestrator.domain.cluster import Node, NodeStatus
from orchestrator.domain.ids import NodeId
from tests.served import Served, serve

pytestmark = pytest.mark.timeout(120)
JOB: dict[str, Any] = {
    "name": "seventy",
    "program": "causal_lm",
    "data": {"files": ["/nowhere/*.txt"]},
    "model": {"layers": 80, "width": 8192, "heads": 64, "kv_heads": 8, "ffn": 28672},
    "train": {"steps": 1000, "micro_batches": 1024, "micro_batch_size": 2, "sequence": 4096, "dtype": "bf16"},
}
CLUSTER: dict[str, Any] = {
    "nodes": [
        {"kind": "B200", "count": 512, "domain_nodes": 16},
        {"kind": "H100", "count": 1024},
        {"kind": "A100", "count": 1024},
        {"kind": "V100", "count": 512},
    ]
}


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with serve(tmp_path) as running:
        yield running


def everstep(*args: str) -> Result:
    return CliRunner().invoke(app, args, env={"EVERSTEP_URL": None, "EVERSTEP_STATE_DIR": "/nowhere", "COLUMNS": "120"})


def test_a_plan_for_24576_devices_that_nobody_has_needs_no_server(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(JOB))
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(CLUSTER))
    asked = ("plan", str(tmp_path / "job.yaml"), "--cluster", str(tmp_path / "cluster.yaml"))
    found = json.loads(everstep(*asked, "--json").stdout)
    assert found["feasible"] and found["devices"] + found["idle"] == 24_576
    assert sum(found["causes"].values()) == pytest.approx(found["step_s"])
    assert found["bound_s"] < found["step_s"]
    assert sum(row["nodes"] for row in found["rows"]) == 3072
    assert all(row["memory_bytes"] < row["memory_limit_bytes"] for row in found["rows"])
    busy = [row["memory_bytes"] for row in found["rows"] if row["used"]]
    assert len(set(busy)) == len(busy) > 1, "each stage holds something else"
    assert found["alternatives"][0]["why"] and "may be lost" in found["survival"]
    console = Console(width=120, record=True, file=StringIO())
    console.print(plan_tables.forecast(ForecastView.model_validate(found)))
    shown = console.export_text()
    assert "waiting in the pipeline" in shown and "B200" in shown and "may be lost" in " ".join(shown.split())


def test_a_job_that_fits_nowhere_says_why_and_exits_1(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(JOB))
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump({"nodes": [{"kind": "T4", "devices": 4}]}))
    found = everstep("plan", str(tmp_path / "job.yaml"), "--cluster", str(tmp_path / "cluster.yaml"))
    assert found.exit_code == 1 and "GiB" in found.stderr and "usable" in found.stderr


def test_nodes_that_do_the_same_are_one_row_and_slow_ones_another(tmp_path: Path) -> None:
    small = JOB | {"model": {"layers": 6, "width": 256, "heads": 4, "kv_heads": 4, "ffn": 512}}
    small |= {"train": JOB["train"] | {"micro_batches": 25, "sequence": 512}, "parallel": {"pp": 1, "tp": 1}}
    nodes = [{"kind": "A100", "count": 3, "devices": 1}, {"kind": "A100", "devices": 1, "speed": 0.5}]
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(small))
    (tmp_path / "cluster.toml").write_text(
        "\n".join(
            "[[nodes]]\n" + "\n".join(f"{key} = {json.dumps(value)}" for key, value in section.items()) for section in nodes
        )
    )
    asked = ("plan", str(tmp_path / "job.yaml"), "--cluster", str(tmp_path / "cluster.toml"), "--json")
    slow, well = json.loads(everstep(*asked).stdout)["rows"]
    assert (slow["nodes"], well["nodes"]) == (1, 3)
    assert slow["work"] == ["stage 1 of 1: layers 0-7, 6 micro-batches, at 50% of what its kind does"]
    assert well["work"] == ["stage 1 of 1: layers 0-7, 6 to 7 micro-batches"]


def test_which_file_cannot_be_read_is_said(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(JOB))
    (tmp_path / "cluster.yaml").write_text("nodes:\n- [H100")
    found = everstep("plan", str(tmp_path / "job.yaml"), "--cluster", str(tmp_path / "cluster.yaml"))
    assert found.exit_code == 2 and "cluster.yaml: not YAML at line" in "".join(found.stderr.split("\n"))


def test_a_kind_nobody_knows_is_refused_with_those_that_are(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(JOB))
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump({"nodes": [{"kind": "H1000"}]}))
    found = everstep("plan", str(tmp_path / "job.yaml"), "--cluster", str(tmp_path / "cluster.yaml"))
    assert found.exit_code == 2 and "H1000" in found.stderr and "B200" in found.stderr


def test_the_server_plans_on_the_nodes_it_has(served: Served) -> None:
    served.desk.set_nodes(
        Node(id=NodeId("n0"), kind="A100", num_devices=8),
        Node(id=NodeId("n1"), kind="H100", num_devices=8),
        Node(id=NodeId("n2"), kind="H100", num_devices=8, status=NodeStatus.LOST),
    )
    with Client(served.url, retry_s=0) as client:
        small = JOB | {"model": {"layers": 8, "width": 1024, "heads": 8, "kv_heads": 8, "ffn": 2816}}
        found = client.plan(small)
        assert found.feasible and found.devices + found.idle == 16
        assert {row.kind for row in found.rows} == {"A100", "H100"}
        with pytest.raises(ApiError, match="heads"):
            client.plan(small | {"parallel": {"tp": 3}}, CLUSTER)


def test_a_job_file_is_validated_and_nothing_is_recorded(served: Served) -> None:
    served.desk.set_nodes(*(Node(id=NodeId(f"node-{index}"), kind="H100", num_devices=8) for index in range(2)))
    small = JOB | {"model": {"layers": 2, "width": 32, "heads": 2, "ffn": 64}, "train": JOB["train"] | {"sequence": 64}}
    with Client(served.url, retry_s=1) as client:
        found = client.validate(small)
        assert found.feasible and found.shape
        with pytest.raises(ApiError) as refused:
            client.validate(small | {"train": JOB["train"] | {"micro_batches": 0}})
        assert refused.value.errors[0]["field"] == "train.micro_batches"
        with pytest.raises(ApiError, match="heads"):
            client.validate(small | {"model": {"layers": 2, "width": 32, "heads": 3, "ffn": 64}})
    assert not served.desk.job_ids and not served.desk.asked
