"""Kinds of device that the configuration adds, and rows that nodes' own benchmarks correct."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from api.config_sources import resolve
from orchestrator.domain.admission import Admission, Admittance, Checked
from orchestrator.domain.effects import ChoosePlan
from orchestrator.domain.ids import Device, Generation, JobId, NodeId
from orchestrator.domain.kinds import GIB, KINDS, DeviceKind, speed_of, table
from orchestrator.domain.plan import Plan
from orchestrator.domain.requests import OpenHost
from orchestrator.domain.rows import LEAST, MOST, PRODUCT_SHARE, corrected, words
from orchestrator.planner.choose import choose
from orchestrator.planner.rebalance import room_of
from orchestrator.supervisor.kernel import State
from tests.builders import Bench, a_profile, a_spec
from tests.unit.test_kernel_admission import N0, N1, WELL, asked, says

OURS = DeviceKind(name="X1", memory_bytes=64 * GIB, bf16_tflops=4 * 312, memory_gb_s=4000)
H100 = KINDS["H100"].bf16_tflops * PRODUCT_SHARE


def seen(*tflops: float) -> dict[NodeId, Admission]:
    nodes = [NodeId(f"n{number}") for number in range(len(tflops))]
    return {
        node: Admission(node=node, since=0.0, standing=Admittance.ADMITTED, tflops=rate)
        for node, rate in zip(nodes, tflops, strict=True)
    }


@pytest.mark.parametrize(
    ("rates", "factor"),
    [
        ((1.0, 1.0), 1.0),
        ((0.93, 0.95, 1.08), 1.0),
        ((0.76, 0.74, 0.2), 0.75),
        ((0.1, 0.1), LEAST),
        ((3.0,), MOST),
        ((0.0, 0.0), 1.0),
    ],
)
def test_the_median_of_a_kind_s_nodes_corrects_its_row_within_bounds(rates: tuple[float, ...], factor: float) -> None:
    admissions = seen(*(rate * H100 for rate in rates))
    rows = corrected((), dict.fromkeys(admissions, "H100"), admissions.values())
    assert table(rows)["H100"].bf16_tflops == KINDS["H100"].bf16_tflops * factor
    assert bool(rows) == (factor != 1.0) == any("by its nodes' own benchmark" in words(row) for row in rows)


def test_what_a_node_that_is_not_fit_was_measured_at_corrects_nothing() -> None:
    admissions = [replace(one, standing=Admittance.REFUSED) for one in seen(0.5 * H100).values()]
    assert corrected((OURS,), {NodeId("n0"): "H100"}, admissions) == (OURS,)


def test_a_configuration_s_kinds_are_rows_like_any_other(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("kinds:\n  X1: {memory_gib: 64, bf16_tflops: 1248, memory_gb_s: 4000}\n")
    config = resolve({}, {}, path).config
    assert config.rows == (OURS,) == config.api_settings("1").kinds
    assert speed_of("X1", table(config.rows)) == 4.0 and speed_of("X1") == 1.0
    assert room_of("X1", table(config.rows)) > room_of("X1")


def test_a_mixed_plan_gives_a_kind_of_the_configuration_what_it_can_do() -> None:
    spec = a_spec(tp=1, pp=1, micro_batches=10)
    spec = replace(spec, train=replace(spec.train, emulated_layer_s=0.02))
    devices = ((Device(NodeId("n0"), 0), "A100"), (Device(NodeId("n1"), 0), "X1"))
    request = ChoosePlan(job=JobId("j"), generation=Generation(1), spec=spec, profile=a_profile(), devices=devices)
    ids = []
    for rows in ((), (OURS,)):
        plan = choose(replace(request, rows=rows))
        assert isinstance(plan, Plan)
        ids.append({one.stages[0].devices[0].node: len(one.micro_batches) for one in plan.pipelines})
    assert ids == [{"n0": 5, "n1": 5}, {"n0": 2, "n1": 8}]


def test_a_plan_is_asked_for_with_the_rows_of_the_configuration_and_of_benchmarks() -> None:
    bench = Bench(nodes=2, spec=a_spec(tp=2, dp=2))
    bench.nodes = {N0: replace(bench.nodes[N0], kind="H100"), N1: replace(bench.nodes[N1], kind="X1")}
    bench.kernel = State(root="/shared", checks=True, rows=(OURS,))
    bench.see_nodes()
    assert set(asked(bench)) == {N0, N1}
    says(bench, N0, Checked(said="tested", tflops=0.7 * H100))
    says(bench, N1, WELL)
    bench.submitted().probed()
    rows = {row.name: row for row in bench.asked().rows}
    assert rows["X1"] == OURS and rows["H100"].bf16_tflops == pytest.approx(0.7 * KINDS["H100"].bf16_tflops)
    bench.planned()
    opened = {node: order for node, order in bench.calls(OpenHost)}
    assert opened[N1].speed == 4.0 and opened[N1].kind == "X1"
