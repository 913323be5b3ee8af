"""On which devices a proposal runs: tp groups inside a node, replicas of a stage near each other, a pipeline's stages
far apart.

Replicas reduce whole gradients, neighbours pass activations, which are smaller: so the devices of one class are dealt
out stage by stage, the same stage of all pipelines first, in the order of failure domains and nodes. What shares a node
then is one stage of several pipelines; losing it breaks those pipelines in one place each, and leaves every layer whole
elsewhere.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

from orchestrator.domain.ids import Device, NodeId
from orchestrator.domain.plan import Pipeline, Plan, Stage

from .ask import Proposal
from .machines import ClassKey, Machine, Machines

Group = tuple[Device, ...]
Prefer = Callable[[Group], object]


def place(proposal: Proposal, machines: Machines, *, reason: str = "", prefer: Prefer = lambda group: 0) -> Plan:
    """prefer: groups of a class that sort lower by it are taken first; among equals, in order of domain and node."""
    waiting = _groups(proposal, machines, prefer)
    pipelines = [member.track for member in proposal.members for _ in member.ids]
    ids = [mine for member in proposal.members for mine in member.ids]
    deepest = max(track.depth for track in pipelines)
    seats: list[list[Group | None]] = [[None] * track.depth for track in pipelines]
    for stage in range(deepest):
        for number, track in enumerate(pipelines):
            if stage < track.depth:
                seats[number][stage] = next(waiting[proposal.keys[track.classes[stage]]])
    made, first = [], 0
    for number, track in enumerate(pipelines):
        stages = tuple(
            Stage(first=track.bounds[i], last=track.bounds[i + 1], devices=group)
            for i, group in enumerate(seats[number])
            if group is not None
        )
        made.append(Pipeline(stages=stages, micro_batches=tuple(range(first, first + ids[number]))))
        first += ids[number]
    return Plan(pipelines=tuple(made), reason=reason, domains=domains_of(machines, made))


def _groups(proposal: Proposal, machines: Machines, prefer: Prefer) -> dict[ClassKey, Iterator[Group]]:
    wanted = proposal.groups()
    found: dict[ClassKey, list[Group]] = defaultdict(list)
    for machine in machines.nodes:
        if wanted.get(machine.key):
            found[machine.key].extend(_cut(machine, proposal.tp))
    chosen: dict[ClassKey, Iterator[Group]] = {}
    for key, groups in found.items():
        # Stable: groups that are preferred alike stay in order of domain and node.
        best = sorted(range(len(groups)), key=lambda i: (prefer(groups[i]), i))[: wanted[key]]
        chosen[key] = iter([groups[i] for i in sorted(best)])
    return chosen


def _cut(machine: Machine, tp: int) -> Iterator[Group]:
    devices = machine.devices
    return (devices[i : i + tp] for i in range(0, len(devices) - tp + 1, tp))


def domains_of(machines: Machines, pipelines: Sequence[Pipeline]) -> dict[NodeId, str]:
    """The failure domain of each of their nodes that shares one."""
    used = {device.node for pipeline in pipelines for stage in pipeline.stages for device in stage.devices}
    return {
        machine.node: machine.domain
        for machine in sorted(machines.nodes, key=lambda machine: machine.node)
        if machine.node in used and not machine.domain.startswith("node=")
    }
