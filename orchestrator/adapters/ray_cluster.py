"""Nodes and hosts on a Ray cluster, seen from the supervisor's process.

A host is a detached actor with a fixed name, so a supervisor that starts finds it again. What Ray says and what a host's
own socket says are told apart as evidence (HostGone) or silence (HostUnreachable); what follows from either is not decided
here. Ray's blocking calls run on threads: a GCS that is away must not stop the loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import structlog

from orchestrator.domain import codec
from orchestrator.domain.cluster import Node, NodeStatus
from orchestrator.domain.errors import EverstepError, StaleTerm, Unavailable
from orchestrator.domain.host_events import Envelope
from orchestrator.domain.ids import EffectId, JobId, NodeId, Term
from orchestrator.domain.memo import Kept, Remembered
from orchestrator.domain.requests import CloseHost, HostMessage, OpenHost
from orchestrator.ports import HostGone, HostUnreachable

from .host_link import HostLink
from .host_wire import Call, Kind, Place, Poll, Reply, raise_for, read
from .ray_environment import (
    NAMESPACE,
    RayEnvironment,
    pin_resource,
)
from .ray_table import Raylet, Table, is_placed, read_table
from .reach import Contact, Reach

CALL_S = 5.0
CALL_GRACE_S = 1.0
"""A call whose host's machine does not answer either is given up after this long, and made again."""
OPEN_S = 60.0
"""A worker process of Ray's has to start and import."""
CLOSE_S = 15.0
POLL_GRACE_S = 0.3
"""Beyond the wait that was asked for, where the host's machine does not answer either."""
BUSY_S = 1.5
"""The same where its machine does answer: it has much to do, or the process is stuck."""
SILENCE_S = 0.8
"""A machine that has acknowledged nothing for so long does not answer; two packets in a row may be lost."""
_LOOK_S = 0.05
TABLE_S = 1.0
"""How long Ray's node table may take before the last one known is used."""
KEEP_LOST_S = 600.0
_NAMED = "everstep-"

log = structlog.get_logger()
T = TypeVar("T")
Key = tuple[JobId, NodeId]
_BEST_FIRST = (NodeStatus.UP, NodeStatus.UNREACHABLE, NodeStatus.LOST)


@dataclass(frozen=True, slots=True)
class _Line:
    """A living host as far as anybody knows."""

    actor: Any
    link: HostLink

    @property
    def gone(self) -> asyncio.Task[str]:
        """Completes with the evidence, in words."""
        return self.link.gone

    @property
    def is_silent(self) -> bool:
        """Nothing that is sent to its machine is acknowledged."""
        return self.link.silent_s >= SILENCE_S


class RayCluster:
    """is_alive: what a node's provider knows of its processes, None where it cannot say. open_s: to place a host in."""

    def __init__(
        self,
        address: str,
        environment: RayEnvironment,
        *,
        is_alive: Callable[[NodeId], bool | None] = lambda _: None,
        open_s: float = OPEN_S,
    ) -> None:
        self._address = address
        self._environment = environment
        self._is_alive = is_alive
        self._open_s = open_s
        self._lines: dict[Key, _Line] = {}
        self._opening: dict[Key, asyncio.Lock] = {}
        self._table = Table()
        self._reading: asyncio.Task[Table] | None = None
        self.homeless = asyncio.Event()
        """Ray's head has been replaced: it places hosts anywhere or nowhere for this process, and soon for another one."""
        self._reaches: dict[str, Reach] = {}
        self._lost_since: dict[str, float] = {}

    async def start(self) -> None:
        """Connect as a driver; blocks for as long as that takes, once. Raises Unavailable."""
        self._connect()

    async def close(self) -> None:
        """Let go; hosts live on."""
        for line in self._lines.values():
            line.link.close()
        self._lines.clear()
        for reach in self._reaches.values():
            reach.close()
        self._reaches.clear()
        if self._reading is not None:
            self._reading.cancel()
        await asyncio.to_thread(_ray().shutdown)

    # --- nodes ------------------------------------------------------------------------------------------------------------

    async def nodes(self) -> tuple[Node, ...]:
        """Ray's table, corrected by what the provider and the nodes' own ports say sooner.

        A GCS that does not answer changes nothing.
        """
        if self._reading is None:
            self._reading = asyncio.create_task(asyncio.to_thread(read_table))
        done, _ = await asyncio.wait({self._reading}, timeout=TABLE_S)
        if done:
            reading, self._reading = self._reading, None
            if reading.exception() is None:
                self._table = reading.result()
                if self._table.is_homeless:
                    self.homeless.set()
        now = time.monotonic()
        found: dict[NodeId, Node] = {}
        for raylet in self._table.raylets:
            status = self._judge(raylet, now)
            if now - self._lost_since.get(raylet.id, now) < KEEP_LOST_S:
                node = replace(raylet.node, status=status)
                # Where a name comes twice, the node was started again: its best life is the newest.
                found[node.id] = min(node, found.get(node.id, node), key=lambda one: _BEST_FIRST.index(one.status))
        return tuple(found[id] for id in sorted(found))

    def _judge(self, raylet: Raylet, now: float) -> NodeStatus:
        reach = self._reaches.get(raylet.id)
        is_gone = reach is not None and reach.contact is Contact.GONE
        if raylet.node.status is NodeStatus.LOST or is_gone or self._is_alive(raylet.node.id) is False:
            self._lost_since.setdefault(raylet.id, now)
        if raylet.id in self._lost_since:
            if reach is not None:
                self._reaches.pop(raylet.id).close()
            return NodeStatus.LOST
        if reach is None:
            reach = self._reaches[raylet.id] = Reach(raylet.node.address, raylet.port)
        return NodeStatus.UNREACHABLE if reach.contact is Contact.UNREACHABLE else NodeStatus.UP

    # --- hosts ------------------------------------------------------------------------------------------------------------

    async def hosts(self) -> tuple[tuple[JobId, NodeId], ...]:
        """Those whose names Ray knows; of some it may not know yet that they have ended."""
        try:
            names = await self._in_thread(_ray().util.list_named_actors, CALL_S)
        except (HostUnreachable, _ray().exceptions.RayError) as error:
            raise Unavailable(f"Ray does not say which hosts there are ({_first_line(error)})") from error
        return tuple(sorted(key for name in names if (key := _of_name(name)) is not None))

    async def ask(self, job: JobId, node: NodeId) -> Kept:
        line = await self._attach(job, node)
        data = codec.dumps(Poll(term=Term(0), after=0, acked=0, wait_s=0.0, asks=True))
        try:
            reply = await self._ask(line, Kind.POLL, data, POLL_GRACE_S, BUSY_S)
        except StaleTerm:  # one of an earlier version takes it for a poll, and remembers nothing
            return Kept(job=job, node=node, term=Term(0))
        return (reply.kept or Remembered(term=Term(0))).of(job, node)

    async def call(
        self, job: JobId, node: NodeId, term: Term, effect: EffectId, request: HostMessage, memo: str = ""
    ) -> None:
        data = codec.dumps(Call(term=term, effect=effect, request=request, memo=memo))
        match request:
            case OpenHost():
                line = await self._open(job, node, request)
                await self._ask(line, Kind.HANDLE, data, CALL_GRACE_S, CALL_S)
            case CloseHost():
                await self._close(job, node, data)
            case _:
                await self._ask(await self._attach(job, node), Kind.HANDLE, data, CALL_GRACE_S, CALL_S)

    async def poll(
        self, job: JobId, node: NodeId, term: Term, after: int, acked: int, wait_s: float, memo: str = ""
    ) -> tuple[Envelope, ...]:
        line = await self._attach(job, node)
        data = codec.dumps(Poll(term=term, after=after, acked=acked, wait_s=wait_s, memo=memo))
        return (await self._ask(line, Kind.POLL, data, wait_s + POLL_GRACE_S, wait_s + BUSY_S)).envelopes

    async def _open(self, job: JobId, node: NodeId, request: OpenHost) -> _Line:
        """The host with this name, made where there is none."""
        async with self._opening.setdefault((job, node), asyncio.Lock()):
            known = self._lines.get((job, node))
            if known is not None and not known.gone.done():
                return known
            until = asyncio.get_running_loop().time() + CALL_S
            while True:
                if self._is_alive(node) is False:
                    raise HostGone(f"node {node} has ended")
                actor = await self._in_thread(lambda: self._make(job, node), self._open_s)
                try:
                    return await self._watch_or_end(job, node, actor, self._open_s)
                except HostGone:  # the one before it may be dead, and Ray still know it by this name
                    if asyncio.get_running_loop().time() > until:
                        raise
                    await asyncio.sleep(_LOOK_S)

    def _make(self, job: JobId, node: NodeId) -> Any:
        from .ray_host import MAX_CONCURRENCY, RayHost

        addresses = {one.node.id: one.node.address for one in self._table.raylets or read_table().raylets}
        options: dict[str, Any] = {
            "name": actor_name(job, node),
            "namespace": NAMESPACE,
            "lifetime": "detached",
            "get_if_exists": True,
            "max_restarts": 0,
            "max_task_retries": 0,
            "max_concurrency": MAX_CONCURRENCY,
            "num_cpus": 0,
            # Not the devices: who gets which of them is the control plane's to say, and jobs may share a node.
            "resources": {pin_resource(node): 0.001},
            **self._in_its_newest_life(node),
        }
        return _ray().remote(RayHost).options(**options).remote(addresses[node])

    def _in_its_newest_life(self, node: NodeId) -> dict[str, Any]:
        """Where a node ended and came again under its name, Ray may take both lives for living for a minute, and would ask
        either where to put the host."""
        lives = [one for one in self._table.raylets if one.node.id == node and one.node.status is NodeStatus.UP]
        living = [one for one in lives if one.id not in self._lost_since]
        if len(lives) < 2 or not living:
            return {}
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        return {"scheduling_strategy": NodeAffinitySchedulingStrategy(living[-1].id, soft=False)}

    async def _attach(self, job: JobId, node: NodeId, *, is_wanted: bool = True) -> _Line:
        """The host with this name, from an earlier supervisor's time if need be."""
        known = self._lines.get((job, node))
        if known is not None:
            return known
        async with self._opening.setdefault((job, node), asyncio.Lock()):
            if (known := self._lines.get((job, node))) is not None:
                return known
            if self._is_alive(node) is False:
                raise HostGone(f"node {node} has ended")
            actor = await self._find(job, node)
            if actor is None:
                raise HostGone(f"Ray knows no living host of {job} on {node}")
            watch = self._watch if is_wanted else self._watch_or_end
            return await watch(job, node, actor, CALL_S)

    async def _find(self, job: JobId, node: NodeId) -> Any | None:
        try:
            return await self._in_thread(lambda: _ray().get_actor(actor_name(job, node), namespace=NAMESPACE), CALL_S)
        except ValueError:  # Ray's way to say that there is none
            return None

    async def _watch(self, job: JobId, node: NodeId, actor: Any, timeout_s: float) -> _Line:
        place = codec.loads(Place, await self._result(actor.place.remote(), timeout_s))
        line = _Line(actor, HostLink(place))
        self._lines[job, node] = line
        return line

    async def _watch_or_end(self, job: JobId, node: NodeId, actor: Any, timeout_s: float) -> _Line:
        """An actor that Ray has on no node by then is ended: it may be asking one that nobody reaches where to place it."""
        try:
            return await self._watch(job, node, actor, timeout_s)
        except HostUnreachable:
            await self._in_thread(partial(_end_unless_placed, actor), CALL_S)
            raise

    async def _close(self, job: JobId, node: NodeId, data: bytes) -> None:
        """In order where it answers, by force where it refuses; no host is no error."""
        try:
            line = await self._attach(job, node, is_wanted=False)
        except HostGone:
            self._forget(job, node)
            return
        try:
            await self._ask(line, Kind.HANDLE, data, CALL_GRACE_S, CLOSE_S)
        except HostGone:
            self._forget(job, node)
            return
        except StaleTerm:
            raise
        except EverstepError as error:
            log.warning("host_refused_to_close", job=job, node=node, error=str(error))
        else:
            await asyncio.wait({line.gone}, timeout=CALL_S)
        if not line.gone.done():
            await self._in_thread(lambda: _ray().kill(line.actor, no_restart=True), CALL_S)
            await asyncio.wait({line.gone}, timeout=CALL_S)
        self._forget(job, node)

    def _forget(self, job: JobId, node: NodeId) -> None:
        if (line := self._lines.pop((job, node), None)) is not None:
            line.link.close()

    # --- answers ----------------------------------------------------------------------------------------------------------

    async def _ask(self, line: _Line, kind: Kind, data: bytes, grace_s: float, timeout_s: float) -> Reply:
        """Waits for grace_s where the host's machine is silent, and for timeout_s where it is not."""
        answer = asyncio.ensure_future(line.link.ask(kind, data))
        until = asyncio.get_running_loop().time() + timeout_s
        waited: set[asyncio.Future[Any]] = {answer, line.gone}
        try:
            done, _ = await asyncio.wait(waited, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
            while not done and not line.is_silent and asyncio.get_running_loop().time() < until:
                done, _ = await asyncio.wait(waited, timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                reply = read(Reply, answer.result())
            elif line.gone.done():
                raise HostGone(line.gone.result())
            else:
                raise HostUnreachable(_silence(line) if line.is_silent else f"no answer within {timeout_s:g} s")
        finally:
            answer.cancel()
        raise_for(reply)
        return reply

    async def _result(self, reference: Any, timeout_s: float) -> bytes:
        """What a call of Ray's returns."""
        errors = _ray().exceptions
        answer = asyncio.ensure_future(_awaited(reference))
        try:
            await asyncio.wait({answer}, timeout=timeout_s)
            if answer.done():
                return answer.result()
        except (errors.ActorDiedError, errors.ActorUnschedulableError) as error:
            raise HostGone(_first_line(error)) from error
        except (errors.RayActorError, errors.GetTimeoutError, errors.RaySystemError) as error:
            raise HostUnreachable(_first_line(error)) from error
        finally:
            answer.cancel()
        raise HostUnreachable(f"Ray did not answer within {timeout_s:g} s")

    async def _in_thread(self, work: Callable[[], T], timeout_s: float) -> T:
        """A blocking call of Ray's. Its thread may outlive the wait."""
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.to_thread(work)
        except TimeoutError as error:
            raise HostUnreachable(f"Ray did not answer within {timeout_s:g} s") from error

    def _connect(self) -> None:
        self._environment.apply()
        _forget_token()
        try:
            _ray().init(
                address=self._address,
                namespace=NAMESPACE,
                log_to_driver=False,
                logging_level="warning",
                configure_logging=False,
                _node_ip_address=self._address.rpartition(":")[0],  # of the head, whose raylet is the driver's
                _temp_dir=str(self._environment.temp_dir),
            )
        except (ConnectionError, RuntimeError, TimeoutError) as error:
            said = f"no Ray cluster answers at {self._address} ({_first_line(error)}); see that it runs with this token"
            raise Unavailable(said) from error


def _forget_token() -> None:
    """Ray reads a token once per process, also where the next cluster has another."""
    from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]

    AuthenticationTokenLoader.instance().reset_cache()


def _silence(line: _Line) -> str:
    return f"its machine has acknowledged nothing for {line.link.silent_s:.1f} s"


def _end_unless_placed(actor: Any) -> None:
    if not is_placed(actor):
        _ray().kill(actor, no_restart=True)


def actor_name(job: JobId, node: NodeId) -> str:
    # With what is in no job's id: machines that join are called anything, and people choose ids.
    return f"{_NAMED}{job}@{node}"


def _of_name(name: str) -> tuple[JobId, NodeId] | None:
    """Whose host that is, where it is one."""
    job, at, node = name.removeprefix(_NAMED).partition("@")
    return (JobId(job), NodeId(node)) if name.startswith(_NAMED) and at else None


async def _awaited(reference: Awaitable[bytes]) -> bytes:
    return await reference


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _ray() -> Any:
    """Imported late: it reads the environment when it is."""
    import ray

    return ray
