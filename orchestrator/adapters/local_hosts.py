"""The cluster's in-memory twin: nodes are entries in a table, hosts live in this process, ranks are real processes.

For tests and benchmarks of everything but Ray; what a host does is not faked.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Mapping
from dataclasses import replace

from orchestrator.domain.admission import Checked
from orchestrator.domain.cluster import Node, NodeStatus
from orchestrator.domain.errors import NotFound, StaleTerm
from orchestrator.domain.host_events import Envelope
from orchestrator.domain.ids import EffectId, JobId, NodeId, Term
from orchestrator.domain.memo import Kept
from orchestrator.domain.requests import CloseHost, HostMessage, OpenHost
from orchestrator.ports import HostGone
from worker.host import Host
from worker.nodecheck import CheckOrder

from .checking import run_check


class LocalHosts:
    """ports.Cluster and ports.NodeProvider."""

    def __init__(self, nodes: tuple[Node, ...]) -> None:
        self._nodes = {node.id: node for node in nodes}
        self._hosts: dict[tuple[JobId, NodeId], Host] = {}
        self._added = 0
        self._ending: list[asyncio.Future[None]] = []

    async def nodes(self) -> tuple[Node, ...]:
        return tuple(self._nodes[node] for node in sorted(self._nodes))

    async def hosts(self) -> tuple[tuple[JobId, NodeId], ...]:
        return tuple(sorted(self._hosts))

    async def ask(self, job: JobId, node: NodeId) -> Kept:
        host = self._hosts.get((job, node))
        if host is None or self._nodes[node].status is NodeStatus.LOST:
            raise HostGone(f"there is no host of {job} on {node}")
        return host.kept().of(job, node)

    async def call(
        self, job: JobId, node: NodeId, term: Term, effect: EffectId, request: HostMessage, memo: str = ""
    ) -> None:
        host = self._hosts.get((job, node))
        if host is None and isinstance(request, CloseHost):
            return
        if self._nodes[node].status is NodeStatus.LOST:
            raise HostGone(f"{node} was killed")
        if host is None:
            if not isinstance(request, OpenHost):
                raise HostGone(f"there is no host of {job} on {node}")
            host = self._hosts[job, node] = Host(end=lambda: self._end(job, node))
        await host.handle(term, effect, request, memo)
        if isinstance(request, CloseHost):
            self._hosts.pop((job, node), None)

    async def poll(
        self, job: JobId, node: NodeId, term: Term, after: int, acked: int, wait_s: float, memo: str = ""
    ) -> tuple[Envelope, ...]:
        host = self._hosts.get((job, node))
        if host is None or self._nodes[node].status is NodeStatus.LOST:
            raise HostGone(f"there is no host of {job} on {node}")
        try:
            envelopes, _ = await host.poll(term, after, wait_s, acked, memo)
        except StaleTerm:
            if self._is_there(job, node, host):
                raise
        if not self._is_there(job, node, host):  # it was closed under the highest term that there is
            raise HostGone(f"the host of {job} on {node} was killed")
        return envelopes

    def _is_there(self, job: JobId, node: NodeId, host: Host) -> bool:
        return self._nodes[node].status is not NodeStatus.LOST and self._hosts.get((job, node)) is host

    async def add(self, kind: str, num_devices: int, labels: Mapping[str, str] | None = None) -> NodeId:
        self._added += 1
        node = NodeId(f"added-{self._added}")
        self._nodes[node] = Node(id=node, kind=kind, num_devices=num_devices, labels=dict(labels or {}))
        return node

    async def kill(self, node: NodeId) -> None:
        if node not in self._nodes:
            raise NotFound(f"node {node} does not exist")
        self._nodes[node] = replace(self._nodes[node], status=NodeStatus.LOST)
        for (job, at), host in list(self._hosts.items()):
            if at == node:
                del self._hosts[job, at]
                await host.handle(Term(1 << 62), EffectId("killed"), CloseHost())

    async def check(self, node: NodeId, peer: NodeId | None) -> Checked:
        with tempfile.TemporaryDirectory() as folder:
            order = CheckOrder(num_devices=self._nodes[node].num_devices, folder=folder)
            return await run_check(order, (), os.environ)

    def _end(self, job: JobId, node: NodeId) -> None:
        """A host dies on purpose: its ranks die with it, and nothing more is heard of it."""
        host = self._hosts.pop((job, node), None)
        if host is not None:
            self._ending.append(asyncio.ensure_future(host.handle(Term(1 << 62), EffectId("ended"), CloseHost())))

    async def close(self) -> None:
        await asyncio.gather(*self._ending)
        for host in self._hosts.values():
            await host.handle(Term(1 << 62), EffectId("closed"), CloseHost())
        self._hosts.clear()
