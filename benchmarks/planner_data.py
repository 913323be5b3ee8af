"""Measured runs that others have published, as the planner's own values: vTrain's on A100s, Sailor's on GH200s.
Reads, judges nothing.
"""

from __future__ import annotations

import ast
import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from orchestrator.domain.kinds import KINDS, DeviceKind
from orchestrator.planner.calibrate import Run
from orchestrator.planner.constants import Measured, monotone
from orchestrator.planner.model import Model, Shape, of_shape

A100 = replace(KINDS["A100"], network_gb_s=12.5)
"""As in vTrain's cluster: four adapters of 200 Gb/s for eight devices."""
GH200 = DeviceKind(name="GH-96", memory_bytes=96 << 30, bf16_tflops=989, memory_gb_s=4000, link_gb_s=150, network_gb_s=25)
"""Four of them a node; its figures matter little here, because Sailor measured its layers."""
GH200_TP = 4
"""Sailor's plans for it: one tp group a node."""
OPT_350M = Shape(layers=24, hidden=1024, heads=16, sequence=2048, vocabulary=50_272)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """billions: the size of the model, 0 where many small ones are mixed."""

    billions: float
    devices: int
    run: Run


def vtrain(folder: Path, name: str) -> list[Row]:
    """multi_node.csv: trained with activations recomputed, which is what fits 18.4 B and more; single_node.csv: without."""
    with (folder / "vtrain" / name).open() as file:
        return [_vtrain_row(line) for line in csv.DictReader(file)]


def _vtrain_row(line: dict[str, str]) -> Row:
    def number(column: str) -> int:
        return int(float(line[column]))

    layers, depth = number("# layers"), number("pipeline parallelism")
    model = _gpt(layers, number("hidden size"), number("attention heads"), number("sequence length"))
    billions = float(line.get("Parameters (billion)", 0))
    bounds = [0, *(1 + layers * (stage + 1) // depth for stage in range(depth))]
    bounds[-1] += 1
    run = Run(
        model=model,
        kind=A100,
        devices=8,
        tp=number("tensor parallelism"),
        dp=number("data parallelism"),
        bounds=tuple(bounds),
        samples=number("micro batch"),
        batch=number("global batch"),
        recompute=billions > 0,
        seconds=float(line["iteration time (ms)"]) / 1e3,
    )
    return Row(billions=billions, devices=number("# GPUs"), run=run)


@cache
def _gpt(layers: int, hidden: int, heads: int, sequence: int) -> Model:
    return of_shape(Shape(layers=layers, hidden=hidden, heads=heads, sequence=sequence, flash=False))


def gh200(folder: Path) -> tuple[list[Run], Measured]:
    """Runs, and the layers' own times, which a planner is given where they are known."""
    profile = json.loads((folder / "sailor" / "profiles" / "OPT-350" / "GH-96.json").read_text())
    layers = {
        ("GH-96", int(tp), int(samples)): tuple((times[0], times[1]) for _, times in sorted(rows.items(), key=_number))
        for samples, by_tp in profile.items()
        for tp, rows in by_tp.items()
    }
    with (folder / "sailor" / "opt350_gh200_measured.csv").open() as file:
        return list(_gh200_rows(csv.DictReader(file))), monotone(Measured(layers=layers))


def _gh200_rows(lines: Iterator[dict[str, str]] | csv.DictReader[str]) -> Iterator[Run]:
    model = of_shape(OPT_350M)
    for line in lines:
        bounds = [0]
        for count in ast.literal_eval(line["layers_per_stage"]):
            bounds.append(bounds[-1] + count)
        yield Run(
            model=model,
            kind=GH200,
            devices=4,
            tp=GH200_TP,
            dp=ast.literal_eval(line["dp"])[0],
            bounds=tuple(bounds),
            samples=int(line["micro_batch"]),
            batch=int(line["global_batch"]),
            recompute=False,
            seconds=float(line["iteration_s"]),
        )


def _number(item: tuple[str, object]) -> int:
    return int(item[0])
