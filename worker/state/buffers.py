"""What one stage computes with: flat compute parameters and flat fp32 gradients, and the leaves that are views of both.

    compute    |-- bucket 0 --|-- bucket 1 --| ...            compute dtype; padding never read
    gradient   |-- bucket 0 --|-- bucket 1 --| ... |-- second uses of tied lines --|      fp32; padding zero

Addresses inside a bucket do not depend on who its members are, so buffers outlive a change of membership as long as the
seat computes the same layers at the same tp index. Nothing here is ever a source of state: parameters are gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from orchestrator.domain.layout import Bucket
from orchestrator.domain.plan import Plan, Seat
from orchestrator.domain.profile import BLOCK, Profile

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""By its name in a job, what parameters are computed in."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Everything the buffers of a seat depend on."""

    first: int
    last: int
    tp: int
    degree: int

    @staticmethod
    def of(plan: Plan, seat: Seat) -> Shape:
        stage = plan.stage_at(seat)
        return Shape(stage.first, stage.last, seat.tp, len(stage.devices))


@dataclass(frozen=True, slots=True)
class Run:
    """Addresses start..stop-1 of `gradient`, all of parameters of these layers, and the bucket address they count for."""

    layers: tuple[int, ...]
    start: int
    stop: int
    into: int

    def of(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient[self.start : self.stop]

    def into_of(self, flat: torch.Tensor) -> torch.Tensor:
        return flat[self.into : self.into + self.stop - self.start]


class Buffers:
    """buckets: those this seat is a member of, in order. offsets[i]: where bucket i starts in `compute` and `gradient`."""

    def __init__(
        self, profile: Profile, shape: Shape, buckets: Sequence[Bucket], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.shape = shape
        self.offsets = _offsets(buckets)
        lines = {line.name: line for line in profile.lines}
        uses = [
            (lines[part.interval.line], part, offset + part.offset)
            for bucket, offset in zip(buckets, self.offsets, strict=False)
            for part in bucket.parts
        ]
        size = self.offsets[-1]
        extra = sum(_padded(len(part.interval)) * (len(_layers(line.layers, shape)) - 1) for line, part, _ in uses)
        self.compute = torch.zeros(size, dtype=dtype, device=device)
        self.gradient = torch.zeros(size + extra, dtype=torch.float32, device=device)
        self.leaves: dict[tuple[str, int], nn.Parameter] = {}
        self._tied: list[tuple[torch.Tensor, torch.Tensor]] = []
        runs = [
            Run(bucket.layers, offset, offset + bucket.size, offset)
            for bucket, offset in zip(buckets, self.offsets, strict=False)
        ]
        for line, part, start in uses:
            width = len(part.interval)
            whole = self.gradient[start : start + width]
            dims = (line.shape[0] // shape.degree, *line.shape[1:]) if line.split else line.shape
            for number, layer in enumerate(_layers(line.layers, shape)):
                gradient = whole
                if number:
                    gradient = self.gradient[size : size + width]
                    runs.append(Run(line.layers, size, size + width, start))
                    size += _padded(width)
                    self._tied.append((whole, gradient))
                leaf = nn.Parameter(self.compute[start : start + width].view(dims))
                _collect(leaf, gradient.view(dims))
                self.leaves[line.name, layer] = leaf
        self.runs = _merged(runs)
        """Every gradient there is."""

    def zero(self) -> None:
        self.gradient.zero_()
        if self.compute.dtype != torch.float32:
            for leaf in self.leaves.values():
                leaf.grad = None  # an aborted backward may have left one that was never collected

    def fold(self) -> None:
        """Sum the uses of each tied line of this stage, once per step, before the reduction."""
        for whole, use in self._tied:
            whole.add_(use)


def _collect(leaf: nn.Parameter, gradient: torch.Tensor) -> None:
    """Have every backward add the leaf's gradient to `gradient`, in fp32."""
    if leaf.dtype == torch.float32:
        leaf.grad = gradient  # autograd accumulates into a preset .grad in place
        return

    def add(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        gradient.add_(parameter.grad)
        parameter.grad = None

    leaf.register_post_accumulate_grad_hook(add)  # type: ignore[no-untyped-call]


def _layers(layers: tuple[int, ...], shape: Shape) -> list[int]:
    return [layer for layer in layers if shape.first <= layer < shape.last]


def _merged(runs: Sequence[Run]) -> tuple[Run, ...]:
    merged: list[Run] = []
    for run in runs:
        last = merged[-1] if merged else None
        if last and last.layers == run.layers and last.stop == run.start and last.into - last.start == run.into - run.start:
            merged[-1] = Run(last.layers, last.start, run.stop, last.into)
        else:
            merged.append(run)
    return tuple(merged)


def _offsets(buckets: Sequence[Bucket]) -> tuple[int, ...]:
    offsets = [0]
    for bucket in buckets:
        offsets.append(offsets[-1] + bucket.size)
    return tuple(offsets)


def _padded(width: int) -> int:
    return -(-width // BLOCK) * BLOCK
