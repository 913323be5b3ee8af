"""The cost model against runs that others have published: how far off it may be is written beside each.

The constants were fitted on other runs (vTrain's), so these are predictions. Where a row gives throughput, its seconds are
its model operations over that; where it does not give the micro-batch size, that is taken as 1, and as 4 for models below
20 B, of which it would leave devices idle. Interleaved schedules are as in the row. Published runs in fp8, of mixtures of
experts, and those whose schedule is not told are not here: the model has none of the first two.
"""

from __future__ import annotations

import pytest

from orchestrator.domain.kinds import KINDS
from orchestrator.planner.calibrate import Run, predict
from orchestrator.planner.constants import Constants
from orchestrator.planner.model import Shape, of_shape

A100 = KINDS["A100"]

GPT_1B7 = Shape(layers=24, hidden=2304, heads=24, sequence=2048, flash=False)
GPT_3B6 = Shape(layers=30, hidden=3072, heads=32, sequence=2048, flash=False)
GPT_7B5 = Shape(layers=36, hidden=4096, heads=32, sequence=2048, flash=False)
GPT_18B = Shape(layers=40, hidden=6144, heads=48, sequence=2048, flash=False)
GPT_22B = Shape(layers=48, hidden=6144, heads=64, sequence=2048, flash=False)
GPT_39B = Shape(layers=48, hidden=8192, heads=64, sequence=2048, flash=False)
GPT_76B = Shape(layers=60, hidden=10_240, heads=80, sequence=2048, flash=False)
GPT_145B = Shape(layers=80, hidden=12_288, heads=96, sequence=2048, flash=False)
GPT_175B = Shape(layers=96, hidden=12_288, heads=96, sequence=2048, flash=False)
GPT_310B = Shape(layers=96, hidden=16_384, heads=128, sequence=2048, flash=False)
GPT_530B = Shape(layers=105, hidden=20_480, heads=128, sequence=2048, flash=False)
GPT_1T = Shape(layers=128, hidden=25_600, heads=160, sequence=2048, flash=False)


def recomputing_s(shape: Shape, batch: int, devices: int, tflops: float) -> float:
    """Seconds of a step of which tflops a device are reported, by Narayanan et al. 2021, equation (3)."""
    s, h, layers, v = shape.sequence, shape.hidden, shape.layers, shape.vocabulary
    work = 96.0 * batch * s * layers * h * h * (1 + s / (6 * h) + v / (16 * layers * h))
    return work / (devices * tflops * 1e12)


Row = tuple[str, Shape, int, int, int, int, int, int, bool, float, float]
"""name, shape, tp, pp, dp, interleaved chunks, samples of a micro-batch, of a step, recomputing, seconds, tolerance"""
ROWS: list[Row] = [
    # Korthikanti et al. 2022, table 5.
    ("22B full", GPT_22B, 8, 1, 1, 1, 4, 4, True, 1.42, 0.06),
    ("175B full", GPT_175B, 8, 8, 1, 3, 1, 64, True, 18.13, 0.06),
    ("530B full", GPT_530B, 8, 35, 1, 3, 1, 280, True, 49.05, 0.04),
    ("1T full", GPT_1T, 8, 64, 1, 1, 1, 512, True, 94.42, 0.04),
    ("22B selective", GPT_22B, 8, 1, 1, 1, 4, 4, False, 1.10, 0.05),
    ("175B selective", GPT_175B, 8, 8, 1, 3, 1, 64, False, 13.75, 0.05),
    ("530B selective", GPT_530B, 8, 35, 1, 3, 1, 280, False, 37.83, 0.05),
    ("1T selective", GPT_1T, 8, 64, 1, 1, 1, 512, False, 71.49, 0.05),
    # Narayanan et al. 2021, table 1.
    ("1.7B", GPT_1B7, 1, 1, 32, 1, 4, 512, True, recomputing_s(GPT_1B7, 512, 32, 137), 0.12),
    ("3.6B", GPT_3B6, 2, 1, 32, 1, 4, 512, True, recomputing_s(GPT_3B6, 512, 64, 138), 0.1),
    ("7.5B", GPT_7B5, 4, 1, 32, 1, 4, 512, True, recomputing_s(GPT_7B5, 512, 128, 142), 0.1),
    ("18.4B", GPT_18B, 8, 1, 32, 1, 4, 1024, True, recomputing_s(GPT_18B, 1024, 256, 135), 0.1),
    ("39.1B", GPT_39B, 8, 2, 32, 1, 1, 1536, True, recomputing_s(GPT_39B, 1536, 512, 138), 0.15),
    ("76.1B", GPT_76B, 8, 4, 32, 1, 1, 1792, True, recomputing_s(GPT_76B, 1792, 1024, 140), 0.12),
    ("145.6B", GPT_145B, 8, 8, 24, 1, 1, 2304, True, recomputing_s(GPT_145B, 2304, 1536, 148), 0.12),
    ("310.1B", GPT_310B, 8, 16, 15, 1, 1, 2160, True, recomputing_s(GPT_310B, 2160, 1920, 155), 0.12),
    ("529.6B", GPT_530B, 8, 35, 9, 1, 1, 2520, True, recomputing_s(GPT_530B, 2520, 2520, 163), 0.12),
    ("1008B", GPT_1T, 8, 64, 6, 1, 1, 3072, True, recomputing_s(GPT_1T, 3072, 3072, 163), 0.12),
    # MegaScale, tables 1 and 2: Megatron-LM on 175B.
    ("175B on 256", GPT_175B, 8, 8, 4, 6, 1, 768, False, 40.0, 0.07),
    ("175B on 512", GPT_175B, 8, 8, 8, 6, 1, 768, False, 21.2, 0.07),
    ("175B on 768", GPT_175B, 8, 8, 12, 6, 1, 768, False, 15.2, 0.07),
    ("175B on 1024", GPT_175B, 8, 8, 16, 6, 1, 768, False, 11.9, 0.12),
    ("175B on 3072", GPT_175B, 8, 8, 48, 6, 1, 6144, False, 29.02, 0.05),
    ("175B on 6144", GPT_175B, 8, 8, 96, 6, 1, 6144, False, 14.78, 0.05),
    ("175B on 8192", GPT_175B, 8, 8, 128, 6, 1, 6144, False, 12.24, 0.12),
    ("175B on 12288", GPT_175B, 8, 8, 192, 6, 1, 6144, False, 8.57, 0.13),
]


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_a_published_run_is_predicted(row: Row) -> None:
    _, shape, tp, pp, dp, chunks, samples, batch, recompute, seconds, tolerance = row
    bounds = [round(shape.layers * stage / pp) + (stage > 0) for stage in range(pp)] + [shape.layers + 2]
    run = Run(
        model=of_shape(shape),
        kind=A100,
        devices=8,
        tp=tp,
        dp=dp,
        bounds=tuple(bounds),
        samples=samples,
        batch=batch,
        recompute=recompute,
        seconds=seconds,
        chunks=chunks,
    )
    assert predict(run, Constants()) == pytest.approx(seconds, rel=tolerance)
