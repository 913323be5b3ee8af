"""The bundle of a real job as a scenario: its cluster, its job and its incidents, before the same kernel."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from api.cli.bundle import FORMAT, FORMAT_VERSION
from api.views import IncidentView, NodeView
from orchestrator.domain import codec
from orchestrator.domain.errors import Refused
from orchestrator.domain.spec import CheckpointSpec, DataSpec, JobSpec, ParallelSpec, RecoverySpec, TrainSpec
from orchestrator.sim.replay import QUIET_STEPS, scenario_of
from orchestrator.sim.run import Verdict, play
from orchestrator.sim.scenario import Trouble

SPEC = JobSpec(
    name="mine",
    program="causal_lm",
    data=DataSpec(files=("*.txt",)),
    train=TrainSpec(steps=9000, micro_batches=4, micro_batch_size=2, sequence=128),
    parallel=ParallelSpec(tp=2, pp=1, dp=2),
    checkpoint=CheckpointSpec(every=5, path="s3://runs"),
    recovery=RecoverySpec(compare_every=4, max_attempts=20),
)


def an_incident(number: int, cause: str, committed: int, *devices: str) -> IncidentView:
    return IncidentView(
        number=number,
        cause=cause,
        message=f"{cause} of {devices}",
        at="2026-11-30T10:00:00Z",  # type: ignore[arg-type]
        devices=devices,
        generation=number,
        next_generation=number + 1,
        decision="",
        source="memory",
        committed=committed,
        rolled_back=0,
        moved_elements=0,
        attempts=1,
        phases={},
        pause_s=0.1,
    )


def a_bundle(folder: Path, *incidents: IncidentView, version: int = FORMAT_VERSION) -> Path:
    nodes = [
        NodeView(id=name, kind="A100", num_devices=2, status="up", address="", labels={}) for name in ("gpu-a", "gpu-b")
    ]
    files = {
        "manifest.json": json.dumps({"format": FORMAT, "version": version, "job": "mine-1"}),
        "config.json": json.dumps(codec.encode(SPEC) | {"added_later": 1}),
        "nodes.jsonl": "".join(one.model_dump_json() + "\n" for one in nodes),
        "incidents.jsonl": "".join(one.model_dump_json() + "\n" for one in incidents),
    }
    path, inside = folder / "mine-1.bundle.tar.gz", folder / "mine-1"
    inside.mkdir()
    with tarfile.open(path, "w:gz") as archive:
        for name, text in files.items():
            (inside / name).write_text(text)
            archive.add(inside / name, f"mine-1/{name}")
    return path


def test_incidents_strike_the_same_devices_in_the_same_order(tmp_path: Path) -> None:
    bundle = a_bundle(
        tmp_path,
        an_incident(1, "rank_lost", 4000, "gpu-b/1"),
        an_incident(2, "grow", 4005),
        an_incident(3, "node_lost", 4007, "gpu-c/0", "gpu-c/1"),
        an_incident(4, "hang", 8000, "gpu-a/0"),
    )
    scene = scenario_of(bundle)
    assert scene.nodes == (2, 2, 2) and scene.kinds == ("A100", "A100", "cpu")  # gpu-c was gone by then
    assert [(one.trouble, one.devices, one.step) for one in scene.script] == [
        (Trouble.KILL_RANK, ("n1/1",), 20),
        (Trouble.KILL_NODE, ("n2/0", "n2/1"), 27),
        (Trouble.HANG_RANK, ("n0/0",), 47),
    ]
    (job,) = scene.jobs
    assert (job.parallel, job.recovery) == (SPEC.parallel, SPEC.recovery)
    assert (job.train.steps, job.train.micro_batches) == (47 + QUIET_STEPS, 4)
    outcome = play(scene)
    assert outcome.verdict is Verdict.PASSED, "\n".join(outcome.trace)
    struck = [line for line in outcome.trace if "* kill_rank" in line or "* node n2 dies" in line or "* hang_rank" in line]
    assert len(struck) == 3 and "n1/1" in struck[0] and "n0/0" in struck[2]


def test_a_bundle_is_replayed_by_one_command_and_to_the_letter(tmp_path: Path) -> None:
    bundle = a_bundle(tmp_path, an_incident(1, "rank_lost", 10, "gpu-a/1"), an_incident(2, "link_lost", 30, "gpu-a/0"))

    def told() -> str:
        command = [sys.executable, "-m", "orchestrator.sim", "--replay", str(bundle), "--trace"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return said.rpartition(", ")[0]  # all but the CPU time

    first = told()
    assert "recovered: " in first and first == told()


def test_the_command_line_replays_a_bundle(tmp_path: Path) -> None:
    bundle = a_bundle(tmp_path, an_incident(1, "node_lost", 10, "gpu-b/0", "gpu-b/1"))

    def simulate(*args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", "api.cli", "simulate", *args], capture_output=True, text=True)

    done = simulate("--replay", str(bundle), "--seeds", "3", "--json")
    told = json.loads(done.stdout)
    assert told["passed"] and [line.split(",")[0] for line in told["told"]] == [f"seed {seed}: passed" for seed in range(3)]
    assert "* node n1 dies" in simulate("--replay", str(tmp_path / "mine-1")).stdout
    refused = simulate("--replay", str(tmp_path))
    assert refused.returncode and "make it again with" in refused.stderr
    assert "either a SCENARIO or --replay BUNDLE" in simulate().stderr


def test_what_is_no_bundle_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="cannot be read as a bundle"):
        scenario_of(tmp_path / "nothing.tar.gz")
    with pytest.raises(Refused, match="everstep-bundle 2, this reads everstep-bundle 1"):
        scenario_of(a_bundle(tmp_path, version=2))
