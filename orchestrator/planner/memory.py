"""What a device must hold, in bytes: checked for each device by itself, never on average.

State per parameter: a compute copy and its gradient, whole on every replica; master and two moments, shared out over
replicas, once more for each mirror. Activations: of every micro-batch that is on its way, the most in the first stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.domain.kinds import DeviceKind

from .model import Layer, Model

USABLE_SHARE = 0.92
CONTEXT_BYTES = 2 << 30
"""Of an accelerator's runtime and communicators; nothing of that is on a cpu."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How a job keeps its state. copy_bytes: compute copy and gradient of a parameter, on every replica."""

    copy_bytes: float = 6.0
    owned_bytes: float = 12.0
    """Master and moments, over all replicas together."""
    mirrors: int = 1
    recompute: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Bytes of one device."""

    copies: float
    owned: float
    mirrored: float
    activations: float
    context: float

    @property
    def total(self) -> float:
        return self.copies + self.owned + self.mirrored + self.activations + self.context


def usable(kind: DeviceKind) -> float:
    return kind.memory_bytes * USABLE_SHARE


def context(kind: DeviceKind) -> float:
    return 0.0 if kind.name == "cpu" else float(min(CONTEXT_BYTES, kind.memory_bytes // 10))


def live(micro_batches: int, depth: int, stage: int) -> int:
    """Micro-batches whose activations a stage holds at once."""
    return max(1, min(micro_batches, depth - stage))


def need(
    layers: Sequence[Layer],
    model: Model,
    kind: DeviceKind,
    rules: Rules,
    *,
    tp: int,
    samples: int,
    in_flight: int,
    replicas: int,
    share: float | None = None,
) -> Need:
    """share: of the owned state of these layers, where it is not 1 / replicas."""
    params = sum(layer.params(tp) for layer in layers)
    part = 1.0 / replicas if share is None else share
    tokens = samples * model.sequence
    kept = sum(kept_by(layer, tp, rules.recompute) for layer in layers) * tokens * in_flight
    if rules.recompute:
        kept += max((kept_by(layer, tp, False) for layer in layers), default=0.0) * tokens
    owned = params * rules.owned_bytes * part
    return Need(
        copies=params * rules.copy_bytes,
        owned=owned,
        mirrored=owned * rules.mirrors,
        activations=kept,
        context=context(kind),
    )


def kept_by(layer: Layer, tp: int, recompute: bool) -> float:
    """Per token: everything, or the layer's input alone where the rest is computed again."""
    everything = layer.kept_bytes / tp + layer.kept_whole_bytes
    return min(everything, 2.0 * layer.hidden) if recompute and layer.products else everything
