"""The built-in causal language model: a Llama-style decoder over bytes, as lines, initial values and stages.

    layer 0       embedding
    layer 1..L    blocks
    layer L + 1   final norm and head (its own matrix, or the embedding's where tied)

It satisfies `worker.program.Program` and `worker.checkpoint.foreign.Exportable`. It knows nothing of plans, generations or
optimizers.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from orchestrator.domain.profile import Divisor, Line, Profile
from orchestrator.domain.spec import JobSpec
from worker.checkpoint.foreign import Foreign
from worker.keyed import normal
from worker.parallel.group import Group
from worker.program import Leaves, StageModule

from . import llama
from .config import Settings, read_settings
from .layers import Block, Draw, Embedding, Head, rotation

INITIAL_STD = 0.02
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class CausalLM:
    """Stateless; see the module."""

    def describe(self, spec: JobSpec) -> Profile:
        """Layers, lines and divisors of the model that `spec.model` asks for. Raises Refused."""
        settings = read_settings(spec)
        return Profile(
            num_layers=settings.layers + 2,
            lines=_lines(settings),
            divisors=(
                Divisor(field="model.heads", value=settings.heads),
                Divisor(field="model.kv_heads", value=settings.kv_heads),
                Divisor(field="model.ffn", value=settings.ffn),
                Divisor(field="model.vocabulary", value=settings.vocabulary),
                Divisor(field="train.sequence", value=spec.train.sequence),
            ),
            activation_bytes=_activation_bytes(settings, spec),
        )

    def initial(self, spec: JobSpec, line: Line) -> torch.Tensor:
        """Norms one, matrices normal; flat fp32, the same whatever the plan."""
        settings, use = read_settings(spec), line.name.rpartition(".")[2]
        if use.endswith("norm"):
            return torch.ones(line.numel)
        std = INITIAL_STD
        if use in ("o", "down"):
            # Each block adds two matrices' output to the residual stream: keep its variance independent of depth.
            std /= math.sqrt(2 * settings.layers)
        elif use == "embedding" and not settings.tied:
            # The first norm divides by these: rows of 0.02 make it amplify every update fiftyfold, and two runs that
            # differ in the order of a sum then part within 100 steps. A tied line is a head as well and must stay small.
            std = 1.0
        return normal(line.numel, spec.train.seed, "initial", line.name).mul_(std)

    def build(self, spec: JobSpec, first: int, last: int, tp: Group, leaves: Leaves) -> StageModule:
        """Layers first..last-1 around `leaves`, on the device those are on."""
        return DecoderStage(spec, read_settings(spec), first, last, tp, leaves)

    def foreign(self, spec: JobSpec) -> Foreign:
        """As Hugging Face's Llama. Raises Refused."""
        return llama.foreign(spec)


PROGRAM = CausalLM()


class DecoderStage(StageModule):
    """A contiguous range of layers on one tp rank; shapes as `StageModule` says."""

    def __init__(self, spec: JobSpec, settings: Settings, first: int, last: int, tp: Group, leaves: Leaves) -> None:
        super().__init__()
        train, final = spec.train, settings.layers + 1
        self.seed, self.recompute = train.seed, train.activation_checkpointing
        self.hidden_shape = (train.micro_batch_size, train.sequence // tp.size, settings.width)
        self.hidden_dtype = DTYPES[train.dtype]
        self.logits_shape = (train.micro_batch_size, train.sequence, settings.vocabulary // tp.size)
        device = next(iter(leaves.values())).device
        turns = rotation(train.sequence, settings.head_dim, settings.rope_theta, device)

        def block(layer: int) -> Block:
            return Block(settings, tp, layer, lambda name: leaves[f"layers.{layer}.{name}", layer], turns)

        self.embedding = Embedding(settings, tp, 0, leaves["embedding", 0]) if first == 0 else None
        self.blocks = nn.ModuleList(block(layer) for layer in range(max(first, 1), min(last, final)))
        self.head: Head | None = None
        if last > final:
            self.head = Head(tp, leaves["final_norm", final], leaves["embedding" if settings.tied else "head", final])

    def forward(self, x: torch.Tensor, ids: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        draw = Draw(self.seed, int(step), int(ids))
        # Sequence first inside a stage, batch first between stages.
        x = x.transpose(0, 1).contiguous()
        if self.embedding is not None:
            x = self.embedding(x, draw)
        for block in self.blocks:
            if self.recompute:
                # Dropout is keyed, so the second pass needs no generator state to be the same.
                x = checkpoint(block, x, draw, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x, draw)
        if self.head is not None:
            logits: torch.Tensor = self.head(x)
            return logits
        return x.transpose(0, 1).contiguous()

    def loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        assert self.head is not None, "only the last stage has logits"
        return self.head.loss(logits, targets)


def _lines(settings: Settings) -> tuple[Line, ...]:
    width, final = settings.width, settings.layers + 1
    lines = [_matrix("embedding", settings.vocabulary, width, (0, final) if settings.tied else (0,))]
    for layer in range(1, final):
        sizes = {
            "q": settings.q_width,
            "k": settings.kv_width,
            "v": settings.kv_width,
            "o": settings.q_width,
            "gate": settings.ffn,
            "up": settings.ffn,
            "down": settings.ffn,
        }
        lines += [_matrix(f"layers.{layer}.{name}", rows, width, (layer,)) for name, rows in sizes.items()]
        lines += [_norm(f"layers.{layer}.{name}", width, layer) for name in ("attention_norm", "ffn_norm")]
    lines.append(_norm("final_norm", width, final))
    if not settings.tied:
        lines.append(_matrix("head", settings.vocabulary, width, (final,)))
    return tuple(lines)


def _matrix(name: str, rows: int, width: int, layers: tuple[int, ...]) -> Line:
    return Line(name=name, shape=(rows, width), split=True, layers=layers, decay=True)


def _norm(name: str, width: int, layer: int) -> Line:
    return Line(name=name, shape=(width,), split=False, layers=(layer,), decay=False)


def _activation_bytes(settings: Settings, spec: JobSpec) -> int:
    """What autograd keeps of the hungriest layer (a block or the head), by counting what each operation saves."""
    tokens = spec.train.micro_batch_size * spec.train.sequence
    size = DTYPES[spec.train.dtype].itemsize
    width = settings.width
    # A norm keeps its input, in fp32 as well where that is a copy, and its output.
    norm = width * (2 * size if size == 4 else size + 4)
    mixed = size * (2 * settings.q_width + 2 * settings.kv_width)
    hidden = size * 4 * settings.ffn
    masks = size * 2 * width if settings.dropout else 0
    block = size * width if spec.train.activation_checkpointing else 2 * norm + mixed + hidden + masks
    head = norm + size * (width + settings.vocabulary)
    return tokens * max(block, head)
