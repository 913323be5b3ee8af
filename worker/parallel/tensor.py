"""Tensor parallelism on plain tensors: functions around a group, which is an argument rebound each generation.

    between layers   (S, B, D)       S = T / tp: this rank's part of the sequence; norms, residuals and dropout live here
    inside layers    (T, B, N / tp)  the whole sequence, this rank's heads, hidden units or part of the vocabulary

Sequence first, because a group lays its members' tensors end to end. A replicated parameter used between layers gets the
gradient of this rank's part of the sequence only; its users sum those. This file knows no model and no generation.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd import Function

from .group import Group


def gather_sequence(x: torch.Tensor, tp: Group) -> torch.Tensor:
    """(S, ...) -> (T, ...). Backward: each rank's gradients are summed into the owner of that part of the sequence."""
    return x if tp.size == 1 else _Gather.apply(x, tp)  # type: ignore[no-untyped-call]


def scatter_sequence(x: torch.Tensor, tp: Group) -> torch.Tensor:
    """(T, ...) partial sums -> (S, ...) of the whole sum. Backward: gradients of all parts are gathered."""
    return x if tp.size == 1 else _Scatter.apply(x, tp)  # type: ignore[no-untyped-call]


def column_parallel(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x: (T, B, D) whole, weight: (N / tp, D) -> (T, B, N / tp)."""
    return F.linear(x, weight)


def row_parallel(x: torch.Tensor, weight: torch.Tensor, tp: Group) -> torch.Tensor:
    """x: (T, B, N / tp), weight: (N / tp, D), stored (in, out) -> (S, B, D), summed over the group."""
    return scatter_sequence(torch.matmul(x, weight), tp)


def embedding(tokens: torch.Tensor, weight: torch.Tensor, tp: Group) -> torch.Tensor:
    """tokens: (T, B), weight: (V / tp, D), rows in order of group index -> (S, B, D)."""
    if tp.size == 1:
        return F.embedding(tokens, weight)
    local, mine = _local(tokens, weight.shape[0], tp)
    return scatter_sequence(F.embedding(local, weight) * mine.unsqueeze(-1).to(weight.dtype), tp)


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor, tp: Group) -> torch.Tensor:
    """Summed over tokens, in fp32, the same on every rank. logits: (B, T, V / tp), targets: (B, T) -> ()."""
    total: torch.Tensor = _CrossEntropy.apply(logits, targets, tp)  # type: ignore[no-untyped-call]
    return total


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tp: Group) -> torch.Tensor:
        ctx.tp = tp
        return _all_gather(x, tp)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _reduce_scatter(grads[0], ctx.tp), None


class _Scatter(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tp: Group) -> torch.Tensor:
        ctx.tp = tp
        return _reduce_scatter(x, tp)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _all_gather(grads[0], ctx.tp), None


class _CrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor, tp: Group) -> torch.Tensor:
        scores = logits.float()
        top = tp.all_reduce(scores.amax(-1), "max")
        scores = scores - top.unsqueeze(-1)
        local, mine = _local(targets, logits.shape[-1], tp)
        chosen = scores.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill_(~mine, 0.0)
        sums = tp.all_reduce(torch.stack((scores.exp_().sum(-1), chosen)))
        log_mass = sums[0].log()
        # The softmax is computed again in backward: keeping it would hold a second fp32 copy of the logits.
        ctx.save_for_backward(logits, top + log_mass, local, mine)
        return (log_mass - sums[1]).sum()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        logits, log_total, local, mine = ctx.saved_tensors
        grad = (logits.float() - log_total.unsqueeze(-1)).exp_()
        grad.scatter_add_(-1, local.unsqueeze(-1), -mine.unsqueeze(-1).to(grad.dtype))
        grad.mul_(grads[0])
        return grad.to(logits.dtype), None, None


def _local(tokens: torch.Tensor, rows: int, tp: Group) -> tuple[torch.Tensor, torch.Tensor]:
    """Row numbers within this rank's part of the vocabulary (any valid number where elsewhere), and which are its own."""
    local = tokens - tp.index * rows
    mine = (local >= 0) & (local < rows)
    return local.clamp_(0, rows - 1), mine


def _all_gather(x: torch.Tensor, tp: Group) -> torch.Tensor:
    return tp.all_gather_into(x.new_empty(x.shape[0] * tp.size, *x.shape[1:]), x.contiguous())


def _reduce_scatter(x: torch.Tensor, tp: Group) -> torch.Tensor:
    return tp.reduce_scatter_into(x.new_empty(x.shape[0] // tp.size, *x.shape[1:]), x.contiguous())
