"""What a step computes, as numbers a cost model can use: layers with their matrices, and what they keep in memory.

Two ways to one: a program's profile, whatever the program is, and a transformer's shape, for what nobody has written a
program for. It knows no device and no plan.

    layer 0        looks tokens up         (no matrix product)
    layers 1..n    blocks, usually alike   (products, attention)
    last layer     the head                (products, logits)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import gcd, prod

from orchestrator.domain.profile import Profile
from orchestrator.domain.spec import JobSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer's work and memory per token. Layers alike are one object in a model, so that they are priced once."""

    products: tuple[tuple[int, int], ...] = ()
    """(rows, columns) of each matrix a token is multiplied by; tensor parallelism cuts one of the two."""
    hidden: int = 0
    """Elements of what passes from layer to layer, per token."""
    heads: int = 0
    """0: no attention."""
    vocabulary: int = 0
    """Logits per token; 0 but for a head."""
    split_params: int = 0
    whole_params: int = 0
    """Those that tensor parallelism does not cut."""
    kept_bytes: float = 0.0
    """Kept for the backward pass per token and cut by tensor parallelism,"""
    kept_whole_bytes: float = 0.0
    """and not cut by it."""

    def params(self, tp: int) -> float:
        """Of one tp rank."""
        return self.split_params / tp + self.whole_params


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    layers: tuple[Layer, ...]
    sequence: int
    """Tokens of a sample."""
    divisor: int
    """Degrees of tensor parallelism divide this."""
    flash: bool = True
    """Attention scores never reach memory."""
    cuttable: tuple[int, ...] | None = None
    """The only degrees of tensor parallelism allowed, where more than divisibility has a say."""

    @property
    def num_params(self) -> int:
        return sum(layer.split_params + layer.whole_params for layer in self.layers)

    def flops(self, tokens: int) -> float:
        """Model operations of forward and backward together, nothing computed twice."""
        return sum(3 * forward_flops(layer, self.sequence, self.flash) for layer in self.layers) * tokens

    def degrees(self, most: int) -> tuple[int, ...]:
        found = (tp for tp in range(1, min(most, self.divisor) + 1) if self.divisor % tp == 0)
        return tuple(tp for tp in found if self.cuttable is None or tp in self.cuttable)


def forward_flops(layer: Layer, sequence: int, flash: bool) -> float:
    """Per token. Causal attention that skips what is masked does half of it."""
    products = sum(2.0 * rows * columns for rows, columns in layer.products)
    return products + (4.0 * sequence * layer.hidden * (0.5 if flash else 1.0) if layer.heads else 0.0)


def of_profile(profile: Profile, spec: JobSpec, cuttable: tuple[int, ...] | None = None) -> Model:
    """Of a described program: its matrices are its lines of two and more dimensions."""
    train = spec.train
    tokens = train.micro_batch_size * train.sequence
    last = profile.num_layers - 1
    divisor = _common(divisor.value for divisor in profile.divisors) or 1 << 16
    heads = next((d.value for d in profile.divisors if d.field.rpartition(".")[2] == "heads"), 0)
    hidden = max(
        (line.numel for line in profile.lines if not line.split and len(line.shape) == 1),
        default=min((min(line.shape) for line in profile.lines if len(line.shape) > 1), default=1),
    )
    made: list[Layer] = []
    for index in range(profile.num_layers):
        # A tied line is held by every layer that uses it, but counted where it is first used.
        used = [line for line in profile.lines if index in line.layers]
        owned = [line for line in used if line.layers[0] == index]
        matrices = tuple((line.shape[0], prod(line.shape[1:])) for line in used if len(line.shape) > 1)
        is_lookup = index == 0 and profile.num_layers > 1 and len(matrices) == 1
        is_head = index == last and index > 0
        made.append(
            Layer(
                products=() if is_lookup else tuple(sorted(matrices)),
                hidden=hidden,
                heads=heads if len(matrices) > 2 else 0,
                vocabulary=max((rows for rows, _ in matrices), default=0) if is_head and len(matrices) == 1 else 0,
                split_params=sum(line.numel for line in owned if line.split),
                whole_params=sum(line.numel for line in owned if not line.split),
                kept_bytes=profile.activation_bytes / tokens,
            )
        )
    same: dict[Layer, Layer] = {}
    layers = tuple(same.setdefault(layer, layer) for layer in made)
    return Model(layers=layers, sequence=train.sequence, divisor=divisor, cuttable=cuttable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A decoder-only transformer by its usual numbers."""

    layers: int
    hidden: int
    heads: int
    sequence: int
    vocabulary: int = 51_200
    kv_heads: int | None = None
    ffn: int | None = None
    """None: four times hidden."""
    gated: bool = False
    """Three matrices in the feed-forward part, not two."""
    flash: bool = True
    tied: bool = True


def of_shape(shape: Shape) -> Model:
    hidden, ffn = shape.hidden, shape.ffn or 4 * shape.hidden
    kv = hidden * (shape.kv_heads or shape.heads) // shape.heads
    products = [(hidden + 2 * kv, hidden), (hidden, hidden), (ffn, hidden), (hidden, ffn)]
    if shape.gated:
        products.append((ffn, hidden))
    scores = 0.0 if shape.flash else 5.0 * shape.heads * shape.sequence
    # Korthikanti et al. 2022, section 4: 34 bytes an element of the residual stream, of which 24 are cut by tp alone and
    # the other 10 by sequence parallelism too; a gated layer by what each operation keeps, in bf16.
    kept = 2.0 * (7 * hidden + 2 * kv + 3 * ffn) if shape.gated else 34.0 * hidden
    block = Layer(
        products=tuple(products),
        hidden=hidden,
        heads=shape.heads,
        split_params=sum(rows * columns for rows, columns in products) + (0 if shape.gated else 4 * hidden + 2 * ffn),
        whole_params=2 * hidden if shape.gated else 4 * hidden,
        kept_bytes=kept + scores,
    )
    table = shape.vocabulary * hidden
    lookup = Layer(hidden=hidden, split_params=table, kept_bytes=2.0 * hidden)
    head = Layer(
        products=((shape.vocabulary, hidden),),
        hidden=hidden,
        vocabulary=shape.vocabulary,
        split_params=0 if shape.tied else table,
        whole_params=hidden,
        kept_bytes=4.0 * hidden + 6.0 * shape.vocabulary,
    )
    return Model(
        layers=(lookup, *(block for _ in range(shape.layers)), head),
        sequence=shape.sequence,
        divisor=gcd(shape.heads, shape.kv_heads or shape.heads),
        flash=shape.flash,
    )


def _common(values: Iterable[int]) -> int:
    found = 0
    for value in values:
        found = gcd(found, value)
    return found
