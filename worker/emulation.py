"""A processor that stands for another kind of device: computing takes as long as it would there.

It owns the pretence alone: what is computed is the same, and sleeping leaves the processor to others. Nothing here is ever
used on a real accelerator.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from orchestrator.domain.cluster import EMULATED_FORWARD, speed_of

_slept_s = 0.0


def slept_s() -> float:
    """Seconds this process has spent pretending to compute."""
    return _slept_s


def computed_s() -> float:
    """By this thread so far, what it only pretended to compute included."""
    return time.thread_time() + _slept_s


def pretend(seconds: float) -> None:
    """To compute for so long."""
    global _slept_s
    if seconds > 0:
        time.sleep(seconds)
        _slept_s += seconds


class Pace:
    """layer_s: seconds that a layer takes for one micro-batch, both ways, on a device of speed 1; 0: no pretence.

    kind: of the device that is stood for; layers: of this stage; tp: ranks among which each is split.
    """

    def __init__(self, layer_s: float, kind: str, layers: int, tp: int) -> None:
        whole_s = layer_s * layers / tp / speed_of(kind) if layer_s else 0.0
        self._forward_s = whole_s * EMULATED_FORWARD
        self._backward_s = whole_s - self._forward_s

    @contextmanager
    def forward(self) -> Iterator[None]:
        began = time.monotonic()
        yield
        _sleep_until(began + self._forward_s)

    @contextmanager
    def backward(self) -> Iterator[None]:
        began = time.monotonic()
        yield
        _sleep_until(began + self._backward_s)


REAL = Pace(0.0, "", 0, 1)
"""No pretence."""


def _sleep_until(due: float) -> None:
    pretend(due - time.monotonic())
