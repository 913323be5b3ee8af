"""What devices and links really reach of their data sheets: the cost model's constants.

The defaults were fitted by `calibrate` on runs that vTrain published (MICRO 2024: A100, 2 to 8 devices, and 64 to 256 over
InfiniBand); `python -m benchmarks.planner` fits them anew and says how far off they are on models left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from orchestrator.domain.rows import PRODUCT_SHARE


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """Shares are of the data sheet's figure; latencies are seconds."""

    product_share: float = PRODUCT_SHARE
    """Of the tensor peak, in a large matrix product."""
    attention_share: float = 0.80
    memory_share: float = 0.78
    kernel_s: float = 40e-6
    """Of every kernel, besides its work."""
    kernels: float = 7.25
    """Of a layer's element-wise work."""
    whole_bytes: float = 4.0
    """Moved by element-wise work per element of the residual stream and byte of its type, tp does not cut it;"""
    split_bytes: float = 4.0
    """tp cuts it;"""
    score_bytes: float = 16.0
    """and per attention score where scores reach memory."""
    backward_elementwise: float = 1.6
    """Element-wise work backward, over forward."""
    link_share: float = 0.78
    link_latency_s: float = 12e-6
    network_share: float = 0.80
    network_latency_s: float = 30e-6
    neighbour_factor: float = 0.8
    """Of the time that activations take to a neighbouring stage, what is seen: the rest is hidden."""
    exposed_share: float = 1.0
    """Of reduction and gathering over replicas, what is not hidden behind computing."""
    optimizer_bytes: float = 26.0
    """Moved per owned parameter by an update."""
    step_s: float = 0.0
    """Of every step, whatever it is."""


@dataclass(frozen=True, slots=True)
class LayerTime:
    """Seconds of one layer for one micro-batch."""

    forward: float
    backward: float
    """Recomputing included."""
    tp: float
    """Collectives of tensor parallelism, both ways."""

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.tp


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Stage times that were seen: (kind, tp, samples of a micro-batch) -> each layer's (forward, backward) in seconds.

    Collectives of tensor parallelism are in them.
    """

    layers: Mapping[tuple[str, int, int], tuple[tuple[float, float], ...]] = field(default_factory=dict)
    factors: Mapping[str, float] = field(default_factory=dict)
    """Kind -> by how much a running job's stages take longer than is predicted, with or without the times above."""
    skew: tuple[float, ...] = ()
    """Of each layer, by how much it takes longer than others of its kind's do; empty where none was seen to."""

    def skew_of(self, layer: int) -> float:
        return self.skew[layer] if self.skew else 1.0


def monotone(measured: Measured) -> Measured:
    """A smaller micro-batch never takes longer than a larger one: where it seems to, the measurement was disturbed."""
    made: dict[tuple[str, int, int], tuple[tuple[float, float], ...]] = {}
    for kind, tp, samples in sorted(measured.layers, reverse=True):
        mine = measured.layers[kind, tp, samples]
        above = [key for key in made if key[:2] == (kind, tp)]
        if above:
            bound = made[min(above, key=lambda key: key[2])]
            mine = tuple((min(a, c), min(b, d)) for (a, b), (c, d) in zip(mine, bound, strict=True))
        made[kind, tp, samples] = mine
    return Measured(layers=made)
