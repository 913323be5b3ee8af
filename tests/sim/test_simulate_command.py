"""`everstep simulate` as people see it: a table, bars, a chart, sweeps, and the scenarios that come along."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.sim.scene import POLICIES, scene_of, trace_of

SHIPPED = sorted((Path(__file__).parents[2] / "api" / "cli" / "scenarios").glob("*.yaml"))
SMALL = {
    "name": "small", "gpus": 64, "block": 8, "pp": 2, "days": 1, "rate": 2000, "params": "1e9", "stragglers_a_day": 4,
    "sweep": {"spares": [0, 1]},
}  # fmt: skip


def simulate(*args: str, columns: int = 80) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": str(columns), "NO_COLOR": "1"}
    command = [sys.executable, "-m", "api.cli", "simulate", *args]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


@pytest.fixture
def small(tmp_path: Path) -> str:
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(SMALL))
    return str(path)


def test_a_sweep_is_told_as_tables_and_bars_that_fit_a_terminal(small: str) -> None:
    done = simulate(small)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80 and "…" not in done.stdout, done.stdout
    tables, bars = done.stdout.split("lost of all time, and most of it to:")
    for spares in (0, 1):
        (title,) = (number for number, line in enumerate(lines) if line.strip() == f"small spares {spares}")
        assert [line.split()[0] for line in lines[title + 1 : title + 5]] == ["policy", *POLICIES]
    drawn = {line.split("█")[0].strip(): line.count("█") for line in bars.splitlines() if "█" in line}
    assert sorted(drawn) == sorted(f"small spares {spares} {policy}" for spares in (0, 1) for policy in POLICIES)
    assert drawn["small spares 1 everstep"] < drawn["small spares 1 restart"] == max(drawn.values())
    assert "back: committed steps that were lost" in " ".join(tables.split())


def test_the_same_figures_are_there_for_machines_with_energy_and_losses_by_cause(small: str) -> None:
    reports: list[dict[str, Any]] = json.loads(simulate(small, "--json").stdout)["reports"]
    assert [one["policy"] for one in reports] == [*POLICIES, *POLICIES]
    for one in reports:
        whole_kwh = 64 * 0.7 * 1.1 * 24
        assert one["energy_kwh"] == pytest.approx(whole_kwh, abs=1)
        assert one["energy_lost_kwh"] == pytest.approx(whole_kwh * (1 - one["goodput"]), abs=1)
        assert sum(one["lost"].values()) > 0 and "straggler" in one["lost"]
    ours = reports[-1]
    assert ours["rungs"]["spare"] > 0 and ours["moved_gb"] > 0 and ours["pause_p99_s"] >= ours["pause_p50_s"] > 0


def test_a_chart_is_drawn(small: str, tmp_path: Path) -> None:
    png = tmp_path / "chart.png"
    done = simulate(small, "--png", str(png))
    assert done.returncode == 0, done.stderr
    head = png.read_bytes()[:24]
    width, height = struct.unpack(">II", head[16:24])
    assert head[:8] == b"\x89PNG\r\n\x1a\n" and width > 600 and height > 300


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_scenario_makes_sense(path: Path) -> None:
    data = yaml.safe_load(path.read_text())
    data.pop("sweep", None)
    scene = scene_of(data)
    assert scene.name == path.stem and scene.blocks * scene.block <= scene.gpus and trace_of(scene)


def test_what_nobody_knows_is_refused(tmp_path: Path) -> None:
    (tmp_path / "odd.yaml").write_text("name: odd\ngpus: 64\nweather: fine\n")
    done = simulate(str(tmp_path / "odd.yaml"))
    assert done.returncode and "weather means nothing here" in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        ({"gpus": "abc"}, "gpus is 'abc', and has to be a whole number"),
        ({"gpus": True}, "gpus is True, and has to be a whole number"),
        ({"gpus": 0}, "gpus is 0, and has to be 1 or more"),
        ({"days": -1}, "days is -1, and has to be more than 0"),
        ({"params": "many"}, "params is 'many', and has to be a number"),
        ({"step_s": float("nan")}, "step_s is nan, and has to be a number"),
        ({"spares": -2}, "spares is -2, and has to be 0 or more"),
        ({"shrinks": "no"}, "shrinks is 'no', and has to be true or false"),
        ({"kinds": "A100"}, "kinds is 'A100', and has to be a list of names"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_what_makes_no_sense_is_refused_in_words(odd: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        scene_of({"name": "odd", "gpus": 64, **odd})


def test_a_number_that_yaml_takes_for_text_is_one() -> None:
    assert scene_of({"name": "x", "gpus": 64, "params": "4e9", "step_s": 10}).params == 4e9


def test_a_sweep_over_no_list_is_refused(tmp_path: Path) -> None:
    (tmp_path / "odd.yaml").write_text("name: odd\ngpus: 64\nsweep: {spares: 3}\n")
    done = simulate(str(tmp_path / "odd.yaml"))
    assert done.returncode and "sweep: spares is 3, and has to be a list of values" in " ".join(done.stderr.split())
