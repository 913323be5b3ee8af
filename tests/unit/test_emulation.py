"""A processor that stands for another device takes the time that one would, and computes the same."""

from __future__ import annotations

import time

import pytest

from orchestrator.domain.cluster import KINDS, speed_of
from worker.emulation import REAL, Pace, slept_s


def seconds(pace: Pace, work_s: float = 0.0) -> tuple[float, float]:
    """Of a forward and a backward."""
    began = time.monotonic()
    with pace.forward():
        time.sleep(work_s)
    between = time.monotonic()
    with pace.backward():
        time.sleep(work_s)
    return between - began, time.monotonic() - between


@pytest.mark.parametrize(("kind", "tp"), [("A100", 1), ("H100", 1), ("B200", 1), ("A100", 2)])
def test_each_kind_takes_its_own_time_for_its_layers(kind: str, tp: int) -> None:
    whole = 0.03 * 4 / tp / speed_of(kind)
    forward, backward = seconds(Pace(0.03, kind, 4, tp))
    assert forward >= whole / 3 and backward >= whole * 2 / 3


def test_real_work_is_part_of_that_time() -> None:
    began, pretended = time.monotonic(), slept_s()
    seconds(Pace(0.2, "A100", 1, 1), work_s=0.05)
    passed = time.monotonic() - began
    assert slept_s() - pretended <= passed - 0.1


def test_without_pretence_nothing_is_waited_for() -> None:
    pretended = slept_s()
    seconds(REAL)
    assert slept_s() == pretended


def test_speeds_follow_the_rates_and_a_processor_is_no_kind_to_stand_for() -> None:
    assert speed_of("A100") == speed_of("cpu") == speed_of("unheard of") == 1.0
    assert speed_of("B200") / speed_of("H100") == KINDS["B200"].bf16_tflops / KINDS["H100"].bf16_tflops
