"""The device seam: what differs between a rank on CPU and one on a CUDA device, and nothing else.

It imports nothing CUDA-only; a machine without CUDA never touches torch.cuda. It refuses to know groups and generations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from orchestrator.domain.spec import Backend

Kind = Literal["cpu", "cuda"]


class Device(Protocol):
    """One rank's device. `activate` is called once, in the rank's own process, before anything else of it."""

    @property
    def kind(self) -> Kind: ...

    @property
    def torch_device(self) -> torch.device: ...

    @property
    def default_backend(self) -> Backend: ...

    def activate(self) -> None:
        """Make it this process's current device."""
        ...

    def synchronize(self) -> None:
        """Return when everything enqueued so far has run; asynchronous errors are raised here."""
        ...

    def empty_host(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Host memory, shape (numel,), from and to which this device copies asynchronously where it can."""
        ...

    def generator(self, seed: int) -> torch.Generator:
        """A generator of its own on this device; the process-wide one is never touched."""
        ...


@dataclass(frozen=True, slots=True)
class CpuDevice:
    threads: int = 1
    """Of torch's operators. Fixed, because sums depend on it."""

    @property
    def kind(self) -> Kind:
        return "cpu"

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def default_backend(self) -> Backend:
        return "links"

    def activate(self) -> None:
        torch.set_num_threads(self.threads)

    def synchronize(self) -> None:
        """Everything on CPU has run when it returns."""

    def empty_host(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype)

    def generator(self, seed: int) -> torch.Generator:
        return torch.Generator().manual_seed(seed)


@dataclass(frozen=True, slots=True)
class CudaDevice:
    index: int

    @property
    def kind(self) -> Kind:
        return "cuda"

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cuda", self.index)

    @property
    def default_backend(self) -> Backend:
        return "nccl"

    def activate(self) -> None:
        torch.cuda.set_device(self.index)
        # tf32 would make results depend on the kind of device more than they must.
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.index)

    def empty_host(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, pin_memory=True)

    def generator(self, seed: int) -> torch.Generator:
        return torch.Generator(device=self.torch_device).manual_seed(seed)


def device_of(kind: Kind, index: int) -> Device:
    """index: the device's number on its node; on CPU every index is the same processor."""
    return CudaDevice(index) if kind == "cuda" else CpuDevice()
