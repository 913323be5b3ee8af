"""The device seam: what differs between a rank on CPU and one on a CUDA device, and nothing else.

A process without a CUDA device never touches torch.cuda. It refuses to know groups and generations.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from orchestrator.domain.spec import DeviceKind

ACCELERATOR_SLICE = 1 << 23
"""Elements that an accelerator works on at a time, where a scratch copy bounds how many."""

_MADV_POPULATE_WRITE = 23
_TOUCHED_AT_ONCE = 16 << 20
"""Bytes: short enough to be waited for."""
_COPIED_AT_ONCE = 1 << 18
"""Elements: copying fewer takes no longer than starting a thread."""
_LIBC = ctypes.CDLL(None)


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


class Copying:
    """Copies from a device into host memory, beside whatever it computes: on a stream of its own, on CPU in a thread.

    Used by one thread. What is copied must not change until `wait` has returned.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._thread: threading.Thread | None = None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(device))  # what was computed so far is what is copied

    def add(self, source: torch.Tensor, target: torch.Tensor) -> None:
        if self._stream is not None:
            with torch.cuda.stream(self._stream):
                target.copy_(source, non_blocking=True)
        elif source.numel() < _COPIED_AT_ONCE:
            target.copy_(source)
        self._pairs.append((source, target))  # their memory is not given to others meanwhile

    def go_on(self) -> None:
        """Everything has been added. Where nothing is left to do, nothing is begun."""
        left = [pair for pair in self._pairs if pair[0].numel() >= _COPIED_AT_ONCE]
        if self._stream is None and left:
            self._thread = threading.Thread(target=_copy, args=(left,), name="copying", daemon=True)
            self._thread.start()

    @property
    def is_beside(self) -> bool:
        """Whether any of it may still be under way."""
        return self._stream is not None or self._thread is not None

    def wait(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()
        if self._thread is not None:
            self._thread.join()
        self._pairs.clear()


def _copy(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for source, target in pairs:
        target.copy_(source)


def make_ready(memory: torch.Tensor, device: torch.device, is_over: Callable[[], bool]) -> bool:
    """Have every page of host memory there, pinned beside an accelerator, so that copying into it costs no more than that.

    Whether it is pinned now, and `let_go` is owed. Slow the first time; any thread. is_over: asked now and then, to stop
    early. Where the system refuses it, the first copy is slower, and that is all.
    """
    address, num_bytes = memory.data_ptr(), memory.numel() * memory.element_size()
    if device.type == "cuda":
        torch.cuda.set_device(device)  # of this thread
        # In one piece: a copy may not cross two.
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        return bool(cudart.cudaHostRegister(address, num_bytes, 0) == cudart.cudaError.success)
    for start in range(0, num_bytes, _TOUCHED_AT_ONCE):
        if is_over() or _LIBC.madvise(
            ctypes.c_void_p(address + start),
            ctypes.c_size_t(min(_TOUCHED_AT_ONCE, num_bytes - start)),
            _MADV_POPULATE_WRITE,
        ):
            break
    return False


def let_go(memory: torch.Tensor) -> None:
    """Before pinned memory is unmapped. Where it is not pinned, this thread's next kernel would be said to have failed."""
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[no-untyped-call]
