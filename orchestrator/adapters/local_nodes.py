"""Emulated nodes on this machine: each a raylet and whatever runs below it, under one mark in the environment.

A registry under the state directory says which there are and which process each is, so that any process can look after
them. Killing a node ends every process that bears its mark, in whatever session: raylet, host, zygote and ranks.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from orchestrator.domain import codec
from orchestrator.domain.errors import EverstepError, NotFound, Unavailable
from orchestrator.domain.ids import NodeId

from . import ray_environment, ray_node
from .embedded_redis import free_port
from .processes import ProcessId, end, exclusively, marked, write_private
from .ray_environment import CLUSTER_MARK, NODE_MARK
from .ray_node import HEAD, NodeOrder, Order

LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
"""What Ray takes for a label's name and value."""
START_S = 60.0
_KILL_S = 5.0


@dataclass(frozen=True, slots=True)
class NodeSpec:
    kind: str
    num_devices: int
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownNode:
    kind: str
    num_devices: int
    raylet: ProcessId
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Registry:
    """address: of the GCS. made: how many nodes of each kind there ever were; names are not used twice."""

    address: str = ""
    head: Mapping[str, ProcessId] = field(default_factory=dict)
    nodes: Mapping[NodeId, KnownNode] = field(default_factory=dict)
    made: Mapping[str, int] = field(default_factory=dict)


class LocalNodes:
    """Blocking methods are for a start and a stop; `add` and `kill` are the NodeProvider's."""

    def __init__(self, state_dir: Path) -> None:
        self.environment = ray_environment.for_state_dir(state_dir)
        self._path = state_dir.resolve() / "nodes.json"
        self._lock = state_dir.resolve() / "nodes.lock"

    # --- a cluster's life -------------------------------------------------------------------------------------------------

    def start(self, specs: Sequence[NodeSpec]) -> str:
        """The head and one node per spec, together; the GCS's address. Raises Unavailable, with Ray's last words."""
        ray_environment.prepare(self.environment)
        port = free_port()
        registry = Registry(address=f"127.0.0.1:{port}")
        self._launch(registry, specs, head_port=port)
        return registry.address

    def stop(self) -> None:
        """Every process under this cluster's mark that bears a node's mark too, and what Ray wrote. Idempotent."""
        deadline = time.monotonic() + _KILL_S
        # A process can fork while it is looked for, but not after it was killed.
        while found := self._processes():
            end(found, grace_s=0)
            if time.monotonic() > deadline:
                raise Unavailable(f"processes {[process.pid for process in found]} do not end; look at what blocks them")
        self._path.unlink(missing_ok=True)
        shutil.rmtree(self.environment.temp_dir, ignore_errors=True)

    def registry(self) -> Registry:
        try:
            return codec.loads(Registry, self._path.read_text())
        except FileNotFoundError:
            return Registry()

    def is_alive(self, node: NodeId) -> bool | None:
        """None where this provider does not know the node."""
        known = self.registry().nodes.get(node)
        return None if known is None else known.raylet.is_alive

    # --- NodeProvider -----------------------------------------------------------------------------------------------------

    async def add(self, kind: str, num_devices: int, labels: Mapping[str, str] | None = None) -> NodeId:
        return (await asyncio.to_thread(self._add, NodeSpec(kind, num_devices, labels or {})))[0]

    async def kill(self, node: NodeId) -> None:
        await asyncio.to_thread(self.kill_now, node)

    def kill_now(self, node: NodeId) -> None:
        if node not in self.registry().nodes:
            raise NotFound(f"there is no node {node}; list the nodes to see what there is")
        deadline = time.monotonic() + _KILL_S
        while found := self._processes(node):
            end(found, grace_s=0)
            if time.monotonic() > deadline:
                raise Unavailable(f"processes {[process.pid for process in found]} of node {node} do not end")

    # ----------------------------------------------------------------------------------------------------------------------

    def _add(self, spec: NodeSpec) -> Sequence[NodeId]:
        registry = self.registry()
        if not registry.address:
            raise Unavailable("no local cluster runs from this state directory; start it first")
        return self._launch(registry, [spec], head_port=None)

    def _launch(self, registry: Registry, specs: Sequence[NodeSpec], head_port: int | None) -> Sequence[NodeId]:
        with exclusively(self._lock):
            if head_port is None:
                registry = self.registry()
            made, orders = dict(registry.made), []
            for spec in specs:
                made[spec.kind] = made.get(spec.kind, 0) + 1
                name = f"{re.sub('[^a-z0-9]+', '-', spec.kind.lower())}-{made[spec.kind]}"
                orders.append(NodeOrder(name=name, kind=spec.kind, num_devices=spec.num_devices, labels=spec.labels))
            order = Order(
                address=registry.address,
                temp_dir=str(self.environment.temp_dir),
                head_port=head_port,
                nodes=tuple(orders),
            )
            started = self._run(order)
            nodes = {
                NodeId(one.name): KnownNode(
                    kind=one.kind, num_devices=one.num_devices, raylet=started[one.name], labels=one.labels
                )
                for one in orders
            }
            head = {name: started[name] for name in ("gcs", HEAD) if name in started}
            registry = replace(registry, head={**registry.head, **head}, nodes={**registry.nodes, **nodes}, made=made)
            write_private(self._path, codec.dumps(registry).decode())
        return list(nodes)

    def _run(self, order: Order) -> dict[str, ProcessId]:
        command = [sys.executable, "-m", ray_node.__name__]
        # Everything it starts gets the cluster's mark; raylets and what is below them get their node's as well.
        env = self.environment.variables(os.environ, node=HEAD)
        try:
            done = subprocess.run(
                command,
                input=codec.dumps(order).decode(),
                capture_output=True,
                text=True,
                timeout=START_S,
                env=env,
                start_new_session=True,
            )
        except subprocess.TimeoutExpired as error:
            raise Unavailable(
                f"Ray's processes did not register within {START_S:g} s; is this machine overloaded?"
            ) from error
        if done.returncode != 0:
            words = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
            raise Unavailable(f"Ray's processes could not be started: {words}")
        return {name: ProcessId(**one) for name, one in json.loads(done.stdout).items()}

    def _processes(self, node: NodeId | None = None) -> tuple[ProcessId, ...]:
        return marked({CLUSTER_MARK: self.environment.cluster, NODE_MARK: node})


def parse_nodes(text: str) -> tuple[NodeSpec, ...]:
    """`A100:2@r1,H100:2@rack=r2+switch=s1`: kind, number of devices and labels of each node. Raises EverstepError.

    A label without a name is the rack.
    """
    specs = []
    for part in text.split(","):
        size, at, labels = part.strip().partition("@")
        kind, _, count = size.partition(":")
        if not kind or not (count or "1").isdigit() or not int(count or "1"):
            raise EverstepError(f"{part!r} is not KIND:DEVICES; write A100:2,H100:2, for example")
        specs.append(NodeSpec(kind, int(count or "1"), _labels(part, labels) if at else {}))
    return tuple(specs)


def _labels(part: str, text: str) -> dict[str, str]:
    found = {}
    for label in text.split("+"):
        before, equals, after = label.partition("=")
        name, value = (before, after) if equals else ("rack", before)
        if not LABEL.fullmatch(name) or not LABEL.fullmatch(value):
            raise EverstepError(f"{part!r} has a label that is not NAME=VALUE; write A100:2@rack=r1, for example")
        found[name] = value
    return found
