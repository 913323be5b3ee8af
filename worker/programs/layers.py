"""Layers of a Llama-style decoder on one tensor-parallel rank, built around parameters they are given.

    x        (S, B, D)         residual stream, this rank's part of the sequence
    q        (T, B, H / tp, E)  E = head_dim; k and v have KV / tp heads
    hidden   (T, B, F / tp)    of the gated feed-forward

They know where a layer stands (its number) only to key its dropout; stages and plans are not known here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import nn

from worker.keyed import keep_mask
from worker.parallel.group import Group
from worker.parallel.tensor import column_parallel, cross_entropy, embedding, gather_sequence, row_parallel

from .config import Settings

NORM_EPSILON = 1e-5

Take = Callable[[str], nn.Parameter]
"""name of a parameter within its layer -> this rank's leaf."""


@dataclass(frozen=True, slots=True)
class Draw:
    """What all randomness of one forward pass is keyed by, besides the layer."""

    seed: int
    step: int
    micro_batch: int


class Dropout(nn.Module):
    """Drops elements of the residual stream; which ones does not depend on how the sequence is cut."""

    def __init__(self, rate: float, layer: int, site: str, tp: Group) -> None:
        super().__init__()
        self.rate, self.layer, self.site, self.tp = rate, layer, site, tp

    def forward(self, x: torch.Tensor, draw: Draw) -> torch.Tensor:
        if self.rate == 0.0 or not self.training:
            return x
        part, batch, width = x.shape
        positions = torch.arange(part, device=x.device) + self.tp.index * part
        sequences = torch.arange(batch, device=x.device) * (part * self.tp.size)
        rows = positions.unsqueeze(1) + sequences
        keep = keep_mask(rows, width, self.rate, draw.seed, "dropout", draw.step, draw.micro_batch, self.layer, self.site)
        return x * keep.to(x.dtype).mul_(1.0 / (1.0 - self.rate))


class Norm(nn.Module):
    """RMSNorm, computed in fp32."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight.float(), NORM_EPSILON).to(x.dtype)


class Embedding(nn.Module):
    """Tokens (T, B) -> (S, B, D)."""

    def __init__(self, settings: Settings, tp: Group, layer: int, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight, self.tp = weight, tp
        self.dropout = Dropout(settings.dropout, layer, "embedding", tp)

    def forward(self, tokens: torch.Tensor, draw: Draw) -> torch.Tensor:
        dropped: torch.Tensor = self.dropout(embedding(tokens, self.weight, self.tp), draw)
        return dropped


class Block(nn.Module):
    """Attention and gated feed-forward, each behind a norm and beside a residual: (S, B, D) -> (S, B, D)."""

    def __init__(self, settings: Settings, tp: Group, layer: int, take: Take, rotation: torch.Tensor) -> None:
        super().__init__()
        self.attention_norm = Norm(take("attention_norm"))
        self.attention = Attention(settings, tp, take, rotation)
        self.attention_dropout = Dropout(settings.dropout, layer, "attention", tp)
        self.ffn_norm = Norm(take("ffn_norm"))
        self.ffn = FeedForward(tp, take)
        self.ffn_dropout = Dropout(settings.dropout, layer, "ffn", tp)

    def forward(self, x: torch.Tensor, draw: Draw) -> torch.Tensor:
        for norm, layer, dropout in (
            (self.attention_norm, self.attention, self.attention_dropout),
            (self.ffn_norm, self.ffn, self.ffn_dropout),
        ):
            x = x + dropout(layer(norm(x)), draw)
        return x


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions; a rank has whole groups of heads."""

    def __init__(self, settings: Settings, tp: Group, take: Take, rotation: torch.Tensor) -> None:
        super().__init__()
        self.tp, self.rotation = tp, rotation
        self.head_dim, self.grouped = settings.head_dim, settings.heads != settings.kv_heads
        self.q, self.k, self.v, self.o = take("q"), take("k"), take("v"), take("o")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = gather_sequence(x, self.tp)
        q = rotate(self._heads(column_parallel(x, self.q)), self.rotation)
        k = rotate(self._heads(column_parallel(x, self.k)), self.rotation)
        v = self._heads(column_parallel(x, self.v))
        # SDPA wants (B, H, T, E); it takes strides, so nothing is copied here.
        q, k, v = (heads.permute(1, 2, 0, 3) for heads in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        return row_parallel(mixed.permute(2, 0, 1, 3).flatten(2), self.o, self.tp)

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(*x.shape[:2], -1, self.head_dim)


class FeedForward(nn.Module):
    def __init__(self, tp: Group, take: Take) -> None:
        super().__init__()
        self.tp = tp
        self.gate, self.up, self.down = take("gate"), take("up"), take("down")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = gather_sequence(x, self.tp)
        hidden = F.silu(column_parallel(x, self.gate)) * column_parallel(x, self.up)
        return row_parallel(hidden, self.down, self.tp)


class Head(nn.Module):
    """(S, B, D) -> this rank's part of the logits, (B, T, V / tp)."""

    def __init__(self, tp: Group, norm: nn.Parameter, weight: nn.Parameter) -> None:
        super().__init__()
        self.norm, self.weight, self.tp = Norm(norm), weight, tp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Batch first before the projection: D is the smaller side to transpose.
        x = gather_sequence(self.norm(x), self.tp).transpose(0, 1).contiguous()
        return column_parallel(x, self.weight)

    def loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return cross_entropy(logits, targets, self.tp)


@lru_cache(maxsize=4)  # made once, not for each generation: nothing changes it
def rotation(sequence: int, head_dim: int, theta: float, device: torch.device) -> torch.Tensor:
    """Unit complex numbers of each position and pair: (T, 1, 1, E / 2)."""
    # fp64 until the end: at long positions an fp32 angle is off by whole bits.
    frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.outer(torch.arange(sequence, dtype=torch.float64), frequencies)
    return torch.polar(torch.ones_like(angles), angles).to(torch.complex64).to(device)[:, None, None, :]


def rotate(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Turns neighbouring pairs of x (T, B, H, E) by their position's angles, in fp32."""
    pairs = torch.view_as_complex(x.float().view(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * rotation).flatten(-2).to(x.dtype)
