"""A fast hash of tensors' bits: the same on any device, at any vector width, in any order of summation.

Every 32-bit word is multiplied by an odd weight of its own and all is summed modulo 2**64, slice by slice. A flipped bit
changes the sum by an odd multiple of a power of two below 2**64, so no single flip goes unseen; several cancel only by
chance. It starts no thread and knows nothing of what it hashes. It is no defence against anybody who wants a collision.
"""

from __future__ import annotations

from functools import cache

import torch

from .parallel.device import slice_on

SLICE = 1 << 16
"""Words that are weighted alike; on CPU hashed at a time, because the scratch memory stays in cache."""
_SPREAD = 0x9E3779B97F4A7C15 - (1 << 64)
"""The golden ratio in 64 bits, as int64 has it: odd, so multiplying by it loses nothing."""


def digest(*rows: torch.Tensor) -> torch.Tensor:
    """rows: fp32, flat, each contiguous. int64, shape (1,), on their device; depends on their lengths and order too."""
    device = rows[0].device
    total = torch.zeros(1, dtype=torch.int64, device=device)
    weights = _weights(device)
    width = slice_on(device, SLICE)
    for row in rows:
        words = row.view(torch.int32)
        for start in range(0, words.numel(), width):
            part = words[start : start + width].to(torch.int64)
            count = part.numel() // SLICE
            if part.numel() > SLICE:
                # What the line below comes to for one slice after another, in few launches.
                sums = part[: count * SLICE].view(count, SLICE).mul_(weights).sum(1)
                total = total * _power(count) + sums.mul_(_powers(count, device)).sum()
                part = part[count * SLICE :]
            if part.numel():
                total = total * _SPREAD + part.mul_(weights[: part.numel()]).sum()
        total = total * _SPREAD + row.numel()
    return total


def checksum(rows: torch.Tensor) -> torch.Tensor:
    """rows: (k, n) fp32, each row contiguous. int64, shape (), on their device. Memory is read once, at its own speed.

    No single flip goes unseen here either; that elements have changed places does.
    """
    if rows.shape[1] % 2 == rows.storage_offset() % 2 == rows.stride(0) % 2 == 0 and rows.stride(1) == 1:
        # As below, all rows at once: this is asked for twice in every step.
        return (rows.view(torch.int64).sum(1) * _odd(rows.shape[0], rows.device)).sum()
    even = rows.shape[1] - rows.shape[1] % 2
    total = torch.zeros((), dtype=torch.int64, device=rows.device)
    for number, row in enumerate(rows):
        pairs = row[:even]
        if pairs.storage_offset() % 2:
            pairs = pairs.clone()
        # Two words at a time: sums of 32-bit ones would be cast first, all of them.
        total = total + (pairs.view(torch.int64).sum() + row[even:].view(torch.int32).sum()) * (2 * number + 1)
    return total


def _power(exponent: int) -> int:
    """_SPREAD to this power, as int64 has it."""
    power = pow(_SPREAD, exponent, 1 << 64)
    return power - (1 << 64) if power >= 1 << 63 else power


@cache
def _powers(count: int, device: torch.device) -> torch.Tensor:
    """What each of `count` slices in a row is multiplied by in the end."""
    return torch.tensor([_power(count - 1 - place) for place in range(count)], dtype=torch.int64, device=device)


@cache
def _odd(count: int, device: torch.device) -> torch.Tensor:
    return torch.arange(1, 2 * count, 2, dtype=torch.int64, device=device)


@cache
def _weights(device: torch.device) -> torch.Tensor:
    return (torch.arange(1, SLICE + 1, dtype=torch.int64, device=device) * _SPREAD).bitwise_or_(1)
