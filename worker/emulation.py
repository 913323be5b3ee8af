"""A processor that stands for another kind of device: computing takes as long as it would there.

It owns the pretence alone: what is computed is the same, and sleeping leaves the processor to others. Nothing here is ever
used on a real accelerator.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from orchestrator.domain.cluster import EMULATED_FORWARD

_pretended_s = 0.0
_delayed_s = 0.0


def pretended_s() -> float:
    """Seconds of computing that this process has only pretended."""
    return _pretended_s


def computed_s() -> float:
    """By this thread so far, what it only pretended to compute included."""
    return time.thread_time() + _pretended_s


def delay(seconds: float) -> None:
    """Compute for so long more than is needed."""
    global _pretended_s, _delayed_s
    if seconds > 0:
        time.sleep(seconds)
        _pretended_s += seconds
        _delayed_s += seconds


class Pace:
    """layer_s: seconds that a layer takes for one micro-batch, both ways, on a device of speed 1; 0: no pretence.

    speed: of the device that is stood for, of an A100's; layers: of this stage; tp: ranks among which each is split.

    The device works through what it is given without a gap, as an accelerator does behind its queue: what this thread
    does in between, and how late it is woken on a busy machine, is made up for by the next piece of work.
    """

    def __init__(self, layer_s: float, speed: float, layers: int, tp: int) -> None:
        whole_s = layer_s * layers / tp / speed if layer_s else 0.0
        self._forward_s = whole_s * EMULATED_FORWARD
        self._backward_s = whole_s - self._forward_s
        self._free_at = 0.0
        self._delayed_s = 0.0

    def begin(self) -> None:
        """There was nothing to do until now: something had to be waited for."""
        self._free_at = time.monotonic()
        self._delayed_s = _delayed_s

    @contextmanager
    def forward(self) -> Iterator[None]:
        computed = self._started()
        yield
        self._take(self._forward_s, time.thread_time() - computed)

    @contextmanager
    def backward(self) -> Iterator[None]:
        computed = self._started()
        yield
        self._take(self._backward_s, time.thread_time() - computed)

    def _started(self) -> float:
        if not self._free_at:
            self.begin()
        return time.thread_time()

    def _take(self, seconds: float, really_s: float) -> None:
        global _pretended_s
        if not seconds:
            return
        self._free_at += seconds + _delayed_s - self._delayed_s
        self._delayed_s = _delayed_s
        _pretended_s += max(0.0, seconds - really_s)
        left_s = self._free_at - time.monotonic()
        if left_s > 0:
            time.sleep(left_s)
