"""One forward, one backward (1F1B): in which order a stage takes its micro-batches, and what it trades with its neighbours.

    two stages, four ids      stage 0   F0 F1 B0 F2 B1 F3 B2 B3
                              stage 1      F0 B0 F1 B1 F2 B2 F3 B3

What a stage sends and what it then needs from the same neighbour travel in one trade, so that two who send to each other do
not wait for each other first. Shapes are known, so nothing is agreed on before the first step. It refuses to know what is
computed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ..emulation import Pace
from ..stopwatch import ProcessorStopwatch, Stopwatch
from .group import Group

Forward = Callable[[int, "torch.Tensor | None"], torch.Tensor]
"""(place in the order, what the stage before has computed; None on the first stage) -> the loss on the last stage, else
what the next stage is given."""


def backward(result: torch.Tensor, gradient: torch.Tensor | None = None) -> None:
    """gradient: with respect to the result; None for a loss.

    `result.backward(gradient)` is the same, but imports sympy to compare two shapes: a third of a second of every process.
    """
    if gradient is not None:
        result = _Given.apply(result, gradient)  # type: ignore[no-untyped-call]
    result.backward()  # type: ignore[no-untyped-call]


class Alternation:
    """One stage of a pipeline; pp's members are in the order of their stages. Every member makes one.

    shape, dtype: of what passes between two stages, in both directions. pace: of every backward, which stopwatch measures.
    """

    def __init__(
        self,
        pp: Group,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        pace: Pace | None = None,
        stopwatch: Stopwatch | None = None,
    ) -> None:
        pp.meet(device)
        self._pp = pp
        self._before = pp.index - 1 if pp.index else None
        self._after = pp.index + 1 if pp.index + 1 < pp.size else None
        self._shape, self._dtype, self._device = shape, dtype, device
        self._pace = pace or Pace(0.0, "", 0, 1)
        self._stopwatch = stopwatch or ProcessorStopwatch()

    def run(self, count: int, forward: Forward, done: Callable[[int], None]) -> None:
        """So many micro-batches forward and backward; done: called with each one's place after its backward.

        Gradients are added to the leaves'. Raises Aborted, PeerLost, and whatever forward and done raise.
        """
        ahead = min(count, self._pp.size - self._pp.index)
        self._pace.begin()
        under_way: deque[tuple[torch.Tensor | None, torch.Tensor]] = deque()

        def step_forward(place: int, given: torch.Tensor | None) -> torch.Tensor:
            if given is not None:
                given.requires_grad_()
            result = forward(place, given)
            under_way.append((given, result))
            return result

        unsent: torch.Tensor | None = None
        sent: list[dist.Work] = []
        for place in range(ahead):
            result = step_forward(place, self._trade(self._before))
            _wait(sent)
            if place + 1 < ahead:
                sent = self._send(self._after, result)
            else:
                unsent, sent = result, []  # it goes out with what is received next
        for place in range(count):
            gradient = self._trade(self._after, unsent)
            given, result = under_way.popleft()
            with self._stopwatch.running(), self._pace.backward():
                backward(result, gradient)
            done(place)
            back = None if given is None else given.grad
            if place + ahead < count:
                unsent = step_forward(place + ahead, self._trade(self._before, back))
            else:
                unsent = None
                _wait(sent)
                sent = self._send(self._before, back)
        _wait(sent)

    def run_forward(self, count: int, forward: Forward) -> None:
        """So many micro-batches forward alone. Raises Aborted, PeerLost, and whatever forward raises."""
        self._pace.begin()
        sent: list[dist.Work] = []
        with torch.no_grad():
            for place in range(count):
                result = forward(place, self._trade(self._before))
                _wait(sent)
                sent = self._send(self._after, result)
            _wait(sent)

    def _trade(self, neighbour: int | None, give: torch.Tensor | None = None) -> torch.Tensor | None:
        """What a neighbour sends; None where there is no such neighbour."""
        if neighbour is None:
            return None
        room = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        _wait(self._pp.trade(neighbour, _dense(give), room))
        self._pace.begin()
        return room

    def _send(self, neighbour: int | None, give: torch.Tensor | None) -> list[dist.Work]:
        return [] if neighbour is None else self._pp.trade(neighbour, _dense(give), None)


def _dense(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.detach().contiguous()


def _wait(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()


class _Given(torch.autograd.Function):
    """A scalar whose gradient with respect to a tensor is given."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        ctx.gradient = gradient
        return tensor.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.gradient, None
