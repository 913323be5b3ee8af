"""A forecast: the plan a job would get on a cluster, by node, with its step time by cause and why the others lost."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from orchestrator.domain.effects import ChoosePlan
from orchestrator.domain.foresight import Alternative, Forecast, NodeRow, PlanQuestion
from orchestrator.domain.ids import Generation, JobId, NodeId
from orchestrator.domain.plan import Infeasible, Plan
from orchestrator.domain.spec import JobSpec

from .afterwards import current_of
from .ask import Ask, NoPlan, Planned, Proposal
from .choose import decide
from .job import ask_of, freed, machines_of
from .machines import ClassKey, Machine, Machines
from .pipelines import Bench
from .search import Benches, bound_s, search
from .searched import corrected_words
from .survival import survival
from .words import CAUSES, counted, listed, lost_by

WORTH_SAYING = 0.02
"""Share of a step's time that another setting must save to be mentioned."""
MAX_LOSERS = 8
ALIKE = "devices count as alike where train.device is cpu and train.emulated_layer_s is 0, and such jobs get even pipelines"
AS_CUDA = "set train.device to cuda, as is assumed here: with cpu all devices count as alike, and processors compute"


def foresee(question: PlanQuestion) -> Forecast | Infeasible:
    """The plan that `choose` gives a job that asks for just these devices, priced."""
    cluster = machines_of(question.cluster)
    request = request_of(question, cluster)
    spec = request.spec
    benches = Benches()
    choice = decide(request, machines=cluster)
    whole = ask_of(spec, question.profile, cluster, kinds=request.table)
    free = search(freed(whole, spec), benches)
    if isinstance(choice, Infeasible):
        return replace(choice, reason=choice.reason + _instead(free, spec))
    ask = choice.ask or whole
    found = choice.found or search(ask, benches)
    if choice.found is not None:
        best = choice.found.best
        others = [(one, one.why) for one in choice.found.proposals[1:]]
    else:
        best = _priced(choice.plan, ask, benches)
        others = _not_taken(best, found)
    losers = found.losers if isinstance(found, Planned) else ()
    return Forecast(
        shape=best.shape(),
        reason=choice.plan.reason + ("" if choice.found else corrected_words(request)),
        step_s=best.seconds,
        causes={name: getattr(best.breakdown, name) for name in CAUSES},
        bound_s=best.bound_s,
        devices=best.num_devices,
        idle=cluster.num_devices - best.num_devices,
        rows=_rows(choice.plan, best, cluster, benches.of(ask, best.tp, best.batch.samples, best.recompute)),
        alternatives=(
            *(Alternative(shape=one.shape(), step_s=one.seconds, why=why) for one, why in others),
            *(_loser(words) for words in losers[:MAX_LOSERS]),
        ),
        survival=survival(choice.plan, mirrors=spec.recovery.mirrors).words,
        advice=(*_advice(best, free, spec), *([AS_CUDA] if spec != question.spec else [])),
        pipelines=best.replicas,
        ids=tuple(sorted({ids for member in best.members for ids in member.ids}, reverse=True)),
    )


def request_of(question: PlanQuestion, cluster: Machines) -> ChoosePlan:
    """What the kernel would ask for a new job on these devices.

    A cluster that is not here is what it says: what it has of other kinds than processors runs jobs of train.device cuda.
    """
    spec = question.spec
    is_real = not question.cluster.is_here and any(machine.key.name != "cpu" for machine in cluster.nodes)
    if is_real and spec.train.device == "cpu" and not spec.train.emulated_layer_s:
        spec = replace(spec, train=replace(spec.train, device="cuda"))
    return ChoosePlan(
        job=JobId(spec.name),
        generation=Generation(1),
        spec=spec,
        profile=question.profile,
        devices=tuple((device, machine.key.name) for machine in cluster.nodes for device in machine.devices),
        domains={one.node: one.domain for one in cluster.nodes if not one.domain.startswith("node=")},
        speeds={one.node: one.key.speed for one in cluster.nodes if one.key.speed != 1.0},
        rows=question.cluster.kinds,
    )


def _priced(plan: Plan, ask: Ask, benches: Benches) -> Proposal:
    """A plan that the search has not made, as if it had."""
    current = current_of(plan, ask.machines, ask, benches)
    assert current is not None, "it is a plan on these machines"
    return replace(current.proposal, bound_s=bound_s(ask))


def _not_taken(best: Proposal, found: Planned | NoPlan) -> list[tuple[Proposal, str]]:
    """What the search would run, beside a rectangular plan."""
    if isinstance(found, NoPlan):
        return []
    said = []
    for one in found.proposals:
        gain = 1 - one.seconds / best.seconds
        if one.shape() == best.shape() and gain < WORTH_SAYING:
            continue
        said.append((one, f"{gain:.1%} less by these prices; {ALIKE}" if gain > 0 else lost_by(one, best)))
    return said


def _loser(said: str) -> Alternative:
    shape, _, why = said.partition(": ")
    return Alternative(shape=shape, step_s=None, why=why)


def _instead(free: Planned | NoPlan, spec: JobSpec) -> str:
    if isinstance(free, NoPlan) or not (changes := _changes(free.best, spec)):
        return ""
    return f"; or set {changes}, which takes {free.best.seconds:.3g} s a step"


def _advice(best: Proposal, free: Planned | NoPlan, spec: JobSpec) -> tuple[str, ...]:
    if isinstance(free, NoPlan) or free.best.seconds > best.seconds * (1 - WORTH_SAYING):
        return ()
    saved = 1 - free.best.seconds / best.seconds
    takes = f"{free.best.seconds:.3g} s a step, {saved:.0%} less, as {free.best.shape()}"
    return (f"{_changes(free.best, spec)} would take {takes}",)


def _changes(best: Proposal, spec: JobSpec) -> str:
    """`train.micro_batch_size 4 and train.micro_batches 32`: of the job's settings, those that are others then."""
    batch, train = best.batch, spec.train
    said = []
    if batch.samples != train.micro_batch_size:
        said += [f"train.micro_batch_size {batch.samples}", f"train.micro_batches {batch.micro_batches}"]
    if best.recompute is not train.activation_checkpointing:
        said.append(f"train.activation_checkpointing {'true' if best.recompute else 'false'}")
    return listed(said) if said else ""


# --- by node -------------------------------------------------------------------------------------------------------------


def _rows(plan: Plan, best: Proposal, cluster: Machines, bench: Bench) -> tuple[NodeRow, ...]:
    """Nodes alike that hold the same stages are one row, also where one has a micro-batch more than another."""
    work: dict[NodeId, dict[_Role, None]] = defaultdict(dict)
    used: dict[NodeId, int] = defaultdict(int)
    held: dict[NodeId, float] = defaultdict(float)
    ids: dict[tuple[ClassKey, _Role], set[int]] = defaultdict(set)
    keys = {machine.node: machine.key for machine in cluster.nodes}
    for pipeline, sizes in zip(plan.pipelines, _held(best, bench), strict=True):
        for number, (stage, size) in enumerate(zip(pipeline.stages, sizes, strict=True)):
            node, role = stage.devices[0].node, (number + 1, len(pipeline.stages), stage.first, stage.last)
            work[node][role] = None
            used[node] += len(stage.devices)
            held[node] = max(held[node], size)
            ids[keys[node], role].add(len(pipeline.micro_batches))
    alike: dict[tuple[ClassKey, int, tuple[_Role, ...]], list[Machine]] = defaultdict(list)
    for machine in cluster.nodes:
        alike[machine.key, used[machine.node], tuple(sorted(work.get(machine.node, ())))].append(machine)
    made = []
    for (key, number, roles), mine in alike.items():
        health = f", at {key.speed:.0%} of what its kind does" if key.speed != 1.0 else ""
        said = tuple(f"{_role_words(role, ids[key, role])}{health}" for role in roles) or ("idle",)
        made.append(_row(mine, number, said, max(held[machine.node] for machine in mine)))
    return tuple(made)


_Role = tuple[int, int, int, int]
"""Which stage of how many, its first layer, and the one after its last."""


def _role_words(role: _Role, ids: set[int]) -> str:
    """`stage 1 of 4: layers 0-20, 16 to 17 micro-batches`."""
    stage, depth, first, last = role
    few, many = min(ids), max(ids)
    number = counted(many, "micro-batch", "micro-batches") if few == many else f"{few:,} to {many:,} micro-batches"
    return f"stage {stage} of {depth}: layers {first}-{last - 1}, {number}"


def _held(best: Proposal, bench: Bench) -> Iterator[list[float]]:
    """Bytes of a device of each stage, by pipeline. Where shares are not alike, those of its kind's fullest device."""
    for member in best.members:
        stages = range(member.track.depth)
        if best.is_uneven:
            mine = [best.memory[bench.classes[index].kind.name][0] for index in member.track.classes]
        else:
            mine = [bench.bytes_of(member.track, stage, member.ids[0], best.replicas) for stage in stages]
        yield from (mine for _ in member.ids)


def _row(mine: list[Machine], used: int, work: tuple[str, ...], held: float) -> NodeRow:
    key = mine[0].key
    return NodeRow(
        kind=key.name,
        nodes=len(mine),
        first=mine[0].node,
        last=mine[-1].node,
        devices=len(mine[0].devices),
        used=used,
        work=work,
        memory_bytes=held,
        memory_limit_bytes=float(key.memory_bytes),
    )
