"""A question about a job and its cluster, as people ask it: sizes, faults, policies, and what of these makes sense.

It refuses to know how it is answered (whatif.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from math import isfinite
from random import Random
from typing import Any

from orchestrator.domain.kinds import KINDS

from .arrivals import Arrival, Maintenance, Slowness, SpotWaves, arrivals

POLICIES = ("restart", "shrink", "everstep")
WORDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "tuple[str, ...]": "a list of names",
}
POSITIVE = ("params", "step_s", "days")
LEAST = {"gpus": 1, "block": 1, "pp": 1, "pue": 1, "straggler_times": 1}
"""Of numbers that have to be larger than nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """One job on one cluster. block: accelerators that are lost, replaced and planned together: a machine, or a rack.

    pp: stages of a pipeline, each on one block; params: of the model. checkpoint_every: steps. rate: how many times as
    often as in Llama 3's cluster an accelerator fails. detect_s, restart_s, requorum_s: of the other systems.
    """

    name: str
    gpus: int
    block: int = 8
    pp: int = 4
    params: float = 405e9
    step_s: float = 5.0
    days: float = 14.0
    seed: int = 0
    rate: float = 1.0
    spares: int = 1
    mirrors: int = 1
    shrinks: bool = True
    """Goes on with fewer while blocks are away and no spare is left; or waits."""
    checkpoint_every: int = 60
    checkpoint_stall_s: float = 0.0
    """For which a checkpoint keeps training waiting, under every policy."""
    policies: tuple[str, ...] = POLICIES
    device_w: float = 700.0
    pue: float = 1.1
    kinds: tuple[str, ...] = ()
    """Of accelerators, an equal share of the blocks each; none: all are alike."""
    spot_waves_a_day: float = 0.0
    spot_blocks: int = 1
    spot_notice_s: float = 0.0
    maintenance_a_day: float = 0.0
    """Blocks that are announced and then taken away."""
    maintenance_notice_s: float = 900.0
    maintenance_s: float = 3600.0
    stragglers_a_day: float = 0.0
    straggler_times: float = 2.0
    straggler_s: float = 1800.0
    detect_s: float = 60.0
    restart_s: float = 420.0
    """Of other systems: until a failure is noticed, and until all processes are back and have loaded a checkpoint."""
    requorum_s: float = 15.0

    @property
    def paced_s(self) -> float:
        """A step with its share of the wait for checkpoints."""
        every = self.checkpoint_every
        return self.step_s + (self.checkpoint_stall_s / every if every else 0.0)

    @property
    def blocks(self) -> int:
        return self.gpus // self.block // self.pp * self.pp

    def problem(self) -> str | None:
        if self.blocks < self.pp:
            return (
                f"{self.gpus} accelerators are {self.gpus // self.block} blocks of {self.block}; pp {self.pp} needs as many"
            )
        if unknown := set(self.kinds) - set(KINDS):
            return f"no kind of accelerator is called {', '.join(sorted(unknown))}; there are {', '.join(sorted(KINDS))}"
        if unknown := set(self.policies) - set(POLICIES):
            return f"no policy is called {', '.join(sorted(unknown))}; there are {', '.join(POLICIES)}"
        return None


def trace_of(scene: WhatIf) -> list[Arrival]:
    return arrivals(
        Random(f"arrivals {scene.name} {scene.seed}"),
        days=scene.days,
        gpus=scene.gpus,
        blocks=scene.blocks,
        rate=scene.rate,
        waves=SpotWaves(per_day=scene.spot_waves_a_day, blocks=scene.spot_blocks, notice_s=scene.spot_notice_s),
        maintenance=Maintenance(
            per_day=scene.maintenance_a_day, notice_s=scene.maintenance_notice_s, away_s=scene.maintenance_s
        ),
        slowness=Slowness(per_day=scene.stragglers_a_day, times=scene.straggler_times, lasts_s=scene.straggler_s),
    )


def scene_of(data: Mapping[str, Any]) -> WhatIf:
    """Raises ValueError, in words for whoever wrote the file."""
    known = {field.name for field in fields(WhatIf)}
    if unknown := set(data) - known:
        raise ValueError(f"{', '.join(sorted(unknown))} means nothing here; a scenario has {', '.join(sorted(known))}")
    if not {"name", "gpus"} <= set(data):
        raise ValueError("a scenario needs a name and gpus, how many accelerators the job has")
    types = {field.name: str(field.type) for field in fields(WhatIf)}
    scene = WhatIf(**{name: _read(name, types[name], value) for name, value in data.items()})
    if problem := scene.problem():
        raise ValueError(problem)
    return scene


def _read(name: str, kind: str, value: Any) -> Any:
    """One field's value. Raises ValueError. A number such as 4e9 is text to YAML, which wants 4.0e+9."""
    if kind == "float" and isinstance(value, str):
        with suppress(ValueError):
            value = float(value)
    is_it = {
        "int": isinstance(value, int) and not isinstance(value, bool),
        "float": isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value),
        "bool": isinstance(value, bool),
        "str": isinstance(value, str),
        "tuple[str, ...]": isinstance(value, list | tuple) and all(isinstance(one, str) for one in value),
    }
    if not is_it[kind]:
        raise ValueError(f"{name} is {value!r}, and has to be {WORDS[kind]}")
    if isinstance(value, list):
        return tuple(value)
    least = LEAST.get(name, 0)
    if kind in ("int", "float") and name != "seed" and (value < least or (name in POSITIVE and not value)):
        raise ValueError(
            f"{name} is {value:g}, and has to be {'more than 0' if name in POSITIVE else f'{least:g} or more'}"
        )
    return value
