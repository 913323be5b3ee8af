"""What may be asked of a plan: a job, and a cluster that need not be there. Mirrors orchestrator.domain.foresight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from orchestrator.domain.errors import FieldProblem, Refused
from orchestrator.domain.foresight import ClusterSketch, NodeSketch
from orchestrator.domain.kinds import KINDS, DeviceKind

from .kind_rows import KindSection, Rate, rows
from .refusals import did_you_mean
from .schemas import JobFile, Name, Real, Request, Text, Whole

MAX_NODES = 65_536


class NodesSection(Request):
    kind: Text
    count: Annotated[Whole, Field(ge=1, le=MAX_NODES)] = 1
    devices: Annotated[Whole, Field(ge=1, le=64)] = 8
    name: Annotated[str, Field(max_length=63)] = ""
    network_gb_s: Rate | None = None
    link_gb_s: Rate | None = None
    speed: Annotated[Real, Field(ge=0.05, le=2)] = 1.0
    domain: Annotated[str, Field(max_length=127)] = ""
    domain_nodes: Annotated[Whole, Field(ge=0, le=MAX_NODES)] = 0


class ClusterFile(Request):
    nodes: Annotated[tuple[NodesSection, ...], Field(min_length=1, max_length=256)]
    kinds: Annotated[dict[Name, KindSection], Field(max_length=64)] = Field(default_factory=dict)

    def to_sketch(self, configured: Sequence[DeviceKind] = ()) -> ClusterSketch:
        """configured: kinds that need not be described again. Raises Refused for kinds nobody knows, and for more nodes
        than can be counted."""
        known = set(KINDS) | set(self.kinds) | {kind.name for kind in configured}
        for number, nodes in enumerate(self.nodes):
            if nodes.kind not in known:
                allowed = ", ".join(sorted(known))
                near = did_you_mean(nodes.kind, known) or did_you_mean(nodes.kind.upper(), known)
                remedy = f"use one of {allowed}, or describe it under kinds"
                said = f"nodes[{number}].kind {nodes.kind!r} is not known{near or ';'} {remedy}"
                problem = FieldProblem(field=f"nodes[{number}].kind", value=nodes.kind, message=said, allowed=allowed)
                raise Refused(said, (problem,))
        total = sum(nodes.count for nodes in self.nodes)
        if total > MAX_NODES:
            raise Refused(f"the cluster has {total} nodes, at most {MAX_NODES} are planned for; leave some out")
        described = {kind.name: kind for kind in (*configured, *rows(self.kinds, "the cluster's file"))}
        sketches = tuple(NodeSketch(**nodes.model_dump()) for nodes in self.nodes)
        return ClusterSketch(nodes=sketches, kinds=tuple(described.values()))


class PlanRequest(Request):
    job: JobFile
    cluster: ClusterFile | None = None
    """None: the nodes that are there and may be used."""
