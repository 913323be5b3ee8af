"""What things take, in seconds, from their sizes: layers, collectives, neighbours, replicas, updates.

    layer        every product is bound by arithmetic or by memory, plus a launch; then attention; then element-wise
    collective   alpha-beta; over several nodes in two levels, so that each adapter carries a share
    pipeline     sum of its stages + (micro-batches - 1) x the slowest stage

Pure functions of figures: nothing here knows a plan's shape or searches for one.
"""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.domain.kinds import DeviceKind

from .constants import Constants, LayerTime
from .model import Layer, Model

ACTIVATION_BYTES = 2
"""Of an element that passes from layer to layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """Where a step's time goes, in seconds; the parts add up to `total`."""

    compute: float
    tp: float
    bubble: float
    p2p: float
    dp: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.compute + self.tp + self.bubble + self.p2p + self.dp + self.optimizer


def layer_time(
    layer: Layer, model: Model, kind: DeviceKind, tp: int, samples: int, recompute: bool, c: Constants, span: int = 0
) -> LayerTime:
    """One micro-batch of `samples` samples on each of tp devices. span: devices of a node, where tp may leave it."""
    tokens = samples * model.sequence
    peak, memory = kind.bf16_tflops * 1e12, kind.memory_gb_s * 1e9 * c.memory_share
    products = 0.0
    for rows, columns in layer.products:
        cut = rows * columns / tp
        # One of the two is cut; the larger, as it happens: it moves the same bytes to within a few per cent.
        moved = 2.0 * (tokens * min(rows, columns) + cut + tokens * max(rows, columns) / tp)
        products += max(2.0 * tokens * cut / (peak * c.product_share), moved / memory) + c.kernel_s
    attention = 0.0
    if layer.heads:
        scores = samples * layer.heads / tp * model.sequence**2
        share = 0.5 if model.flash else 1.0
        work = 2.0 * scores * layer.hidden / layer.heads * share / (peak * c.attention_share)
        moved = 2.0 * ((0.0 if model.flash else scores) + 2.0 * tokens * layer.hidden / tp)
        attention = 2.0 * (max(work, moved / memory) + c.kernel_s)
    if layer.vocabulary:
        # Logits and their cross-entropy, once forward and twice back; never computed again.
        extra = 6.0 * tokens * layer.vocabulary / tp / memory
        return LayerTime(products + extra / 3, 2 * products + 2 * extra / 3, 0.0)
    if not layer.products:
        return LayerTime(c.kernel_s, c.kernel_s, 0.0)
    wise = ACTIVATION_BYTES * tokens * layer.hidden * (c.whole_bytes + c.split_bytes / tp)
    if layer.heads and not model.flash:
        wise += c.score_bytes * layer.heads / tp * model.sequence**2 * samples
    elementwise = wise / memory + c.kernels * c.kernel_s
    forward = products + attention + elementwise
    backward = 2.0 * (products + attention) + c.backward_elementwise * elementwise + (forward if recompute else 0.0)
    gathered = ACTIVATION_BYTES * tokens * layer.hidden
    rounds = (6 if recompute else 4) if tp > 1 else 0
    return LayerTime(forward, backward, rounds * all_reduce(gathered, tp, span or tp, kind, kind.network_gb_s, c))


def all_reduce(payload: float, members: int, inside: int, kind: DeviceKind, network_gb_s: float, c: Constants) -> float:
    """Seconds for `payload` bytes over `members` devices, `inside` of them on each node."""
    if members < 2:
        return 0.0
    inside = max(1, min(inside, members))
    nodes = -(-members // inside)
    seconds = 0.0
    if inside > 1:
        rate = kind.link_gb_s * 1e9 * c.link_share
        seconds += 2 * (inside - 1) * c.link_latency_s + 2 * (inside - 1) / inside * payload / rate
    if nodes > 1:
        rate = network_gb_s * 1e9 * c.network_share
        # Rings for few and trees for many: latency grows with the smaller of the two.
        hops = min(nodes - 1, 2 * (nodes - 1).bit_length())
        seconds += 2 * hops * c.network_latency_s + 2 * (nodes - 1) / nodes * payload / inside / rate
    return seconds


def neighbour_time(model: Model, tp: int, samples: int, gb_s: float, c: Constants) -> float:
    """Activations to a neighbouring stage and their gradients back, as a stage sees it, for one micro-batch: each
    tp rank sends its part of the sequence."""
    hidden = max(layer.hidden for layer in model.layers)
    payload = ACTIVATION_BYTES * samples * model.sequence * hidden / tp
    return 2 * (c.neighbour_factor * payload / (gb_s * 1e9 * c.network_share) + c.network_latency_s)


def replica_time(
    params: float, replicas: int, inside: int, mirrors: int, kind: DeviceKind, network_gb_s: float, c: Constants
) -> float:
    """Reducing gradients to their owners, passing them on to mirrors, and gathering weights back. params: of one device."""
    if replicas < 2:
        return 0.0
    both_ways = all_reduce(2.0 * params, replicas, inside, kind, network_gb_s, c)
    copied = mirrors * 2.0 * params / replicas / (network_gb_s * 1e9 * c.network_share)
    return c.exposed_share * both_ways + copied


def update_time(params: float, replicas: int, mirrors: int, kind: DeviceKind, c: Constants) -> float:
    """params: of one device, before they are shared out over replicas."""
    owned = params / replicas * (1 + mirrors)
    return c.optimizer_bytes * owned / (kind.memory_gb_s * 1e9)
