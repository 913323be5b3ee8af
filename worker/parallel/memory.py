"""Tensors on CPU as the bytes they lie in: views wherever that is possible, so that sockets read and fill them directly."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Flat and contiguous: the same memory where that is possible, else a copy."""
    return tensor.detach().contiguous().view(-1)


def cut(tensor: torch.Tensor, lengths: Sequence[int]) -> list[torch.Tensor]:
    """Views of consecutive pieces along dimension 0."""
    starts = accumulate(lengths, initial=0)
    return [tensor[start : start + length] for start, length in zip(starts, lengths, strict=False)]


def bytes_of(flat: torch.Tensor) -> memoryview:
    """flat: as `dense` makes it."""
    if flat.stride(0) != 1:  # a single element counts as contiguous whatever its stride
        flat = flat.as_strided(flat.shape, (1,))
    return flat.view(torch.uint8).numpy().data


def landing(tensor: torch.Tensor) -> memoryview:
    """The tensor's own memory, to be filled in place."""
    if not tensor.is_contiguous():
        raise ValueError(
            f"cannot receive into a non-contiguous tensor of shape {tuple(tensor.shape)}; pass a contiguous one"
        )
    return bytes_of(tensor.detach().view(-1))
