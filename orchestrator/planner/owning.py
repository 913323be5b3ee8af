"""Who owns how much of a placed plan's state, where devices that hold the same layers differ: by memory first, then by how
fast they update it and pass it on.

All own alike unless that does not fit, or uneven shares make the slowest device's part of the update and of the exchange
much shorter. A mirror counts on the device that keeps it. It refuses to know how a plan was found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, pairwise

from orchestrator.domain.ids import Device, NodeId
from orchestrator.domain.kinds import KINDS, DeviceKind
from orchestrator.domain.layout import partners
from orchestrator.domain.plan import Plan, Stage
from orchestrator.domain.profile import Profile
from orchestrator.domain.spec import JobSpec

from .constants import Constants
from .job import model_of, rules_of
from .machines import slowed
from .memory import Rules, live, need, usable
from .model import Model
from .shares import Holder, spread

WORTH = 0.1
"""Of the slowest device's time: less is not worth that a later plan moves more."""
UNIT = 10_000
"""What the weights of a layer add up to, about."""
Taken = Sequence[Sequence[float]]
"""By stage: of each of its parts, what it owns."""


def with_shares(
    plan: Plan,
    spec: JobSpec,
    profile: Profile,
    kinds: Mapping[Device, str],
    speeds: Mapping[NodeId, float] | None = None,
    table: Mapping[str, DeviceKind] = KINDS,
) -> Plan | None:
    """The plan with everybody's share of the state, none where all own alike; None where no shares fit memory.

    speeds: what nodes reach of what their kind should.
    """
    made = {device: _kind(kinds[device], table, (speeds or {}).get(device.node, 1.0)) for device in plan.devices}
    seen = _Seen(plan, spec, profile, made)
    if min(seen.rooms.values()) < 0.0:
        return None  # copies and activations alone are too much
    alike = [[seen.amounts[part] / seen.number(part) for part in range(one.first, one.last)] for one in seen.holders]
    fits = seen.fits(alike)
    found = spread(seen.amounts, seen.holders)
    if found is None:
        return _told(plan, ()) if fits else None
    is_enough = fits and seen.slowest(found) >= seen.slowest(alike) * (1 - WORTH)
    return _told(plan, () if is_enough else seen.weights(found))


def fits_as_it_is(
    plan: Plan, spec: JobSpec, profile: Profile, kinds: Mapping[Device, str], table: Mapping[str, DeviceKind] = KINDS
) -> bool:
    """Whether everybody has room for the share that the plan says."""
    seen = _Seen(plan, spec, profile, {device: _kind(kinds[device], table, 1.0) for device in plan.devices})
    return seen.fits([[seen.told(stage, part) for part in range(one.first, one.last)] for stage, one in seen.pairs()])


def words(plan: Plan, kinds: Mapping[Device, str]) -> str:
    """`; of a layer's state an A100 owns 10 %, a B200 35 %`; nothing where all own alike."""
    found: dict[str, list[float]] = {}
    whole: Counter[int] = Counter()
    told = [stage for pipeline in plan.pipelines for stage in pipeline.stages if stage.shares]
    for stage in told:
        whole.update({layer: stage.share_of(layer) for layer in range(stage.first, stage.last)})
    for stage in told:
        mine = (stage.share_of(layer) / max(1, whole[layer]) for layer in range(stage.first, stage.last))
        found.setdefault(kinds.get(stage.devices[0], "?"), []).extend(mine)
    said = []
    for kind, shares in sorted(found.items()):
        low, high = f"{min(shares):.0%}", f"{max(shares):.0%}"
        said.append(f"{kind} {low}" if low == high else f"{kind} {low} to {high}")
    return f"; each owns of a layer's state: {', '.join(said)}" if said else ""


class _Seen:
    """A plan as parts of layers that nobody cuts, with who holds which. Amounts are parameters of one tp rank."""

    def __init__(self, plan: Plan, spec: JobSpec, profile: Profile, kinds: Mapping[Device, DeviceKind]) -> None:
        model = model_of(spec, profile)
        rules = replace(rules_of(spec), recompute=spec.train.activation_checkpointing)
        self.stages = [stage for pipeline in plan.pipelines for stage in pipeline.stages]
        self.bounds = sorted({bound for stage in self.stages for bound in (stage.first, stage.last)})
        params = [0.0, *accumulate(layer.params(1) / plan.tp for layer in model.layers)]
        self.amounts = [params[b] - params[a] for a, b in pairwise(self.bounds)]
        self.mirror = partners(plan) if rules.mirrors else {}
        self.rooms = _rooms(plan, model, rules, kinds, spec.train.micro_batch_size)
        self.holders = [self._holder(plan, stage, rules, kinds[stage.devices[0]]) for stage in self.stages]
        self._held = [_Held() for _ in self.amounts]
        for stage, one in self.pairs():
            for part in range(one.first, one.last):
                self._held[part].add(stage, self.bounds[part])

    def _holder(self, plan: Plan, stage: Stage, rules: Rules, kind: DeviceKind) -> Holder:
        # Room for what it owns and for what it mirrors. Half of it for each is enough, whatever its partners' shares are.
        rooms = (min(self.rooms[d], self.rooms[self.mirror.get(d, d)]) for d in stage.devices)
        return Holder(
            first=self.bounds.index(stage.first),
            last=self.bounds.index(stage.last),
            room=max(0.0, min(rooms)) / (1 + bool(self.mirror)),
            rate=1.0 / _seconds(kind, plan.dp, rules),
        )

    def pairs(self) -> Iterator[tuple[Stage, Holder]]:
        return zip(self.stages, self.holders, strict=True)

    def number(self, part: int) -> int:
        """Stages that hold it."""
        return self._held[part].number

    def told(self, stage: Stage, part: int) -> float:
        """What a stage owns of a part as the plan is."""
        held = self._held[part]
        if not held.shares or not held.is_told:
            return self.amounts[part] / held.number
        return self.amounts[part] * stage.share_of(self.bounds[part]) / held.shares

    def fits(self, taken: Taken) -> bool:
        owned = {device: sum(mine) for stage, mine in zip(self.stages, taken, strict=True) for device in stage.devices}
        held = dict(owned)
        for device, at in self.mirror.items():
            held[at] += owned[device]
        return all(amount <= self.rooms[device] for device, amount in held.items())

    def slowest(self, taken: Taken) -> float:
        """Seconds of a step."""
        return max(sum(mine) / one.rate for one, mine in zip(self.holders, taken, strict=True))

    def weights(self, taken: Taken) -> list[tuple[int, ...]]:
        """By stage, one a layer."""
        found = []
        for one, mine in zip(self.holders, taken, strict=True):
            weights: list[int] = []
            for part, amount in enumerate(mine, one.first):
                whole = self.amounts[part]
                weights += [round(UNIT * amount / whole) if whole else 1] * (self.bounds[part + 1] - self.bounds[part])
            found.append(tuple(weights))
        return found


@dataclass(slots=True)
class _Held:
    """Of one part: how many stages hold it, what their shares add up to, and whether all of them say."""

    number: int = 0
    shares: int = 0
    is_told: bool = True

    def add(self, stage: Stage, layer: int) -> None:
        self.number += 1
        self.shares += stage.share_of(layer)
        self.is_told = self.is_told and bool(stage.shares)


def _rooms(plan: Plan, model: Model, rules: Rules, kinds: Mapping[Device, DeviceKind], samples: int) -> dict[Device, float]:
    """Parameters whose state fits beside copies and activations, of each device."""
    found = {}

    @cache
    def other(first: int, last: int, kind: DeviceKind, in_flight: int) -> float:
        """Bytes of what a stage holds besides: there are many stages alike."""
        layers = model.layers[first:last]
        beside = need(layers, model, kind, rules, tp=plan.tp, samples=samples, in_flight=in_flight, replicas=1, share=0.0)
        return beside.total

    for pipeline in plan.pipelines:
        depth, ids = len(pipeline.stages), len(pipeline.micro_batches)
        for number, stage in enumerate(pipeline.stages):
            kind = kinds[stage.devices[0]]
            beside = other(stage.first, stage.last, kind, live(ids, depth, number))
            room = (usable(kind) * (1 + 1e-9) - beside) / rules.owned_bytes
            found.update(dict.fromkeys(stage.devices, room))
    return found


def _kind(name: str, table: Mapping[str, DeviceKind], speed: float) -> DeviceKind:
    return slowed(table.get(name, table["cpu"]), speed)


def _seconds(kind: DeviceKind, replicas: int, rules: Rules) -> float:
    """Of a step, for a parameter that is owned: updated, mirrored, its gradient taken from all others, its weight sent."""
    c = Constants()
    passed = 2.0 * rules.mirrors + 2.0 * 2.0 * (replicas - 1) * c.exposed_share
    return c.optimizer_bytes * (1 + rules.mirrors) / (kind.memory_gb_s * 1e9) + passed / (
        kind.network_gb_s * 1e9 * c.network_share
    )


def _told(plan: Plan, weights: Sequence[tuple[int, ...]]) -> Plan:
    """weights: by stage; none for shares alike."""
    left = iter(weights)

    def told(stage: Stage) -> Stage:
        return replace(stage, shares=next(left) if weights else ())

    pipelines = tuple(replace(pipeline, stages=tuple(map(told, pipeline.stages))) for pipeline in plan.pipelines)
    return replace(plan, pipelines=pipelines)
