"""Damage on purpose does damage: a flip that nobody could ever notice would show nothing."""

from __future__ import annotations

import torch

from worker.spoiling import LASTING, _flip


def test_a_flip_in_a_moment_outlives_the_decay_of_many_steps() -> None:
    """Copies are compared every ten steps by default; a flipped low bit of a moment is rounded away before that."""
    for bit in LASTING:
        for value in (0.0, 1e-12, 0.3):
            pair = torch.tensor([value, value])
            _flip(pair, 0, bit)
            for _ in range(30):
                pair = pair * 0.9 + 0.1 * value
            assert pair[0] != pair[1], (bit, value)
