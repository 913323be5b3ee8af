"""A device that computes rightly passes; one whose multiplier, adder or divider is wrong once in a while does not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from worker.selftest import Arithmetic, examine

CPU = torch.device("cpu")
SMALL = 1 << 20


def once_wrong(operation: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Its 4th call has one flipped low bit in one element."""
    calls = 0

    def wrong(*operands: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        found = operation(*operands)
        if calls == 4:
            words = found.view(torch.int32).flatten()
            words[1000] = int(words[1000]) ^ 1
        return found

    return wrong


def test_a_sound_device_passes() -> None:
    assert examine(CPU, memory_bytes=SMALL) == ()


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (Arithmetic(matmul=once_wrong(torch.matmul)), "1 elements of a product of matrices"),
        (Arithmetic(multiply=once_wrong(torch.mul)), "1 products are wrong"),
        (Arithmetic(add=once_wrong(torch.add)), "1 sums are wrong"),
        (Arithmetic(divide=once_wrong(torch.div)), "1 quotients are wrong"),
    ],
)
def test_one_wrong_bit_in_one_of_many_results_is_found(broken: Arithmetic, words: str) -> None:
    wrong = examine(CPU, broken, SMALL)
    assert len(wrong) == 1 and words in wrong[0]
