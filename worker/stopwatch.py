"""How long a rank computes, whatever it waits for in between: its neighbours, its links, a processor that others use too.

On a processor that is the time its thread was given, and what it only pretended to compute; on an accelerator it is what
passed between two marks in its queue of work, which contains the waits of a tensor-parallel group for its slowest member.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from .emulation import computed_s


class Stopwatch(Protocol):
    @contextmanager
    def running(self) -> Iterator[None]: ...

    def take(self) -> float:
        """Seconds it ran since this was asked last. All that was computed meanwhile must have come to its end."""
        ...


class ProcessorStopwatch:
    def __init__(self) -> None:
        self._passed_s = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        began = computed_s()
        yield
        self._passed_s += computed_s() - began

    def take(self) -> float:
        passed_s, self._passed_s = self._passed_s, 0.0
        return passed_s


class CudaStopwatch:
    """Marks are used again from one step to the next: making one costs more than recording it."""

    def __init__(self) -> None:
        self._marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._used = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        if self._used == len(self._marks):
            self._marks.append((_mark(), _mark()))
        began, ended = self._marks[self._used]
        self._used += 1
        began.record()
        yield
        ended.record()

    def take(self) -> float:
        used, self._used = self._marks[: self._used], 0
        if used:
            used[-1][1].synchronize()
        return float(sum(began.elapsed_time(ended) for began, ended in used)) / 1e3


def stopwatch_of(device: torch.device) -> Stopwatch:
    return CudaStopwatch() if device.type == "cuda" else ProcessorStopwatch()


def _mark() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
