"""Pipelines as the search handles them: which class of device each stage has, its layers, and how long an id takes.

A `Bench` holds all prices of one (tp, micro-batch size, recompute): prefix sums of seconds per class, of bytes per
number of micro-batches in flight. It makes a pipeline from a sequence of classes, splitting layers exactly, and
remembers it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from orchestrator.domain.kinds import DeviceKind

from .constants import Constants, LayerTime, Measured
from .cost import layer_time, neighbour_time, replica_time, update_time
from .machines import NodeClass
from .memory import Rules, context, kept_by, live, usable
from .model import Layer, Model
from .split import exact_split


@dataclass(frozen=True, slots=True, kw_only=True)
class Track:
    """One pipeline. classes[i]: index of the class that stage i's devices are of."""

    classes: tuple[int, ...]
    bounds: tuple[int, ...]
    times: tuple[float, ...]
    """Of each stage for one id."""
    counts: tuple[int, ...]
    """tp groups taken of each class."""
    heaviest: tuple[tuple[int, float], ...] = field(repr=False, compare=False)
    """Of each class, parameters of a device of its fullest stage."""
    depth: int = field(init=False, repr=False, compare=False)
    period: float = field(init=False, repr=False, compare=False)
    fill: float = field(init=False, repr=False, compare=False)
    """Seconds of a step besides period x ids."""

    def __post_init__(self) -> None:
        # Asked for again and again by whoever composes pipelines.
        object.__setattr__(self, "depth", len(self.classes))
        object.__setattr__(self, "period", max(self.times))
        object.__setattr__(self, "fill", sum(self.times) - max(self.times))

    def layers(self, stage: int) -> slice:
        return slice(self.bounds[stage], self.bounds[stage + 1])


@dataclass(slots=True)
class Bench:
    model: Model
    classes: tuple[NodeClass, ...]
    tp: int
    samples: int
    """Of one micro-batch."""
    recompute: bool
    rules: Rules
    constants: Constants
    measured: Measured
    seconds: list[list[float]] = field(init=False)
    """By class: prefix sums over layers."""
    times: list[list[LayerTime]] = field(init=False)
    neighbour: list[float] = field(init=False)
    params: list[float] = field(init=False)
    rooms: list[float] = field(init=False)
    """Bytes a device of each class has for its layers."""
    _again: float = field(init=False)
    _kept: list[float] = field(init=False)
    _held: dict[tuple[int, int], list[float]] = field(init=False, default_factory=dict)
    _tracks: dict[tuple[tuple[int, ...], int], Track | None] = field(init=False, default_factory=dict)
    _afters: dict[tuple[int, float, int, float], tuple[float, float]] = field(init=False, default_factory=dict)
    _paces: list[float] = field(init=False)
    _is_regular: bool = field(init=False)

    def __post_init__(self) -> None:
        self.times = [self._layer_times(one) for one in self.classes]
        again = max((kept_by(layer, self.tp, False) for layer in _variants(self.model)), default=0.0)
        self._again = again * self.samples * self.model.sequence if self.recompute else 0.0
        self.rooms = [usable(one.kind) - context(one.kind) - self._again for one in self.classes]
        totals = [_totals(mine) for mine in self.times]
        self.seconds = [[0.0, *accumulate(mine)] for mine in totals]
        self.neighbour = [
            neighbour_time(self.model, self.tp, self.samples, one.kind.network_gb_s, self.constants) for one in self.classes
        ]
        by_layer: dict[int, tuple[float, float]] = {}
        tokens = self.samples * self.model.sequence
        parts = []
        for layer in self.model.layers:
            if id(layer) not in by_layer:
                by_layer[id(layer)] = (layer.params(self.tp), kept_by(layer, self.tp, self.recompute) * tokens)
            parts.append(by_layer[id(layer)])
        self.params = [0.0, *accumulate(params for params, _ in parts)]
        self._kept = [0.0, *accumulate(kept for _, kept in parts)]
        is_even = len(set(self.measured.skew[1:-1])) <= 1
        self._is_regular = is_even and len({id(layer) for layer in self.model.layers[1:-1]}) <= 1
        share = sum(totals[0])
        # How much of the model's work, measured on the first class, a class can do in a second, whichever layers it has.
        self._paces = [
            max(first / share / total for first, total in set(zip(totals[0], mine, strict=True)) if total > 0)
            for mine in totals
        ]

    def _layer_times(self, one: NodeClass) -> list[LayerTime]:
        return layer_times(
            self.model,
            one.kind,
            self.tp,
            self.samples,
            self.recompute,
            self.constants,
            self.measured,
            one.key.speed,
            one.devices,
        )

    # --- pipelines --------------------------------------------------------------------------------------------------------

    def track(self, classes: tuple[int, ...], replicas: int) -> Track | None:
        """A pipeline of these classes, or None where its layers do not fit memory with `replicas` to share state."""
        key = (classes, self._replicas_that_matter(classes, replicas))
        if key not in self._tracks:
            self._tracks[key] = self._make(classes, replicas)
        return self._tracks[key]

    def _replicas_that_matter(self, classes: tuple[int, ...], replicas: int) -> int:
        # Where a whole model fits each device even unshared, the number of replicas changes nothing.
        return 0 if all(self.fits_whole(index, len(classes)) for index in set(classes)) else replicas

    def fits_whole(self, index: int, depth: int) -> bool:
        return self._held_by(depth, 1)[-1] <= self.rooms[index]

    def _held_by(self, in_flight: int, replicas: int) -> list[float]:
        """Prefix sums over layers of bytes."""
        key = (in_flight, replicas)
        if key not in self._held:
            rules = self.rules
            per_param = rules.copy_bytes + rules.owned_bytes * (1 + rules.mirrors) / replicas
            self._held[key] = [
                params * per_param + kept * in_flight for params, kept in zip(self.params, self._kept, strict=True)
            ]
        return self._held[key]

    def _make(self, classes: tuple[int, ...], replicas: int) -> Track | None:
        depth = len(classes)
        room = [self.rooms[index] for index in classes]
        # A pipeline is worth having only if it takes as many ids as it is deep, so all of those may be in flight.
        held = [self._held_by(depth - i, replicas) for i in range(depth)]
        if max(prefix[-1] for prefix in held) <= min(room):
            return self._split(classes)
        if self._is_regular:
            # The best split of all is the best of those that fit, where it fits; it is the same for all replicas.
            free = (classes, 0)
            if free not in self._tracks:
                self._tracks[free] = self._split(classes)
            track = self._tracks[free]
            if track is None or all(
                prefix[last] <= prefix[first] + have
                for prefix, have, first, last in zip(held, room, track.bounds, track.bounds[1:], strict=False)
            ):
                return track
        return self._split(classes, held, room)

    def _split(
        self, classes: tuple[int, ...], held: Sequence[Sequence[float]] = (), room: Sequence[float] = ()
    ) -> Track | None:
        """The split whose slowest stage is fastest. held, room: by stage, as `exact_split` has them; empty: no matter."""
        seconds = [self.seconds[index] for index in classes]
        extra = self._extra(classes)
        rates = [self._paces[index] for index in classes]
        least = (1.0 + sum([rate * beside for rate, beside in zip(rates, extra, strict=True)])) / sum(rates)
        held, room = held or [()] * len(classes), room or [0.0] * len(classes)
        bounds = exact_split(seconds, held, room, extra, least * (1 - 1e-9), is_regular=self._is_regular)
        return None if bounds is None else self.cut(classes, bounds)

    def cut(self, classes: tuple[int, ...], bounds: tuple[int, ...]) -> Track:
        """The pipeline with this very split, fit or not."""
        counts = [0] * len(self.classes)
        for index in classes:
            counts[index] += 1
        by_class, extra = self.seconds, self._extra(classes)
        times = tuple(
            [by_class[index][bounds[i + 1]] - by_class[index][bounds[i]] + extra[i] for i, index in enumerate(classes)]
        )
        most: dict[int, float] = {}
        for first, last, index in zip(bounds, bounds[1:], classes, strict=False):
            most[index] = max(most.get(index, 0.0), self.params[last] - self.params[first])
        return Track(classes=classes, bounds=bounds, times=times, counts=tuple(counts), heaviest=tuple(most.items()))

    def _extra(self, classes: tuple[int, ...]) -> list[float]:
        """Seconds of each stage besides its layers: two neighbours, one at either end, none alone."""
        found = [2 * self.neighbour[index] for index in classes]
        found[0] -= self.neighbour[classes[0]]
        found[-1] -= self.neighbour[classes[-1]]
        return found

    # --- what a step takes besides ----------------------------------------------------------------------------------------

    def after(self, track: Track, replicas: int, network_gb_s: float) -> tuple[float, float]:
        """Seconds of (reduction and gathering, update) once all ids are done, of the stage that takes longest."""
        found = [self._after(index, params, replicas, network_gb_s) for index, params in track.heaviest]
        return found[0] if len(found) == 1 else max(found, key=sum)

    def _after(self, index: int, params: float, replicas: int, network_gb_s: float) -> tuple[float, float]:
        key = (index, params, replicas, network_gb_s)
        if key not in self._afters:
            one = self.classes[index]
            inside = max(1, one.devices // self.tp)
            self._afters[key] = (
                replica_time(params, replicas, inside, self.rules.mirrors, one.kind, network_gb_s, self.constants),
                update_time(params, replicas, self.rules.mirrors, one.kind, self.constants),
            )
        return self._afters[key]

    def least_after(self, replicas: int, network_gb_s: float) -> float:
        """Seconds below which no pipeline's `after` is: of a stage that holds an even part of the deepest there can be."""
        deepest = self.params[-1] / len(self.model.layers)
        return min(
            replica_time(deepest, replicas, one.devices, self.rules.mirrors, one.kind, network_gb_s, self.constants)
            for one in self.classes
        )

    def bytes_of(self, track: Track, stage: int, ids: int, replicas: int) -> float:
        """Of one device of a stage."""
        prefix = self._held_by(live(ids, track.depth, stage), replicas)
        kind = self.classes[track.classes[stage]].kind
        return prefix[track.bounds[stage + 1]] - prefix[track.bounds[stage]] + context(kind) + self._again


def layer_times(
    model: Model,
    kind: DeviceKind,
    tp: int,
    samples: int,
    recompute: bool,
    constants: Constants,
    measured: Measured,
    speed: float = 1.0,
    span: int = 0,
) -> list[LayerTime]:
    """Of every layer on a kind: as it was seen where it was, else as the model says. kind: with `speed` in its rates."""
    factor = measured.factors.get(kind.name, 1.0)
    seen = measured.layers.get((kind.name, tp, samples))
    if seen is not None:
        slows = [factor / speed * measured.skew_of(number) for number in range(len(seen))]
        return [
            LayerTime(forward * slow, (backward + (forward if recompute else 0.0)) * slow, 0.0)
            for slow, (forward, backward) in zip(slows, seen, strict=True)
        ]
    priced = {
        id(layer): layer_time(layer, model, kind, tp, samples, recompute, constants, span) for layer in _variants(model)
    }
    known: dict[tuple[int, float], LayerTime] = {}
    found = []
    for number, layer in enumerate(model.layers):
        key = id(layer), factor * measured.skew_of(number)
        if key not in known:
            one, slow = priced[key[0]], key[1]
            known[key] = LayerTime(one.forward * slow, one.backward * slow, one.tp)
        found.append(known[key])
    return found


def _totals(times: Sequence[LayerTime]) -> list[float]:
    """Of each layer; those alike are one object."""
    known: dict[int, float] = {}
    return [known.get(id(time)) or known.setdefault(id(time), time.total) for time in times]


def _variants(model: Model) -> Sequence[Layer]:
    found: Mapping[int, Layer] = {id(layer): layer for layer in model.layers}
    return list(found.values())
