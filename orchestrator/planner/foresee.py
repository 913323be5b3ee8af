"""A forecast: the plan a job would get on a cluster, by node, with its step time by cause and why the others lost."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from orchestrator.domain.foresight import Alternative, Forecast, NodeRow, PlanQuestion
from orchestrator.domain.ids import NodeId
from orchestrator.domain.kinds import table
from orchestrator.domain.plan import Infeasible, Plan
from orchestrator.domain.rows import words as row_words
from orchestrator.domain.spec import JobSpec

from .ask import NoPlan, Planned, Proposal
from .job import ask_of, freed, machines_of
from .machines import ClassKey, Machine, Machines
from .owning import with_shares, words
from .pipelines import Bench
from .placement import place
from .search import Benches, search
from .survival import survival
from .words import CAUSES, counted, listed, won_by

WORTH_SAYING = 0.02
"""Share of a step's time that another setting must save to be mentioned."""
MAX_LOSERS = 8


def foresee(question: PlanQuestion, uneven: bool = True) -> Forecast | Infeasible:
    """uneven: replicas may own unequal shares of the state."""
    cluster = machines_of(question.cluster)
    kinds = table(question.cluster.kinds)
    ask = replace(ask_of(question.spec, question.profile, cluster, kinds=kinds), uneven=uneven)
    benches = Benches()
    found = search(ask, benches)
    free = search(freed(ask, question.spec), benches)
    if isinstance(found, NoPlan):
        return Infeasible(reason=found.reason + _instead(free, question.spec), forever=found.forever)
    best = found.best
    plan = place(best, cluster, reason=won_by(best, found.tried, ask))
    if best.is_uneven:
        shared = _shared(plan, question, cluster)
        if shared is None:
            return foresee(question, uneven=False)
        plan = shared
    used = {machine.key.name for machine in cluster.nodes}
    measured = "".join(f"; {row_words(row)}" for row in question.cluster.kinds if row.is_corrected and row.name in used)
    return Forecast(
        shape=best.shape(),
        reason=plan.reason + measured,
        step_s=best.seconds,
        causes={name: getattr(best.breakdown, name) for name in CAUSES},
        bound_s=best.bound_s,
        devices=best.num_devices,
        idle=cluster.num_devices - best.num_devices,
        rows=_rows(plan, best, cluster, benches.of(ask, best.tp, best.batch.samples, best.recompute)),
        alternatives=(
            *(Alternative(shape=one.shape(), step_s=one.seconds, why=one.why) for one in found.proposals[1:]),
            *(_loser(words) for words in found.losers[:MAX_LOSERS]),
        ),
        survival=survival(plan, mirrors=question.spec.recovery.mirrors).words,
        advice=_advice(best, free, question.spec),
        pipelines=best.replicas,
        ids=tuple(sorted({ids for member in best.members for ids in member.ids}, reverse=True)),
    )


def _shared(plan: Plan, question: PlanQuestion, cluster: Machines) -> Plan | None:
    """With everybody's share of the state; None where it does not fit memory, placed as it is."""
    kinds = {device: machine.key.name for machine in cluster.nodes for device in machine.devices}
    speeds = {machine.node: machine.key.speed for machine in cluster.nodes}
    shared = with_shares(plan, question.spec, question.profile, kinds, speeds, table(question.cluster.kinds))
    return shared and replace(shared, reason=shared.reason + words(shared, kinds))


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
