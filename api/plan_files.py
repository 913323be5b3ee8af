"""What may be asked of a plan: a job, and a cluster that need not be there. Mirrors orchestrator.domain.foresight."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from orchestrator.domain.errors import FieldProblem, Refused
from orchestrator.domain.foresight import ClusterSketch, NodeSketch
from orchestrator.domain.kinds import GIB, KINDS, DeviceKind

from .schemas import JobFile, Name, Real, Request, Text, Whole

Rate = Annotated[Real, Field(gt=0, le=1e6)]
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


class KindSection(Request):
    """A kind of device that is not known, or other figures for one that is. Dense peaks, GB/s one way."""

    memory_gib: Annotated[Real, Field(gt=0, le=65_536)]
    bf16_tflops: Rate
    memory_gb_s: Rate
    link_gb_s: Rate = 32.0
    network_gb_s: Rate = 12.5


class ClusterFile(Request):
    nodes: Annotated[tuple[NodesSection, ...], Field(min_length=1, max_length=256)]
    kinds: Annotated[dict[Name, KindSection], Field(max_length=64)] = Field(default_factory=dict)

    def to_sketch(self) -> ClusterSketch:
        """Raises Refused for kinds nobody knows, and for more nodes than can be counted."""
        known = set(KINDS) | set(self.kinds)
        for number, nodes in enumerate(self.nodes):
            if nodes.kind not in known:
                allowed = ", ".join(sorted(known))
                said = f"nodes[{number}].kind {nodes.kind!r} is not known; use one of {allowed}, or describe it under kinds"
                problem = FieldProblem(field=f"nodes[{number}].kind", value=nodes.kind, message=said, allowed=allowed)
                raise Refused(said, (problem,))
        total = sum(nodes.count for nodes in self.nodes)
        if total > MAX_NODES:
            raise Refused(f"the cluster has {total} nodes, at most {MAX_NODES} are planned for; leave some out")
        kinds = tuple(
            DeviceKind(
                name=name,
                memory_bytes=int(kind.memory_gib * GIB),
                bf16_tflops=kind.bf16_tflops,
                memory_gb_s=kind.memory_gb_s,
                link_gb_s=kind.link_gb_s,
                network_gb_s=kind.network_gb_s,
            )
            for name, kind in sorted(self.kinds.items())
        )
        return ClusterSketch(nodes=tuple(NodeSketch(**nodes.model_dump()) for nodes in self.nodes), kinds=kinds)


class PlanRequest(Request):
    job: JobFile
    cluster: ClusterFile | None = None
    """None: the nodes that are there and may be used."""
