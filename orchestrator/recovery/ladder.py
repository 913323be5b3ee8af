"""Which way out of a fault: every rung is priced in seconds of training, and the cheapest possible one is taken.

    price = expected pause + time until full strength x share of throughput that is missing + steps to run again

Phases are expected to take what they took in this job's earlier incidents (medians; preparing, in those of the same rung),
and the defaults below where there were none. It knows nothing of hosts and requests; it never plans: how fast the job would
be after each rung it is told, or judges by the number of devices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from orchestrator.domain.ids import Device, NodeId, Step
from orchestrator.domain.incident import Incident
from orchestrator.domain.layout import partners
from orchestrator.domain.plan import Infeasible, Pipeline, Plan
from orchestrator.domain.profile import Profile
from orchestrator.domain.rungs import Option, Rung
from orchestrator.domain.spec import JobSpec

HORIZON_S = 600.0
"""How long a lost node is expected to be missing where nothing that is idle could replace it."""
OPEN_S = 8.0
"""A host from nothing to warm."""
DEFAULTS = {"settle": 0.03, "deliver": 0.01, "form": 0.02, "build": 0.01, "gather": 0.01, "first_step": 0.05}
"""Seconds, measured with eight ranks on two cores."""
PREPARE_S = {
    Rung.FORK: 0.02,
    Rung.SPARE: 0.0,
    Rung.REPLAN_WARM: 0.1,
    Rung.REPLAN_ALL: OPEN_S,
}
"""Between settling and forming: forks and planning happen meanwhile, and are seen here as far as they take longer."""
MEMORY_BYTES_S = 1e9
STORE_BYTES_S = 5e8
STATE_BYTES = 12
"""Per element: master weight and two moments, fp32."""
REMEMBERED = 20
"""Incidents whose phases count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What is known when a way out is chosen.

    plan: to go on with where that is possible. holders: the plan that gave the ranks what they hold, where all had got
    it. lost: devices whose process is gone or given up; missing: members of `plan` that cannot be used again.
    elapsed_s: since the fault. usable: devices the job could have; warm: those on hosts that can fork at once. spares:
    those that stand by, per node, with the failure domains of their nodes.
    """

    plan: Plan
    lost: frozenset[Device]
    missing: frozenset[Device]
    usable: frozenset[Device]
    warm: frozenset[Device]
    spec: JobSpec
    profile: Profile
    holders: Plan | None = None
    elapsed_s: float = 0.0
    spares: Mapping[NodeId, tuple[Device, ...]] = field(default_factory=dict)
    domains: Mapping[NodeId, str] = field(default_factory=dict)
    step_s: float | None = None
    committed: Step = Step(0)
    checkpoint: Step = Step(0)
    """0: the seed."""
    incidents: Sequence[Incident] = ()
    strength: Mapping[Rung, float | None] = field(default_factory=dict)
    """Steps a second after a rung, over those of `plan`, as the planner has it; None where it has no plan there."""


def substitute(
    plan: Plan,
    lost: frozenset[Device],
    spares: Mapping[NodeId, tuple[Device, ...]],
    domains: Mapping[NodeId, str] | None = None,
) -> Plan | Infeasible:
    """The same plan with spare devices in the places of the lost ones; nobody else moves.

    What one node loses goes to one spare node, because a tp group never leaves its node; a group that loses one device
    goes whole. A spare of the lost node's failure domain comes first.
    """
    places = {
        group: group[0].node
        for pipeline in plan.pipelines
        for stage in pipeline.stages
        if lost & set(group := stage.devices)
    }
    free = {node: list(devices) for node, devices in sorted(spares.items())}
    taken: dict[Device, Device] = {}
    for node, need in sorted(Counter(d.node for group in places for d in group).items(), key=lambda n: (-n[1], n[0])):
        home = plan.domains.get(node)
        fits = [spare for spare in free if len(free[spare]) >= need]
        if not fits:
            most = max((len(devices) for devices in free.values()), default=0)
            has = f"the largest spare has {most} left" if most else "no spare is left"
            return Infeasible(reason=f"{node} needs {need} devices on one node, {has}")
        spare = min(fits, key=lambda n: ((domains or {}).get(n) != home, len(free[n]), n))
        moved = [device for group, at in places.items() if at == node for device in group]
        taken.update(zip(moved, free[spare], strict=False))
        free[spare] = free[spare][need:]
    named = {old.node: new.node for old, new in taken.items()}
    here = {**plan.domains, **{node: (domains or {}).get(node, "") for node in named.values()}}
    changed = replace(plan, pipelines=tuple(_reseated(pipeline, taken) for pipeline in plan.pipelines))
    places_taken = ", ".join(f"{new} takes the place of {old}" for old, new in sorted(named.items()))
    return replace(
        changed,
        reason=f"same plan, {places_taken}: {plan.describe()}",
        domains={node: here[node] for node in sorted(changed.nodes) if here.get(node)},
    )


def options(seen: Situation) -> tuple[Option, ...]:
    """Every rung, the cheapest first, the impossible ones last."""
    placed: tuple[Option, ...] = (_fork(seen), _spare(seen), _replan_warm(seen), _replan_all(seen))
    homeless = _homeless(seen)
    if homeless:
        fallback = _from_checkpoint(seen, placed)
        placed = tuple(
            replace(option, price_s=None, pause_s=None, phases={}, why=homeless) if option.is_possible else option
            for option in placed
        )
    else:
        fallback = Option(rung=Rung.CHECKPOINT, why="memory holds every interval")
    wait = Option(
        rung=Rung.WAIT,
        why=f"nothing trains until a node comes, {HORIZON_S:.0f} s at a guess",
        pause_s=HORIZON_S,
        price_s=HORIZON_S,
        phases={"prepare": HORIZON_S},
    )
    # Where prices are equal the order above decides: sorting is stable.
    return tuple(sorted((*placed, fallback, wait), key=lambda o: o.price_s if o.price_s is not None else float("inf")))


# --- rungs ---------------------------------------------------------------------------------------------------------------


def _fork(seen: Situation) -> Option:
    if seen.missing:
        gone = ", ".join(sorted({device.node for device in seen.missing}))
        return Option(rung=Rung.FORK, why=f"{gone} cannot be used again")
    names = ", ".join(map(str, sorted(seen.lost)))
    why = (
        f"{names} forked again, everybody else stays" if names else "nobody is known to be gone: the same ranks form again"
    )
    return _priced(seen, Rung.FORK, len(seen.lost), 0.0, 0.0, why)


def _spare(seen: Situation) -> Option:
    if not seen.missing:
        return Option(rung=Rung.SPARE, why="no node is missing")
    found = substitute(seen.plan, seen.missing, seen.spares, seen.domains)
    if isinstance(found, Infeasible):
        return Option(rung=Rung.SPARE, why=found.reason)
    taking = ", ".join(sorted(set(found.nodes) - set(seen.plan.nodes)))
    share = _missing_share(seen, Rung.SPARE, seen.plan.world_size)
    why = f"{taking} stands by and takes over{f', {share:.0%} slower' if share else ''}"
    return _priced(seen, Rung.SPARE, len(seen.missing | seen.lost), HORIZON_S, share, why)


def _replan_warm(seen: Situation) -> Option:
    short = _too_few(seen, len(seen.warm), "are warm")
    if short:
        return Option(rung=Rung.REPLAN_WARM, why=short)
    # Where idle devices make up for what is lost, the job grows onto them as soon as their hosts are warm.
    can_grow = len(seen.usable) >= seen.plan.world_size
    slow_s = _open_s(seen) if can_grow else HORIZON_S
    if seen.strength.get(Rung.REPLAN_WARM, 1.0) is None:
        return Option(rung=Rung.REPLAN_WARM, why=f"no plan fits the {len(seen.warm)} warm devices")
    share = _missing_share(seen, Rung.REPLAN_WARM, len(seen.warm))
    at = f"{len(seen.warm)} of {seen.plan.world_size} devices"
    until = "until others are warm" if can_grow else "until a node comes"
    why = f"{at}, {share:.0%} slower {until}" if share else f"{len(seen.warm)} warm devices, planned anew"
    return _priced(seen, Rung.REPLAN_WARM, seen.plan.world_size, slow_s, share, why)


def _replan_all(seen: Situation) -> Option:
    cold = seen.usable - seen.warm
    if not cold:
        return Option(rung=Rung.REPLAN_ALL, why="every usable device is warm already")
    short = _too_few(seen, len(seen.usable), "are usable")
    if short:
        return Option(rung=Rung.REPLAN_ALL, why=short)
    if seen.strength.get(Rung.REPLAN_ALL, 1.0) is None:
        return Option(rung=Rung.REPLAN_ALL, why=f"no plan fits the {len(seen.usable)} usable devices")
    share = _missing_share(seen, Rung.REPLAN_ALL, len(seen.usable))
    hosts = ", ".join(sorted({device.node for device in cold}))
    why = (
        f"all {len(seen.usable)} usable devices, but {hosts} must be opened first{f', {share:.0%} slower' if share else ''}"
    )
    return _priced(seen, Rung.REPLAN_ALL, seen.plan.world_size, HORIZON_S, share, why)


def _from_checkpoint(seen: Situation, placed: Sequence[Option]) -> Option:
    """The cheapest place, filled from the store."""
    place = min((o for o in placed if o.price_s is not None), key=lambda o: o.price_s or 0.0, default=None)
    if place is None or place.price_s is None or place.pause_s is None:
        return Option(rung=Rung.CHECKPOINT, why="there is no place to restore it to")
    again = max(0, seen.committed - seen.checkpoint)
    load_s = _state_bytes(seen, seen.plan.world_size) / STORE_BYTES_S
    phases = {**place.phases, "transfer": load_s}
    longer = load_s - place.phases.get("transfer", 0.0)
    origin = f"the checkpoint of step {seen.checkpoint}" if seen.checkpoint else "the seed"
    return Option(
        rung=Rung.CHECKPOINT,
        why=f"{_homeless(seen)}; {origin}, {again} steps run again ({place.rung.value.replace('_', ' ')})",
        pause_s=place.pause_s + longer,
        price_s=place.price_s + longer + again * (seen.step_s or 0.0),
        phases=phases,
        place=place.rung,
    )


def _priced(seen: Situation, rung: Rung, filled: int, slow_s: float, share: float, why: str) -> Option:
    """filled: devices whose state has to be moved; share of throughput missing for slow_s."""
    phases = {"detect": seen.elapsed_s, **_phases(seen, rung)}
    phases["transfer"] = _state_bytes(seen, filled) / _bandwidth(seen)
    pause = sum(phases.values())
    return Option(rung=rung, why=why, pause_s=pause, price_s=pause + slow_s * share, phases=phases)


# --- what is expected ----------------------------------------------------------------------------------------------------


def _phases(seen: Situation, rung: Rung) -> dict[str, float]:
    known = [one for one in seen.incidents if one.pause_s is not None and one.attempts == 1][-REMEMBERED:]
    alike = [one for one in known if one.rung is rung]

    def expected(name: str, default: float, rows: Sequence[Incident]) -> float:
        return median([one.phases[name] for one in rows if name in one.phases] or [default])

    # Rungs differ in how the next generation is prepared and in what is moved; the rest is the same for all.
    found = {name: expected(name, default, known) for name, default in DEFAULTS.items()}
    found["prepare"] = expected("prepare", PREPARE_S[rung], alike)
    if rung is Rung.REPLAN_WARM and not seen.missing:
        # What died on a host that lives is forked again for another plan, too.
        forked = [one for one in known if one.rung is Rung.FORK]
        found["prepare"] = max(found["prepare"], expected("prepare", PREPARE_S[Rung.FORK], forked))
    return found


def _open_s(seen: Situation) -> float:
    return _phases(seen, Rung.REPLAN_ALL)["prepare"]


def _bandwidth(seen: Situation) -> float:
    """Bytes per second of earlier transfers between memories."""
    rows = [one for one in seen.incidents[-REMEMBERED:] if one.moved_elements and one.phases.get("transfer")]
    return median([one.moved_elements * STATE_BYTES / one.phases["transfer"] for one in rows] or [MEMORY_BYTES_S])


def _state_bytes(seen: Situation, filled: int) -> float:
    """What `filled` of the plan's devices hold, mirrored intervals included."""
    mirrored = 1 + seen.spec.recovery.mirrors
    return seen.profile.num_params * STATE_BYTES * mirrored * filled / seen.plan.world_size


def _missing_share(seen: Situation, rung: Rung, devices: int) -> float:
    """Of throughput, after a rung that leaves so many devices."""
    strength = seen.strength.get(rung)
    return max(0.0, 1.0 - (devices / seen.plan.world_size if strength is None else strength))


def _too_few(seen: Situation, have: int, are: str) -> str:
    wanted = seen.spec.parallel
    least = max(1, wanted.min_devices, (wanted.tp or 1) * (wanted.pp or 1) * (wanted.dp or 1))
    return f"needs {least} devices, {have} {are}" if have < least else ""


def _homeless(seen: Situation) -> str:
    """Why memory is not enough, or nothing: an owner is lost, and so is its mirror."""
    if seen.holders is None:
        return ""
    mirror = partners(seen.holders) if seen.spec.recovery.mirrors else {}
    lost = [device for device in seen.holders.devices if device in seen.lost and mirror.get(device, device) in seen.lost]
    if not lost:
        return ""
    held = "its mirror" if seen.spec.recovery.mirrors else "there are no mirrors"
    return f"{lost[0]} is lost and {held}{' too' if seen.spec.recovery.mirrors else ''}"


def _reseated(pipeline: Pipeline, taken: Mapping[Device, Device]) -> Pipeline:
    return replace(
        pipeline,
        stages=tuple(
            replace(stage, devices=tuple(taken.get(device, device) for device in stage.devices))
            for stage in pipeline.stages
        ),
    )
