"""Fitting the cost model's constants to runs that were measured, and saying how far off it is on others.

A pattern search over logarithms: no derivative, no library, the same answer everywhere. A constant is drawn to where it
began, because runs that do not identify it must not send it anywhere. Nothing is read here: the caller brings the runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log

from orchestrator.domain.kinds import DeviceKind

from .constants import Constants, Measured
from .machines import NodeGroup, machines
from .memory import Rules
from .model import Model
from .pipelines import Bench

Bounds = Mapping[str, tuple[float, float]]
PULL = 0.01
"""What an e-fold away from where a constant began costs, in mean absolute log error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One measured plan: rectangular, one kind of device."""

    model: Model
    kind: DeviceKind
    devices: int
    """Of a node."""
    tp: int
    dp: int
    bounds: tuple[int, ...]
    """Of layers, by stage."""
    samples: int
    batch: int
    """Samples of a step."""
    recompute: bool
    seconds: float
    chunks: int = 1
    """Stages of a device, interleaved: the pipeline fills so much faster, and activations pass so much oftener."""


def predict(run: Run, constants: Constants, measured: Measured = Measured()) -> float:
    """Seconds of a step."""
    depth = len(run.bounds) - 1
    nodes = -(-run.tp * run.dp * depth // run.devices)
    cluster = machines([NodeGroup(kind=run.kind, nodes=nodes, devices=min(run.devices, run.tp * run.dp * depth))])
    bench = Bench(
        model=run.model,
        classes=cluster.classes,
        tp=run.tp,
        samples=run.samples,
        recompute=run.recompute,
        rules=Rules(mirrors=0),
        constants=constants,
        measured=measured,
    )
    track = bench.cut((0,) * depth, run.bounds)
    ids = -(-run.batch // (run.samples * run.dp))
    oftener = 2 * bench.neighbour[0] * (run.chunks - 1)
    return (
        track.fill / run.chunks
        + (track.period + oftener) * ids
        + sum(bench.after(track, run.dp, run.kind.network_gb_s))
        + constants.step_s
    )


def mean_error(runs: Sequence[Run], constants: Constants, measured: Measured = Measured()) -> float:
    """Mean absolute error, as a share of what was measured."""
    return sum(abs(predict(run, constants, measured) / run.seconds - 1) for run in runs) / len(runs)


def fit(
    runs: Sequence[Run],
    start: Constants,
    bounds: Bounds,
    *,
    pulled: bool = True,
    rounds: int = 30,
    measured: Measured = Measured(),
) -> Constants:
    """The constants named in `bounds`, within them; by mean absolute log error, which one odd run cannot bend."""

    def loss(found: Constants) -> float:
        error = sum(abs(log(predict(run, found, measured) / run.seconds)) for run in runs) / len(runs)
        far = sum(log(getattr(found, name) / getattr(start, name)) ** 2 for name in bounds) if pulled else 0.0
        return error + PULL * far

    return _searched(loss, start, bounds, rounds)


def _searched(loss: Callable[[Constants], float], start: Constants, bounds: Bounds, rounds: int) -> Constants:
    best, least = start, loss(start)
    stride = dict.fromkeys(bounds, 0.3)
    for _ in range(rounds):
        for name, (low, high) in bounds.items():
            for sign in (1, -1):
                value = min(max(getattr(best, name) * exp(sign * stride[name]), low), high)
                tried = replace(best, **{name: value})
                found = loss(tried)
                if found < least - 1e-9:
                    best, least = tried, found
                    stride[name] *= 1.3
                    break
            else:
                stride[name] *= 0.6
    return best
