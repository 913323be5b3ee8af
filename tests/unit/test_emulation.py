"""A processor that stands for another device takes the time that one would, and computes the same."""

from __future__ import annotations

import time

import pytest

from orchestrator.domain.cluster import KINDS, speed_of
from worker.emulation import Pace, computed_s, delay, pretended_s


def seconds(pace: Pace, work_s: float = 0.0) -> float:
    """Of a forward and a backward, so much of each real."""
    began = time.monotonic()
    with pace.forward():
        _compute(work_s)
    with pace.backward():
        _compute(work_s)
    return time.monotonic() - began


def _compute(work_s: float) -> None:
    until = time.thread_time() + work_s
    while time.thread_time() < until:
        pass


@pytest.mark.parametrize(("kind", "tp"), [("A100", 1), ("H100", 1), ("B200", 1), ("A100", 2)])
def test_each_kind_takes_its_own_time_for_its_layers(kind: str, tp: int) -> None:
    whole = 0.03 * 4 / tp / speed_of(kind)
    computed = computed_s()
    assert seconds(Pace(0.03, speed_of(kind), 4, tp)) >= whole
    assert computed_s() - computed == pytest.approx(whole, abs=0.02)


def test_real_work_is_part_of_that_time() -> None:
    pretended = pretended_s()
    assert seconds(Pace(0.2, 1.0, 1, 1), work_s=0.05) >= 0.2
    assert pretended_s() - pretended <= 0.2 - 0.1 + 0.001


def test_what_comes_late_is_made_up_for_as_behind_a_queue_and_not_after_a_wait() -> None:
    late, waiting = Pace(0.03, 1.0, 1, 1), Pace(0.03, 1.0, 1, 1)
    late.begin()
    waiting.begin()
    time.sleep(0.09)
    computed = computed_s()
    waiting.begin()
    assert seconds(waiting) >= 0.03
    began = time.thread_time()
    seconds(late)
    assert computed_s() - computed >= 0.06, "whatever it took, so much was computed"
    assert time.thread_time() - began < 0.02


def test_a_delay_is_computed_on_top_of_it() -> None:
    pace, computed = Pace(0.03, 1.0, 1, 1), computed_s()
    pace.begin()
    began = time.monotonic()
    delay(0.05)
    seconds(pace)
    assert time.monotonic() - began >= 0.08 and computed_s() - computed >= 0.08


def test_without_pretence_nothing_is_waited_for() -> None:
    pretended = pretended_s()
    seconds(Pace(0.0, 1.0, 4, 1))
    assert pretended_s() == pretended


def test_speeds_follow_the_rates_and_a_processor_is_no_kind_to_stand_for() -> None:
    assert speed_of("A100") == speed_of("cpu") == speed_of("unheard of") == 1.0
    assert speed_of("B200") / speed_of("H100") == KINDS["B200"].bf16_tflops / KINDS["H100"].bf16_tflops
