"""The rig's machines as the cluster knows them: node names for host numbers, and trouble that is taken away again."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from deploy.local import LocalCluster, NodeSpec
from orchestrator.adapters.local_nodes import LocalNodes
from orchestrator.domain.ids import NodeId
from tests.tiny_job import TinyJob

from .rig import Rig


@dataclass(slots=True)
class Machines:
    rig: Rig
    cluster: LocalCluster
    job: TinyJob
    _cut: set[int] = field(default_factory=set)
    _deaf: set[tuple[int, int]] = field(default_factory=set)
    _slow: set[int] = field(default_factory=set)

    def host_of(self, node: str) -> int:
        """The number of the host a node runs on."""
        addresses = {self.rig.address(host): host for host in range(1, self.rig.hosts + 1)}
        return addresses[next(one.address for one in self.job.client.nodes() if one.id == node)]

    def living(self) -> list[str]:
        return [node.id for node in self.job.client.nodes() if node.status == "UP"]

    def all_train(self, within_s: float = 150) -> None:
        """There is a node on every host, what was troubled before is back, the job has all of them, and runs."""
        self.job.trains_where(lambda nodes: len(living := self.living()) == self.rig.hosts and nodes >= {*living}, within_s)

    def cut(self, host: int) -> None:
        self._cut.add(host)
        self.rig.cut(host)

    def join(self, host: int) -> None:
        self._cut.discard(host)
        self.rig.join(host)

    def deafen(self, host: int, to: int) -> None:
        self._deaf.add((host, to))
        self.rig.deafen(host, to)

    def slow(self, host: int, mbit: float) -> None:
        self._slow.add(host)
        self.rig.slow(host, mbit)

    def kill(self, node: str) -> None:
        """Every process of it, at once; its machine says so to whoever asks."""
        LocalNodes(self.cluster.state_dir).kill_now(NodeId(node))

    def start(self, host: int) -> str:
        """Another node on that host; it is seen to be up once this returns."""
        address, prefix = self.rig.address(host), self.rig.prefix(host)
        node = LocalNodes(self.cluster.state_dir).add_now(NodeSpec("A100", 2, address=address, prefix=prefix))
        self.until_status(node, "UP")
        return node

    def until_status(self, node: str, wanted: str, within_s: float = 90) -> None:
        deadline = time.monotonic() + within_s
        while {one.id: one.status for one in self.job.client.nodes()}.get(node) != wanted:
            assert time.monotonic() < deadline, f"{node} is not {wanted}: {self.job.client.nodes()}"
            time.sleep(0.05)

    def heal(self) -> None:
        for host in self._cut:
            self.rig.join(host)
        for host, to in self._deaf:
            self.rig.undeafen(host, to)
        for host in self._slow:
            self.rig.quicken(host)
        self._cut.clear()
        self._deaf.clear()
        self._slow.clear()
