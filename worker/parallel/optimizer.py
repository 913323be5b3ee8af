"""AdamW on flat fp32 state as a fixed sequence of single IEEE operations.

Owner and mirror cut the same elements at different places and must get the same bits, on any device: so every operation
here is one correctly rounded mul, add, sqrt or div of two fp32 numbers. Fused and foreach variants, lerp and addcmul are
not (their rounding depends on vector width and alignment), nor is division by a scalar (a multiplication on some
devices); scalars are multiplied in as reciprocals computed once in double. It knows nothing of who holds what.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from orchestrator.domain.generation import Answer
from orchestrator.domain.spec import TrainSpec

from .device import slice_on
from .schedule import learning_rate

SLICE = 1 << 18
"""Elements updated at a time on CPU: bounds the scratch memory and keeps a slice's operands in cache."""


def adamw(
    train: TrainSpec, answer: Answer, state: torch.Tensor, gradient: torch.Tensor, decayed: Sequence[tuple[int, int]]
) -> None:
    """Apply one step in place.

    state: (3, n) fp32, rows master weights, first and second moments; gradient: (n,) fp32, before clipping, unchanged;
    decayed: ranges of 0..n-1 that weight decay applies to. Where gradient and state are all zero (padding) they stay zero.
    """
    rate = learning_rate(train, answer.step)
    clip = min(1.0, train.clip_norm / (answer.norm + 1e-6))
    unbias1 = 1.0 / (1.0 - train.beta1**answer.step)
    unbias2 = 1.0 / (1.0 - train.beta2**answer.step)
    keep = 1.0 - rate * train.weight_decay
    if train.weight_decay:
        for start, stop in decayed:
            state[0, start:stop].mul_(keep)
    size, width = gradient.numel(), slice_on(gradient.device, SLICE)
    scratch = torch.empty(2, min(size, width), dtype=torch.float32, device=gradient.device)
    for start in range(0, size, width):
        stop = min(size, start + width)
        weight, first, second = state[0, start:stop], state[1, start:stop], state[2, start:stop]
        a, b = scratch[0, : stop - start], scratch[1, : stop - start]
        torch.mul(gradient[start:stop], clip, out=a)
        torch.mul(a, a, out=b)
        first.mul_(train.beta1).add_(a.mul_(1.0 - train.beta1))
        second.mul_(train.beta2).add_(b.mul_(1.0 - train.beta2))
        torch.mul(second, unbias2, out=b)
        root_(b).add_(train.epsilon)
        torch.mul(first, unbias1, out=a)
        weight.add_(a.div_(b).mul_(-rate))


def root_(values: torch.Tensor) -> torch.Tensor:
    """The correctly rounded square root of each value, in place.

    torch's own on CPU is a library's, which is off by one in the last place for one value in five, and may be otherwise on
    a processor for which that library has another variant; the processor's instruction, which numpy uses, never is.
    """
    if values.device.type != "cpu":
        return values.sqrt_()
    array = values.numpy()
    np.sqrt(array, out=array)
    return values
