"""Keyed randomness: every random number is a pure function of what it is for, never of who draws it or when.

Keys name the use (seed, step, micro-batch, layer, ...), so there is no generator state to keep, to lose or to agree on.
This file knows nothing of models, data or plans.
"""

from __future__ import annotations

from hashlib import blake2b

import torch

_MULTIPLIER_1 = 0x7FEB352D
_MULTIPLIER_2 = 0x846CA68B - (1 << 32)
_GOLDEN = 0x9E3779B9 - (1 << 32)
_RESOLUTION = 1 << 24


def key(*parts: int | str) -> int:
    """64 bits that stand for `parts`, the same on every machine."""
    return int.from_bytes(blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest(), "little")


def normal(num: int, *parts: int | str) -> torch.Tensor:
    """`num` standard normal numbers, fp32, on the CPU."""
    generator = torch.Generator().manual_seed(key(*parts) >> 1)
    # Drawn in fp64: the vectorised fp32 path gives other bits at another CPU capability.
    return torch.randn(num, generator=generator, dtype=torch.float64).float()


def keep_mask(rows: torch.Tensor, width: int, drop: float, *parts: int | str) -> torch.Tensor:
    """Which elements survive dropout at rate `drop`: bool, shape (*rows.shape, width).

    `rows` numbers the rows (int64, below 2^31); each element is hashed from (parts, row, column) alone, so that any
    subset of rows, on any kind of device, gets what the whole would.
    """
    salt = key(*parts)
    hashed = _mix(rows.to(torch.int32) ^ _signed(salt))
    columns = torch.arange(width, dtype=torch.int32, device=rows.device).mul_(_GOLDEN) ^ _signed(salt >> 32)
    hashed = _mix(hashed.unsqueeze(-1) ^ columns)
    return hashed.bitwise_and_(_RESOLUTION - 1) >= round(drop * _RESOLUTION)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """A 32-bit finaliser with good avalanche, in place. int32 wraps and shifts arithmetically, hence the masks."""
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(_MULTIPLIER_1)
    x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).mul_(_MULTIPLIER_2)
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))


def _signed(word: int) -> int:
    """The low 32 bits as an int32 value."""
    word &= 0xFFFFFFFF
    return word - (1 << 32) if word >= 1 << 31 else word
