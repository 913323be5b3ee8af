"""Which samples a micro-batch holds: pure functions of (seed, step, micro-batch id), so there is no loader state to lose.

    sample number    ((step - 1) * M + id) * B + i      counts on for ever, whatever the plan
    epoch, index     divmod(number, num_samples)
    sample           permutation of (seed, epoch) at index

It knows nothing of files, ranks or plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from orchestrator.domain.errors import FieldProblem, Refused
from orchestrator.domain.spec import EvaluationSpec, TrainSpec
from worker.keyed import key

_ROUNDS = 6
_WORD = (1 << 64) - 1


def sample_indices(
    seed: int, step: int, micro_batch: int, micro_batches: int, micro_batch_size: int, num_samples: int
) -> list[int]:
    """The samples of one micro-batch (ids count from 0, steps from 1); an epoch uses each sample exactly once."""
    first = ((step - 1) * micro_batches + micro_batch) * micro_batch_size
    places = (divmod(number, num_samples) for number in range(first, first + micro_batch_size))
    return [shuffled(index, num_samples, seed, epoch) for epoch, index in places]


def split(tokens: torch.Tensor, train: TrainSpec, evaluation: EvaluationSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """What is trained on and what is held out: whole samples from the end, of which training never sees a target.

    Where nothing is evaluated all is trained on. Raises Refused where nothing would be left to train on.
    """
    if not evaluation.every:
        return tokens, tokens[:0]
    held_out = evaluation.micro_batches * train.micro_batch_size * train.sequence + 1
    rest = len(tokens) - held_out
    if rest < train.sequence + 1:
        message = (
            f"evaluation holds out {held_out} bytes of a text of {len(tokens)}, and one sample to train on needs "
            f"{train.sequence + 1}; name more text or lower evaluation.micro_batches"
        )
        raise Refused(
            message,
            (FieldProblem(field="evaluation.micro_batches", value=evaluation.micro_batches, message=message),),
        )
    return tokens[:rest], tokens[rest:]


def evaluated_by(micro_batches: Sequence[int], of: int, count: int) -> tuple[int, ...]:
    """Which of `count` held-out micro-batches a pipeline evaluates that computes these of the step's `of` ids.

    As many for its share of a step as others for theirs, whoever they are: every one has exactly one pipeline.
    """
    mine = frozenset(micro_batches)
    return tuple(number for number in range(count) if number * of // count in mine)


def batch(tokens: torch.Tensor, indices: Sequence[int], sequence: int) -> tuple[torch.Tensor, torch.Tensor]:
    """inputs and targets, both (B, T) int64: sample i is tokens i * T .. (i + 1) * T, targets one token later."""
    windows = torch.stack([tokens[i * sequence : (i + 1) * sequence + 1] for i in indices]).long()
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def shuffled(index: int, size: int, seed: int, epoch: int) -> int:
    """Where `index` goes in the permutation of range(size) that belongs to (seed, epoch); constant memory."""
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    keys = _round_keys(seed, epoch)
    # A Feistel network permutes the next power of four; walking its cycle until back inside permutes range(size).
    while True:
        index = _feistel(index, half, keys)
        if index < size:
            return index


def _feistel(value: int, half: int, keys: tuple[int, ...]) -> int:
    mask = (1 << half) - 1
    left, right = value >> half, value & mask
    for round_key in keys:
        left, right = right, left ^ (_mix(right ^ round_key) & mask)
    return left << half | right


@lru_cache(maxsize=8)
def _round_keys(seed: int, epoch: int) -> tuple[int, ...]:
    return tuple(key(seed, "sample order", epoch, number) for number in range(_ROUNDS))


def _mix(x: int) -> int:
    """A 64-bit finaliser with good avalanche."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _WORD
    return x ^ x >> 31
