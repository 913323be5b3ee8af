"""Tensors as the bytes that sockets read and fill: views wherever that is possible, host copies of an accelerator's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch

from .device import host_memory


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Flat, contiguous and on the host: the same memory where that is possible, else a copy."""
    flat = tensor.detach().contiguous().view(-1)
    return flat if flat.device.type == "cpu" else host_memory(flat).copy_(flat)


def room_for(tensor: torch.Tensor) -> torch.Tensor:
    """What `dense` makes, where the values do not matter."""
    return dense(tensor) if tensor.device.type == "cpu" else host_memory(tensor).view(-1)


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


def landings(tensors: Sequence[torch.Tensor]) -> tuple[list[memoryview], Callable[[], None] | None]:
    """Where to receive each tensor, and what to do when all are there; None where each is received in its own memory."""
    staged = [(tensor, room_for(tensor)) for tensor in tensors if tensor.device.type != "cpu"]
    if not staged:
        return [landing(tensor) for tensor in tensors], None
    rooms = iter([room for _, room in staged])
    views = [landing(tensor if tensor.device.type == "cpu" else next(rooms)) for tensor in tensors]

    def spread() -> None:
        for tensor, room in staged:
            tensor.detach().copy_(room.view(tensor.shape))

    return views, spread
