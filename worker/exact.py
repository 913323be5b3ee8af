"""Fixed-point numbers: sums that have the same bits whoever adds what up first.

A gradient g is kept as the integer round(g * 2**shift). Integers add up in any order; the owner of an element turns the sum
back into a float once. Each group of parameters has its own shift, a pure function of the largest absolute values that the
last committed step has seen. Nothing here knows of ranks, plans or votes.

    63 bits of a sum    | sign | contributions | growth | value of the last committed maximum ...................... |
                               |<-- headroom ->|<- 8 -->|<------------------- 54 - headroom ---------------------->|
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import frexp, isfinite, ldexp
from typing import Any

import torch

from orchestrator.domain.profile import BLOCK, Profile

from .parallel.device import slice_on

SUM_BITS = 62
GROWTH_BITS = 8
"""A micro-batch's gradient may be this many times (log2) larger than the largest of the step before."""
LEAST_EXPONENT = -64
"""Maxima below 2**-64 count as that, so that every factor is a normal fp32 number."""
HALF_BITS = 31
SLICE = 1 << 16
"""Elements converted at a time on CPU: the scratch memory stays in cache."""


@dataclass(frozen=True, slots=True)
class Scale:
    """shifts: per group. headroom: the contributions to one element are fewer than 2**headroom."""

    shifts: tuple[int, ...]
    headroom: int

    @staticmethod
    def of(maxima: Sequence[float], contributions: int) -> Scale:
        """maxima: per group, of any one contribution, finite; 0 where nothing is known, which fits nothing but zeros."""
        headroom = contributions.bit_length()
        return Scale(tuple(SUM_BITS - headroom - GROWTH_BITS - _exponent(maximum) for maximum in maxima), headroom)

    def fits(self, maxima: Sequence[float]) -> bool:
        """Whether no sum of contributions up to these can have left its 62 bits."""
        room = SUM_BITS - self.headroom
        return all(frexp(maximum)[1] + shift <= room for maximum, shift in zip(maxima, self.shifts, strict=True) if maximum)

    @property
    def bound(self) -> int:
        """No sum of a step that fits reaches 2**bound in absolute value."""
        return max(SUM_BITS - shift for shift in self.shifts)


def _exponent(maximum: float) -> int:
    return max(frexp(maximum)[1], LEAST_EXPONENT) if maximum and isfinite(maximum) else LEAST_EXPONENT


class Quantiser:
    """Moves gradients into sums of integers, a slice at a time, so that each element is fetched from memory once."""

    def __init__(self, device: torch.device) -> None:
        self._slice = slice_on(device, SLICE)
        self._scaled = torch.empty(self._slice, dtype=torch.float32, device=device)
        self._whole = torch.empty(self._slice, dtype=torch.int64, device=device)

    def move(self, values: torch.Tensor, total: torch.Tensor, shift: int, peak: torch.Tensor) -> None:
        """total += round(values * 2**shift), to even where half way; values become zero.

        values: (n,) fp32; total: (n,) int64; peak: () fp32, raised to the largest absolute value, NaN where there is one.
        Of values that are not finite the sum means nothing.
        """
        # In fp32 throughout: a power of two is exact there, and what it makes smaller than normal rounds to zero anyway.
        factor = ldexp(1.0, shift)
        size = values.numel()
        for start in range(0, size, self._slice):
            part = values[start : start + self._slice]
            scaled, whole = self._scaled[: part.numel()], self._whole[: part.numel()]
            low, high = torch.aminmax(part)
            torch.maximum(peak, torch.maximum(high, low.neg_()), out=peak)
            torch.mul(part, factor, out=scaled)
            part.zero_()
            whole.copy_(scaled.round_())
            total[start : start + self._slice].add_(whole)


def to_float(out: torch.Tensor, total: torch.Tensor, shift: int) -> None:
    """out = total * 2**-shift. out: (n,) fp32; total: (n,) int64. By way of fp64, each step correctly rounded."""
    factor = ldexp(1.0, -shift)
    width = slice_on(total.device, SLICE)
    for start in range(0, total.numel(), width):
        stop = start + width
        out[start:stop].copy_(total[start:stop].to(torch.float64).mul_(factor))


@dataclass(frozen=True, slots=True)
class SquareSum:
    """The squared norm of many blocks, as integers: whoever adds up which blocks, the sum has the same bits.

    A block's 64 squares are added in fp64 in a fixed order; the result is kept as two integers, of which the second
    resolves what the first leaves: high * 2**-k + low * 2**-(k + limb). Their 62 bits travel as halves, which fp64 adds up
    exactly.
    """

    shift: int
    limb: int

    NUM_HALVES = 4

    @staticmethod
    def of(scale: Scale, profile: Profile, tp: int) -> SquareSum:
        blocks = sum(-(-line.numel // BLOCK) for line in profile.lines) + tp * len(profile.lines)
        limb = SUM_BITS - blocks.bit_length()
        # Of one block: 64 elements below 2**bound.
        return SquareSum(limb - 2 * scale.bound - (BLOCK - 1).bit_length(), limb)

    def halves(self, values: torch.Tensor) -> list[float]:
        """values: (n,) fp32, n a multiple of 64."""
        sums = values.view(-1, BLOCK).to(torch.float64)
        sums.mul_(sums)
        width = BLOCK
        while width > 1:
            width //= 2
            sums = sums[:, :width] + sums[:, width:]
        scaled = sums.view(-1).mul_(ldexp(1.0, self.shift))
        whole = scaled.floor()
        rest = scaled.sub_(whole).mul_(ldexp(1.0, self.limb)).round_()
        limbs = (int(whole.to(torch.int64).sum()), int(rest.to(torch.int64).sum()))
        mask = (1 << HALF_BITS) - 1
        return [float(half) for limb in limbs for half in (limb >> HALF_BITS, limb & mask)]

    def value(self, halves: Sequence[float]) -> float:
        """Of the sums of everybody's halves."""
        high, low = ((int(halves[i]) << HALF_BITS) + int(halves[i + 1]) for i in (0, 2))
        return ldexp(float((high << self.limb) + low), -(self.shift + self.limb))


@contextmanager
def deterministic_kernels() -> Iterator[None]:
    """Operations that have no deterministic kernel raise; nothing else about them changes.

    By the debug mode: use_deterministic_algorithms() would import a whole compiler first, 2 s in every new rank.
    """
    was = torch.get_deterministic_debug_mode()
    settings: Any = torch.utils.deterministic
    filled = settings.fill_uninitialized_memory
    torch.set_deterministic_debug_mode("error")
    settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(was)
        settings.fill_uninitialized_memory = filled
