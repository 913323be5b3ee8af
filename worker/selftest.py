"""Whether a device computes and remembers rightly, as far as questions with a known answer can tell. Takes about a second.

    matmul    of whole numbers small enough to be exact in fp32, against the same product in integers
    single    products, sums, quotients and roots, against the same in fp64, rounded
    memory    patterns written, left, and read again

Each answer comes from another formula than the question, so that one wrong unit does not agree with itself.
`python -m worker.selftest INDEX` prints {"outcome": ..., "passed": ..., "message": ..., "tflops": ...}. It knows nothing of
jobs, nor of why it is asked.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from .outcome import Outcome
from .parallel.device import CudaDevice, device_of
from .parallel.optimizer import root_

ROUNDS = 6
SIZE = 256
"""Rows and columns; SIZE * LIMIT**2 is below 2**24, so every partial sum is exact in fp32, in any order."""
LIMIT = 127
LARGE = 4096
ELEMENTS = 1 << 18
MEMORY_BYTES = 64 << 20
REFUSALS = ("busy or unavailable", "device is unavailable", "exclusive")
"""In what CUDA says where a device is in a compute mode that keeps this process out."""
_PATTERNS = (0, -1, 0x55555555, -0x55555556)
"""Words: all zeros, all ones, and alternating bits both ways."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """The operations under test."""

    matmul: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch.matmul
    multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch.mul
    add: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch.add
    divide: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch.div
    root: Callable[[torch.Tensor], torch.Tensor] = root_


def examine(
    device: torch.device, arithmetic: Arithmetic | None = None, memory_bytes: int = MEMORY_BYTES
) -> tuple[str, ...]:
    """What came out wrong, in words; nothing where all is well."""
    tested = arithmetic or Arithmetic()
    wrong: list[str] = []
    for seed in range(ROUNDS):
        generator = torch.Generator().manual_seed(seed)
        wrong += _matmul(device, tested, generator)
        wrong += _single(device, tested, generator)
    wrong += _memory(device, memory_bytes)
    return tuple(dict.fromkeys(wrong))


def rate(device: torch.device) -> float:
    """TFLOP/s of a large product in bf16 on an accelerator: the best of a few, since the first ones wake it up."""
    a, b = (torch.randn(LARGE, LARGE, dtype=torch.bfloat16, device=device) for _ in range(2))
    best_s = math.inf
    for _ in range(ROUNDS):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        began.record()
        torch.matmul(a, b)
        ended.record()
        ended.synchronize()
        best_s = min(best_s, began.elapsed_time(ended) / 1e3)
    return 2 * LARGE**3 / best_s / 1e12


def main() -> None:
    index = int(sys.argv[1])
    device = device_of("cuda" if torch.cuda.is_available() else "cpu", index)
    wrong: tuple[str, ...] = ()
    untried, tflops = "", 0.0
    outcome = Outcome.PASSED
    try:
        device.activate()
        wrong = examine(device.torch_device)
        if isinstance(device, CudaDevice) and not wrong:
            tflops = rate(device.torch_device)
    except torch.OutOfMemoryError:  # it is in use, and that says nothing of it
        outcome, untried = Outcome.BUSY, "it could not be tested, its memory is in use"
    except RuntimeError as error:  # what a broken accelerator answers with, and one that admits a single process
        first = str(error).splitlines()[0]
        if any(words in first for words in REFUSALS):
            outcome = Outcome.UNUSABLE
            untried = f"it lets nobody in ({first}): another program has it to itself, or its compute mode is exclusive or"
            untried += " prohibited; end that program, or have it shared with nvidia-smi --compute-mode=DEFAULT"
        else:
            wrong = (first,)
    tried = f"{ROUNDS} rounds of known answers and {MEMORY_BYTES >> 20} MiB of patterns"
    on = "" if isinstance(device, CudaDevice) else " on the processor"
    outcome = Outcome.WRONG if wrong else outcome
    message = untried or "; ".join(wrong) or f"passed {tried}{on}"
    passed = outcome is Outcome.PASSED
    print(json.dumps({"outcome": outcome, "passed": passed, "message": message, "tflops": tflops}), flush=True)


def _matmul(device: torch.device, tested: Arithmetic, generator: torch.Generator) -> Iterator[str]:
    a, b = (torch.randint(-LIMIT, LIMIT + 1, (SIZE, SIZE), generator=generator) for _ in range(2))
    expected = a @ b
    found = tested.matmul(a.float().to(device), b.float().to(device)).cpu()
    if not torch.equal(found.double(), expected.double()):
        yield f"{_count(found.double(), expected.double())} elements of a product of matrices are wrong"


def _single(device: torch.device, tested: Arithmetic, generator: torch.Generator) -> Iterator[str]:
    x, y, z = (torch.rand(ELEMENTS, generator=generator) + 0.5 for _ in range(3))
    a, b, c = (part.to(device) for part in (x, y, z))
    found = [tested.multiply(a, b), tested.add(a, c), tested.divide(a, c), tested.root(b.clone())]
    # fp64 has more than twice the digits of fp32, so rounding its result gives the one correctly rounded fp32 result.
    x, y, z = x.double(), y.double(), z.double()
    expected = [x * y, x + z, x / z, y.sqrt()]
    for name, one, other in zip(("products", "sums", "quotients", "roots"), found, expected, strict=True):
        if wrong := _count(one.cpu(), other.float()):
            yield f"{wrong} {name} are wrong"


def _memory(device: torch.device, num_bytes: int) -> Iterator[str]:
    words = torch.empty(num_bytes // 4, dtype=torch.int32, device=device)
    for pattern in _PATTERNS:
        words.fill_(pattern)
        if bool((words != pattern).any()):
            yield f"{int((words != pattern).sum())} words of memory did not keep the pattern {pattern & 0xFFFFFFFF:#010x}"
    # Its own address in every word: shows words that are stored in the wrong place.
    addresses = torch.arange(words.numel(), dtype=torch.int32, device=device)
    words.copy_(addresses)
    if not torch.equal(words, addresses):
        yield "words of memory are stored in the wrong place"


def _count(found: torch.Tensor, expected: torch.Tensor) -> int:
    return int((found != expected).sum())


if __name__ == "__main__":
    main()
