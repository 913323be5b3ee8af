"""Emulated nodes on this machine: each a raylet and whatever runs below it, under one mark in the environment.

A registry under the state directory says which there are and which process each is, so that any process can look after
them. Killing a node ends every process that bears its mark, in whatever session: raylet, host, zygote and ranks.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path

from orchestrator.domain import codec
from orchestrator.domain.admission import Checked
from orchestrator.domain.errors import EverstepError, NotFound, Unavailable
from orchestrator.domain.ids import NodeId
from worker.nodecheck import CheckOrder, Meeting

from . import checking, ray_environment, ray_node
from .checking import PeerUnavailable
from .embedded_redis import forget, free_port
from .processes import ProcessId, end, exclusively, identify, marked, write_private
from .ray_environment import CLUSTER_MARK, NODE_MARK
from .ray_node import GCS, HEAD, HeadOrder, NodeOrder, Order, Report, Started, another, launch_detached
from .redis_clients import RedisAddress

LOOPBACK = "127.0.0.1"
LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
"""What Ray takes for a label's name and value."""
START_S = 60.0
HEAD_S = 30.0
"""For a head that is being started again, which has to wait for its Redis."""
_KILL_S = 5.0


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """address: where the node listens. prefix: words before its raylet's command, where it is to run in another network
    namespace (`ip netns exec NAME`) or otherwise apart; whoever makes such places takes them away again."""

    kind: str
    num_devices: int
    labels: Mapping[str, str] = field(default_factory=dict)
    address: str = LOOPBACK
    prefix: tuple[str, ...] = ()
    name: str = ""
    """Where it has one already; else it is given one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownNode:
    kind: str
    num_devices: int
    raylet: ProcessId
    labels: Mapping[str, str] = field(default_factory=dict)
    address: str = LOOPBACK
    prefix: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Registry:
    """address: of the GCS. made: how many nodes of each kind there ever were; names are not used twice.

    head: the GCS and the raylet that drivers connect to; head_commands: how each is started again.
    """

    address: str = ""
    head: Mapping[str, ProcessId] = field(default_factory=dict)
    head_commands: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    nodes: Mapping[NodeId, KnownNode] = field(default_factory=dict)
    made: Mapping[str, int] = field(default_factory=dict)


class LocalNodes:
    """Blocking methods are for a start and a stop; `add`, `kill` and `check` are the NodeProvider's."""

    def __init__(self, state_dir: Path) -> None:
        self.environment = ray_environment.for_state_dir(state_dir)
        self._path = state_dir.resolve() / "nodes.json"
        self._lock = state_dir.resolve() / "nodes.lock"
        """Held while nodes start, which needs their head: never to be waited for by whoever brings that back."""
        self._writing = state_dir.resolve() / "nodes.json.lock"
        """Held for a change to the registry."""
        # One value: several threads ask.
        self._read: tuple[tuple[int, int, int] | None, Registry] = None, Registry()
        """Of the file that is known."""

    # --- a cluster's life -------------------------------------------------------------------------------------------------

    def start(self, specs: Sequence[NodeSpec], *, address: str = LOOPBACK, storage: RedisAddress | None = None) -> str:
        """The head and one node per spec, together; the GCS's address. Raises Unavailable, with Ray's last words.

        address: where the head listens; every node must reach it. storage: a Redis in which the GCS keeps its tables, so
        that `restart_head` finds them; emptied of an earlier cluster's.
        """
        ray_environment.prepare(self.environment)
        if storage is not None:
            forget(storage, ray_environment.STORAGE_KEYS)
        head = HeadOrder(
            address=address,
            port=free_port(),
            redis=_name(storage) if storage else "",
            variables=_login(storage),
        )
        registry = Registry(address=f"{address}:{head.port}")
        self._launch(registry, specs, head)
        return registry.address

    def head(self, name: str) -> ProcessId | None:
        """The head's living process of this name."""
        found = self.registry().head.get(name)
        return found if found and found.is_alive else None

    def restart_head(self, name: str, storage: RedisAddress) -> ProcessId | None:
        """Another process in place of the head's (GCS or HEAD) that ended, at the same address; None before the first.

        It finds what the one before kept in `storage`: nodes register again by themselves, and detached actors live on.
        """
        command = self.registry().head_commands.get(name)
        if command is None:
            return None
        for path in (word.partition("=")[2] for word in command if "_socket_name=" in word):
            Path(path).unlink(missing_ok=True)
        variables = _login(storage) if name == GCS else {}
        env = self.environment.variables(os.environ, node=HEAD) | variables
        process = identify(launch_detached(another(command), self.environment.temp_dir / f"{name}.log", env).pid)
        if process is not None:
            self._change(lambda registry: replace(registry, head={**registry.head, name: process}))
        return process

    def has_head(self, name: str) -> bool:
        """Whether one was ever started, so that another can be."""
        return name in self.registry().head_commands

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
        """As the file has it now. It is read again only where it has changed: nodes are asked for many times a second."""
        try:
            stat = self._path.stat()
            version = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
            known, registry = self._read
            if version != known:
                registry = codec.loads(Registry, self._path.read_text())
                self._read = version, registry
            return registry
        except FileNotFoundError:
            return Registry()

    def is_alive(self, node: NodeId) -> bool | None:
        """None where this provider does not know the node."""
        known = self.registry().nodes.get(node)
        return None if known is None else known.raylet.is_alive

    # --- NodeProvider -----------------------------------------------------------------------------------------------------

    async def add(self, kind: str, num_devices: int, labels: Mapping[str, str] | None = None) -> NodeId:
        return await asyncio.to_thread(self.add_now, NodeSpec(kind, num_devices, labels or {}))

    async def kill(self, node: NodeId) -> None:
        await asyncio.to_thread(self.kill_now, node)

    async def check(self, node: NodeId, peer: NodeId | None) -> Checked:
        if peer is None:
            return await self.check_with(node, None)
        try:
            async with self.peer(peer) as meeting:
                return await self.check_with(node, meeting)
        except PeerUnavailable as error:
            return await self.check_with(node, None, alone=str(error))

    def knows(self, node: NodeId) -> bool:
        """Without waiting for one that is being started."""
        return node in self.registry().nodes

    def peer(self, node: NodeId) -> AbstractAsyncContextManager[Meeting]:
        """That node, waiting for one meeting with another. Raises PeerUnavailable."""
        try:
            known = self._known(node)
        except NotFound as error:
            raise PeerUnavailable(str(error)) from error
        return checking.peer(node, known.address, known.prefix, self.environment.variables(os.environ, node))

    async def check_with(self, node: NodeId, meeting: Meeting | None, alone: str = "there is no other node") -> Checked:
        known = await asyncio.to_thread(self._known, node)
        order = CheckOrder(num_devices=known.num_devices, folder=str(self._path.parent), meeting=meeting, alone=alone)
        return await checking.run_check(order, known.prefix, self.environment.variables(os.environ, node))

    def add_now(self, spec: NodeSpec) -> NodeId:
        """Waits for a head that is being started again. Raises Unavailable."""
        registry = self.registry()
        if not registry.address:
            raise Unavailable("no local cluster runs from this state directory; start it first")
        _wait_for_head(registry.address)
        return self._launch(registry, [spec], None)[0]

    def join(self, address: str, spec: NodeSpec) -> NodeId:
        """A node of the cluster whose GCS is at `address`, run by somebody else. Raises Unavailable."""
        self._change(lambda registry: replace(registry, address=address))
        return self.add_now(spec)

    def kill_now(self, node: NodeId) -> None:
        self._known(node)
        deadline = time.monotonic() + _KILL_S
        while found := self._processes(node):
            end(found, grace_s=0)
            if time.monotonic() > deadline:
                raise Unavailable(f"processes {[process.pid for process in found]} of node {node} do not end")

    # ----------------------------------------------------------------------------------------------------------------------

    def _launch(self, registry: Registry, specs: Sequence[NodeSpec], head: HeadOrder | None) -> Sequence[NodeId]:
        with exclusively(self._lock):
            if head is None:
                registry = self.registry()
            made, orders = dict(registry.made), []
            for spec in specs:
                made[spec.kind] = made.get(spec.kind, 0) + 1
                name = spec.name or f"{re.sub('[^a-z0-9]+', '-', spec.kind.lower())}-{made[spec.kind]}"
                orders.append(
                    NodeOrder(
                        name=name,
                        kind=spec.kind,
                        num_devices=spec.num_devices,
                        address=spec.address,
                        prefix=spec.prefix,
                        labels=spec.labels,
                    )
                )
            order = Order(gcs=registry.address, temp_dir=str(self.environment.temp_dir), head=head, nodes=tuple(orders))
            started = self._run(order)
            nodes = {
                NodeId(one.name): KnownNode(
                    kind=one.kind,
                    num_devices=one.num_devices,
                    raylet=started[one.name].process,
                    labels=one.labels,
                    address=one.address,
                    prefix=one.prefix,
                )
                for one in orders
            }
            if head is None:
                self._change(lambda now: replace(now, nodes={**now.nodes, **nodes}, made=made))
            else:
                heads = {name: started[name] for name in (GCS, HEAD)}
                first = replace(
                    registry,
                    head={name: one.process for name, one in heads.items()},
                    head_commands={name: one.command for name, one in heads.items()},
                    nodes=nodes,
                    made=made,
                )
                self._change(lambda _: first)
        return list(nodes)

    def _known(self, node: NodeId) -> KnownNode:
        """Raises NotFound."""
        known = self.registry().nodes
        if node not in known:
            with exclusively(self._lock):  # Ray may show a node a moment before whoever starts it has written it down
                known = self.registry().nodes
        if node not in known:
            raise NotFound(f"there is no node {node}; list the nodes to see what there is")
        return known[node]

    def _change(self, change: Callable[[Registry], Registry]) -> None:
        with exclusively(self._writing):
            write_private(self._path, codec.dumps(change(self.registry())).decode())

    def _run(self, order: Order) -> Mapping[str, Started]:
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
            self._end_all(order)
            words = _last_line(error.stderr.decode(errors="replace") if isinstance(error.stderr, bytes) else error.stderr)
            raise Unavailable(
                f"Ray's processes did not register within {START_S:g} s ({words}); is this machine overloaded?"
            ) from error
        if done.returncode != 0:
            self._end_all(order)
            raise Unavailable(f"Ray's processes could not be started: {_last_line(done.stderr)}")
        return codec.loads(Report, done.stdout).started

    def _end_all(self, order: Order) -> None:
        """Of nodes that count as not started: one might register all the same, unknown to everybody."""
        for node in order.nodes:
            end(self._processes(NodeId(node.name)), grace_s=0)

    def _processes(self, node: NodeId | None = None) -> tuple[ProcessId, ...]:
        return marked({CLUSTER_MARK: self.environment.cluster, NODE_MARK: node})


def _wait_for_head(address: str) -> None:
    """Raises Unavailable: without it a node would start, wait for it and end, and say less."""
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + HEAD_S
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=1).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                said = f"Ray's head at {address} does not answer after {HEAD_S:g} s ({error})"
                raise Unavailable(f"{said}; see the keeper's log for why it was not started again") from error
        time.sleep(0.05)


def _last_line(said: str | None) -> str:
    return ((said or "").strip().splitlines() or ["it said nothing"])[-1]


def _name(storage: RedisAddress) -> str:
    return f"{storage.host}:{storage.port}"


def _login(storage: RedisAddress | None) -> dict[str, str]:
    return ray_environment.storage_variables(_name(storage), storage.password) if storage else {}


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
