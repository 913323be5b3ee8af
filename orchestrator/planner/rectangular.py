"""Rectangular plans: tp x pp x dp, for devices that are taken as alike: enumerate what fits, take the best, say why.

Layers are split by parameter count, or by the times that stages were seen to take (alike.py), micro-batch ids dealt out
evenly. The cost is the classic one of a synchronous pipeline (Narayanan et al. 2021, section 3.2): work per device times
1 + bubble, with a penalty per tp rank; ties go to the plan that uses more devices, then to less tp, then to less pp.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import gcd, inf

from orchestrator.domain.effects import ChoosePlan
from orchestrator.domain.ids import Device, NodeId
from orchestrator.domain.plan import Infeasible, Pipeline, Plan, Stage
from orchestrator.domain.profile import splits_a_block

from .alike import layer_bounds, longest, split_words
from .fitting import Fitting
from .heirs import in_place
from .owning import fits_as_it_is
from .words import listed

TP_PENALTY = 0.08
"""Share of a stage's time that each further tp rank costs in collectives; measured later, assumed here."""


@dataclass(frozen=True, slots=True)
class Degrees:
    tp: int
    pp: int
    dp: int

    @property
    def devices(self) -> int:
        return self.tp * self.pp * self.dp

    def __str__(self) -> str:
        return f"tp{self.tp} x pp{self.pp} x dp{self.dp}"


def cost_of(request: ChoosePlan, plan: Plan) -> float:
    """Time of a step in units that all rectangular plans of the job share."""
    return _cost(request, Degrees(plan.tp, plan.pp, plan.dp))


def least_cost(request: ChoosePlan) -> float | None:
    """The same of the rectangular plan that would be chosen, whether it fits memory or not; None where there is none."""
    if request.spec.train.exact is True and len(kinds := kinds_of(request)) > 1:
        request = replace(request, devices=tuple((d, kind) for d, kind in request.devices if kind == kinds[0]))
    sizes = [len(island) for island in _islands(request)]
    return min(
        (
            _cost(request, degrees)
            for degrees in _degrees(request, sum(sizes))
            if sum(size // degrees.tp for size in sizes) >= degrees.pp * degrees.dp
        ),
        default=None,
    )


def choose_rectangular(request: ChoosePlan) -> Plan | Infeasible:
    """request: of no fewer devices than the job asks for."""
    islands = _islands(request)
    total = len(request.devices)
    best: tuple[tuple[float, ...], Degrees, list[tuple[Device, ...]], ChoosePlan] | None = None
    in_order: dict[int, list[tuple[Device, ...]]] = {}
    fitting = Fitting.of(request)

    def groups_of(degrees: Degrees) -> list[tuple[Device, ...]] | None:
        if degrees.tp not in in_order:
            in_order[degrees.tp] = _tp_groups(islands, degrees.tp, request.keep)
        return _groups(in_order[degrees.tp], degrees)

    # What would be faster may take more memory.
    variants = (request, replace(request, measured=())) if request.measured else (request,)

    def scores_of(degrees: Degrees) -> list[tuple[float, ...]]:
        costs = [_cost(request, degrees, usual=one is not request) for one in variants]
        return [(cost, -degrees.devices, degrees.tp, degrees.pp) for cost in costs]

    possible = list(_degrees(request, total))
    # The best first: on thousands of devices looking at all of them takes seconds.
    for scores, degrees in sorted(((scores_of(one), one) for one in possible), key=lambda found: min(found[0])):
        if best is not None and min(scores) >= best[0]:
            break
        groups = groups_of(degrees)
        if groups is None:
            continue
        bounds = [layer_bounds(one, degrees.pp) for one in variants]
        place = next((place for place, mine in enumerate(bounds) if not fitting.lacking(mine, groups)), None)
        if place is not None and (best is None or scores[place] < best[0]):
            best = (scores[place], degrees, groups, variants[place])
    if best is None and possible:
        there = [one for one in possible if groups_of(one) is not None]
        nearest = min(there, key=_share_of_state) if there else possible[0]
        return Infeasible(reason=_why_not(variants[-1], nearest, groups_of(nearest), islands, fitting))
    if best is None:
        return Infeasible(reason=_no_such_size(request, total))
    _, degrees, groups, asked = best
    return _after(asked, _plan(asked, degrees, groups, total))


def kinds_of(request: ChoosePlan) -> list[str]:
    """The kind that holds the job's state first, then those with most usable devices."""
    held = set(request.keep)
    number: dict[str, int] = defaultdict(int)
    holding: dict[str, bool] = defaultdict(bool)
    for device, kind in request.devices:
        number[kind] += 1
        holding[kind] |= device in held
    return sorted(number, key=lambda kind: (not holding[kind], -number[kind], kind))


def _share_of_state(degrees: Degrees) -> tuple[float, int]:
    """About what a device holds of it: compute copies whole on each replica, three times as much shared out."""
    return (1 + 3 / degrees.dp) / (degrees.tp * degrees.pp), degrees.devices


def _after(request: ChoosePlan, plan: Plan) -> Plan:
    """Where it is what is left of the plan that ran, who goes on keeps what it owned, as far as memory allows."""
    if request.running is None:
        return plan
    shared, kinds = in_place(plan, request.running), dict(request.devices)
    fits = shared is not plan and fits_as_it_is(shared, request.spec, request.profile, kinds, request.table)
    return shared if fits else plan


def _no_such_size(request: ChoosePlan, total: int) -> str:
    """Why none of the sizes that the job may have can be cut into pipelines; on a larger cluster it may be another one."""
    wanted, profile, ids = request.spec.parallel, request.profile, request.spec.train.micro_batches
    whole = gcd(*(divisor.value for divisor in profile.divisors)) or total
    sizes = {
        tp * pp * dp
        for tp in ([wanted.tp] if wanted.tp else [tp for tp in range(1, whole + 1) if whole % tp == 0])
        for pp in ([wanted.pp] if wanted.pp else range(1, min(ids, profile.num_layers) + 1))
        for dp in ([wanted.dp] if wanted.dp else range(1, ids // pp + 1))
    }
    least, most = max(1, wanted.min_devices), wanted.max_devices or inf
    if possible := [size for size in sizes if least <= size <= most]:
        larger = min((size for size in possible if size > total), default=0)
        if larger:
            given = [f"parallel.{name} {degree}" for name in ("tp", "pp", "dp") if (degree := getattr(wanted, name))]
            because = f" by {listed(given)}" if given else ""
            fewer = f"lower {lower(request)} or min_devices" if wanted.min_devices > 1 else f"lower {lower(request)}"
            return f"needs {larger} devices{because}, {total} usable; {fewer}, or wait for a node"
        return f"no tp x pp x dp of {total} devices fits the job's constraints; lower them"
    near = [
        max((size for size in sizes if size < least), default=0),
        min((size for size in sizes if size > most), default=0),
    ]
    may_have = f"{least} devices or more" if most == inf else f"{least} to {most} devices"
    return (
        f"may have {may_have}, and with {ids} micro-batches no such number is tp x pp x dp; "
        f"{' or '.join(str(size) for size in near if size)} would be: change min_devices or max_devices"
    )


def lower(request: ChoosePlan) -> str:
    """Which of its fields to lower, where devices are too few."""
    wanted = request.spec.parallel
    named = [name for name in ("dp", "pp", "tp") if (getattr(wanted, name) or 1) > 1]
    return named[0] if named else "min_devices"


def _islands(request: ChoosePlan) -> list[list[Device]]:
    """Devices by node, nodes in order: a tp group never leaves its node."""
    by_node: dict[NodeId, list[Device]] = defaultdict(list)
    for device, _ in sorted(request.devices):
        by_node[device.node].append(device)
    return [by_node[node] for node in sorted(by_node)]


def _degrees(request: ChoosePlan, total: int) -> Iterator[Degrees]:
    wanted, profile, ids = request.spec.parallel, request.profile, request.spec.train.micro_batches
    most = min(total, wanted.max_devices or total)
    for tp in [wanted.tp] if wanted.tp else range(1, total + 1):
        if any(divisor.value % tp for divisor in profile.divisors):
            continue
        if request.spec.train.exact and splits_a_block(profile, tp):
            continue
        for pp in [wanted.pp] if wanted.pp else range(1, min(total // tp, profile.num_layers) + 1):
            for dp in [wanted.dp] if wanted.dp else range(1, total // (tp * pp) + 1):
                found = Degrees(tp, pp, dp)
                if wanted.min_devices <= found.devices <= most and pp <= ids // dp:
                    yield found


def _tp_groups(islands: list[list[Device]], tp: int, keep: tuple[Device, ...]) -> list[tuple[Device, ...]]:
    """Every tp group there can be, those that hold state first."""
    held = set(keep)
    found = [
        tuple(island[i : i + tp])
        for island in (sorted(island, key=lambda d: (d not in held, d)) for island in islands)
        for i in range(0, len(island) - tp + 1, tp)
    ]
    return sorted(found, key=lambda group: (-sum(d in held for d in group), group))


def _groups(in_order: list[tuple[Device, ...]], degrees: Degrees) -> list[tuple[Device, ...]] | None:
    """The first pp * dp of them; None where there are fewer."""
    count = degrees.pp * degrees.dp
    return sorted(tuple(sorted(group)) for group in in_order[:count]) if len(in_order) >= count else None


def _why_not(
    request: ChoosePlan,
    degrees: Degrees,
    groups: list[tuple[Device, ...]] | None,
    islands: list[list[Device]],
    fitting: Fitting,
) -> str:
    """What keeps these degrees from being a plan."""
    if groups is not None:
        said = fitting.lacking(layer_bounds(request, degrees.pp), groups)
        return f"{degrees} needs {said}; {_more_room(request)}"
    times = degrees.pp * degrees.dp
    sets = sum(len(island) // degrees.tp for island in islands)
    there = "there is 1 such set" if sets == 1 else f"there are {sets} such sets"
    if times == 1:
        largest = max((len(island) for island in islands), default=0)
        return f"needs {degrees.tp} devices on one node, the largest has {largest} usable; lower tp or wait for a node"
    return f"needs {degrees.tp} devices on one node {times} times ({degrees}), {there}; lower tp or wait for a node"


def _more_room(request: ChoosePlan) -> str:
    wanted = request.spec.parallel
    fixed = [name for name in ("tp", "pp") if getattr(wanted, name)]
    more = (
        f"raise {listed(fixed, 'or')}" if fixed else "add nodes or raise max_devices" if wanted.max_devices else "add nodes"
    )
    return more if request.spec.train.activation_checkpointing else f"{more}, or set train.activation_checkpointing"


def _cost(request: ChoosePlan, degrees: Degrees, *, usual: bool = False) -> float:
    """Time of a step in units of one layer of one micro-batch on one device. usual: see `longest`."""
    ids = -(-request.spec.train.micro_batches // degrees.dp)
    stage = longest(request, degrees.pp, usual=usual) / degrees.tp * (1 + TP_PENALTY * (degrees.tp - 1))
    return (ids + degrees.pp - 1) * stage


def _plan(request: ChoosePlan, degrees: Degrees, groups: list[tuple[Device, ...]], total: int) -> Plan:
    bounds = layer_bounds(request, degrees.pp)
    ids = request.spec.train.micro_batches
    # Groups are ordered by node, so consecutive stages of one pipeline tend to sit on different nodes and a stage's
    # replicas too: the first dp groups are stage 0 of every pipeline, and so on.
    pipelines = tuple(
        Pipeline(
            stages=tuple(
                Stage(first=bounds[s], last=bounds[s + 1], devices=groups[s * degrees.dp + p]) for s in range(degrees.pp)
            ),
            micro_batches=tuple(range(ids * p // degrees.dp, ids * (p + 1) // degrees.dp)),
        )
        for p in range(degrees.dp)
    )
    idle = total - degrees.devices
    left = f", {idle} idle" if idle else ""
    nodes = {device.node for group in groups for device in group}
    return Plan(
        pipelines=pipelines,
        reason=f"{degrees} is the fastest estimate on {total} usable devices{left}{split_words(request, degrees.pp)}",
        domains={node: domain for node, domain in sorted(request.domains.items()) if node in nodes},
    )
