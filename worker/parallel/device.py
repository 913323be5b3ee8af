"""The device seam: what differs between a rank on CPU and one on a CUDA device, and nothing else.

A process without a CUDA device never touches torch.cuda. It refuses to know groups and generations.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Protocol

import torch

from orchestrator.domain.spec import DeviceKind

ACCELERATOR_SLICE = 1 << 23
"""Elements that an accelerator works on at a time, where a scratch copy bounds how many."""


class Device(Protocol):
    """One rank's device. `activate` is called once, in the rank's own process, before anything else of it."""

    @property
    def torch_device(self) -> torch.device: ...

    def activate(self) -> None:
        """Make it this process's current device."""
        ...


@dataclass(frozen=True, slots=True)
class CpuDevice:
    threads: int = 1
    """Of torch's operators. Fixed, because sums depend on it."""

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    def activate(self) -> None:
        torch.set_num_threads(self.threads)


@dataclass(frozen=True, slots=True)
class CudaDevice:
    """index: the rank's on its node. Where the node has fewer CUDA devices, ranks share them in turn."""

    index: int

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cuda", self.index % max(1, torch.cuda.device_count()))

    def activate(self) -> None:
        # Without a workspace of its own cuBLAS does not give the same bits twice, and exact mode refuses to multiply.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.set_num_threads(1)
        torch.cuda.set_device(self.torch_device)
        # tf32 would make results depend on the kind of device more than they must.
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False


def device_of(kind: DeviceKind, index: int) -> Device:
    """index: the device's number on its node; on CPU every index is the same processor."""
    return CudaDevice(index) if kind == "cuda" else CpuDevice()


def slice_on(device: torch.device, in_cache: int) -> int:
    """How many elements to work on at a time: on CPU what stays in cache; elsewhere each launch costs more than that."""
    return in_cache if device.type == "cpu" else max(in_cache, ACCELERATOR_SLICE)


def host_memory(like: torch.Tensor) -> torch.Tensor:
    """Room on the host for a dense copy of `like`: pinned beside an accelerator, which then copies several times faster."""
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=like.device.type == "cuda")
