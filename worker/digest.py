"""A fast hash of tensors' bits: the same on any device, at any vector width, in any order of summation.

Every 32-bit word is multiplied by an odd weight of its own and all is summed modulo 2**64, slice by slice. A flipped bit
changes the sum by an odd multiple of a power of two below 2**64, so no single flip goes unseen; several cancel only by
chance. It starts no thread and knows nothing of what it hashes. It is no defence against anybody who wants a collision.
"""

from __future__ import annotations

from functools import cache

import torch

SLICE = 1 << 16
"""Words hashed at a time: bounds the scratch memory and keeps it in cache."""
_SPREAD = 0x9E3779B97F4A7C15 - (1 << 64)
"""The golden ratio in 64 bits, as int64 has it: odd, so multiplying by it loses nothing."""


def digest(*rows: torch.Tensor) -> torch.Tensor:
    """rows: fp32, flat, each contiguous. int64, shape (1,), on their device; depends on their lengths and order too."""
    device = rows[0].device
    total = torch.zeros(1, dtype=torch.int64, device=device)
    weights = _weights(device)
    for row in rows:
        words = row.view(torch.int32)
        for start in range(0, words.numel(), SLICE):
            part = words[start : start + SLICE].to(torch.int64)
            total = total * _SPREAD + part.mul_(weights[: part.numel()]).sum()
        total = total * _SPREAD + row.numel()
    return total


@cache
def _weights(device: torch.device) -> torch.Tensor:
    return (torch.arange(1, SLICE + 1, dtype=torch.int64, device=device) * _SPREAD).bitwise_or_(1)
