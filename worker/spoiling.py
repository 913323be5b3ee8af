"""Damage on purpose: what a failing chip would do to a rank's numbers, for tests and for faults that people ask for."""

from __future__ import annotations

from random import Random

import torch

from .state.buffers import Buffers
from .state.holdings import KINDS, Holdings

LASTING = range(16, 31)
"""Of a moment, bits whose flip is there for tens of steps: decay rounds lower ones away, and the sign of a zero at once."""


def flip_bit(held: Holdings, seed: int) -> str:
    """Flip one bit of an element that is held (not of padding), drawn from the seed; in words, which.

    Raises ValueError where nothing is held.
    """
    if not held.pieces:
        raise ValueError("nothing is held here")
    rng = Random(seed)
    # Of the owned part or the mirrored one, each as often, whichever is larger.
    parts = [part for part in (held.owned_pieces, held.pieces[len(held.owned_pieces) :]) if part]
    piece = rng.choice(rng.choice(parts))
    row, at = rng.randrange(len(KINDS)), rng.randrange(len(piece.interval))
    bit = rng.choice(range(32) if row == 0 else LASTING)
    _flip(held.state[row], piece.offset + at, bit)
    whose = "owned" if piece in held.owned_pieces else "mirrored"
    return f"flipped bit {bit} of {KINDS[row]} of element {piece.interval.start + at} of {piece.interval.line} ({whose})"


def spoil_gradient(buffers: Buffers, bit: int | None = None) -> str:
    """Make the first element of the gradient buffer NaN, or flip that bit of it; in words, what."""
    if bit is None:
        buffers.gradient[0] = float("nan")
        return "made an element of the gradient NaN"
    _flip(buffers.gradient, 0, bit)
    return f"flipped bit {bit} of an element of the gradient"


def _flip(flat: torch.Tensor, at: int, bit: int) -> None:
    words = flat.view(torch.int32)
    mask = (1 << bit) - (1 << 32 if bit == 31 else 0)
    words[at] = int(words[at].item()) ^ mask
