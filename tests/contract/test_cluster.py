"""What a cluster and its node provider promise, on hosts in this process and on a real local Ray cluster."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import pytest

from orchestrator.adapters.local_hosts import LocalHosts
from orchestrator.adapters.local_nodes import LocalNodes, NodeSpec
from orchestrator.adapters.ray_cluster import RayCluster
from orchestrator.domain import codec
from orchestrator.domain.cluster import Node, NodeStatus
from orchestrator.domain.errors import NotFound, StaleTerm
from orchestrator.domain.host_events import Envelope, HostOpened, RankExited, SeatsPrepared
from orchestrator.domain.ids import Device, EffectId, Generation, JobId, NodeId, Term
from orchestrator.domain.job import JobRecord
from orchestrator.domain.memo import Memo, Reign
from orchestrator.domain.requests import CloseHost, HostRequest, KillRank, OpenHost, PrepareSeats
from orchestrator.domain.spec import DataSpec
from orchestrator.domain.state import Probing
from orchestrator.ports import Cluster, HostGone, HostUnreachable, NodeProvider
from tests.tiny_model import a_spec
from worker.programs.causal_lm import PROGRAM

pytestmark = pytest.mark.timeout(300)
T = TypeVar("T")
JOB, NODE = JobId("job-1"), NodeId("a100-1")
DEVICE = Device(NODE, 0)
OLD, NEW = Term(4), Term(5)


@dataclass
class World:
    cluster: Cluster
    provider: NodeProvider
    folder: Path
    sent: int = 0

    async def call(self, request: HostRequest, *, node: NodeId = NODE, term: Term = OLD, effect: str = "") -> None:
        self.sent += 1
        id = EffectId(effect or f"effect-{self.sent}")
        await patiently(lambda: self.cluster.call(JOB, node, term, id, request))

    async def open(self, node: NodeId = NODE) -> None:
        text = self.folder / "text.txt"
        text.write_text("the quick brown fox jumps over the lazy dog\n" * 40)
        spec = replace(a_spec(), data=DataSpec(files=(str(text),)))
        await self.call(
            OpenHost(
                job=JOB,
                node=node,
                num_devices=2,
                spec=spec,
                profile=PROGRAM.describe(spec),
                checkpoint_dir=str(self.folder / "checkpoints"),
                log_dir=str(self.folder / "logs"),
            ),
            node=node,
        )

    async def poll(self, after: int, acked: int, wait_s: float, term: Term = OLD) -> tuple[Envelope, ...]:
        return await patiently(lambda: self.cluster.poll(JOB, NODE, term, after, acked, wait_s))

    async def heard(self, wanted: type, *, after: int = 0, acked: int = 0, term: Term = OLD) -> Envelope:
        """The first event of this kind above `after`."""
        async with asyncio.timeout(90):
            while True:
                for envelope in await self.poll(after, acked, 0.5, term):
                    after = max(after, envelope.number)
                    if isinstance(envelope.event, wanted):
                        return envelope


async def patiently(ask: Callable[[], Awaitable[T]]) -> T:
    """As a supervisor asks: again where there was no answer, which is no evidence of anything."""
    async with asyncio.timeout(90):
        while True:
            try:
                return await ask()
            except HostUnreachable:
                await asyncio.sleep(0.2)


@asynccontextmanager
async def twin(folder: Path) -> AsyncIterator[World]:
    hosts = LocalHosts((Node(id=NODE, kind="A100", num_devices=2),))
    try:
        yield World(hosts, hosts, folder)
    finally:
        await hosts.close()


@asynccontextmanager
async def ray(folder: Path) -> AsyncIterator[World]:
    nodes = LocalNodes(folder)
    try:
        cluster = RayCluster(
            await asyncio.to_thread(nodes.start, [NodeSpec("A100", 2)]), nodes.environment, is_alive=nodes.is_alive
        )
        await cluster.start()
        try:
            yield World(cluster, nodes, folder)
        finally:
            await cluster.close()
    finally:
        nodes.stop()


@pytest.mark.parametrize("kind", [twin, ray], ids=["twin", "ray"])
def test_promises(kind: Callable[[Path], object], tmp_path: Path) -> None:
    """One cluster per kind, since a start costs seconds; each promise is a function of its own."""

    async def whole() -> None:
        async with kind(tmp_path) as world:  # type: ignore[attr-defined]
            for promise in PROMISES:
                await promise(world)

    asyncio.run(whole())


async def nodes_have_kind_devices_and_status(world: World) -> None:
    (node,) = await world.cluster.nodes()
    assert (node.id, node.kind, node.num_devices, node.status) == (NODE, "A100", 2, NodeStatus.UP)


async def where_no_host_was_opened_there_is_none(world: World) -> None:
    with pytest.raises(HostGone):
        await world.call(PrepareSeats(generation=Generation(1), devices=()))
    with pytest.raises(HostGone):
        await world.poll(0, 0, 0.0)
    await world.call(CloseHost())


async def events_are_told_until_acknowledged(world: World) -> None:
    await world.open()
    await world.open()  # again: the same host
    opened = await world.heard(HostOpened)
    assert (await world.heard(HostOpened)).number == opened.number, "another supervisor would be told again"
    assert not [e for e in await world.poll(opened.number, 0, 0.0) if e.number <= opened.number]
    seats = PrepareSeats(generation=Generation(1), devices=(DEVICE,))
    await world.call(seats, effect="seats")
    prepared = await world.heard(SeatsPrepared, after=opened.number, acked=opened.number)
    assert isinstance(prepared.event, SeatsPrepared) and set(prepared.event.pids) == {DEVICE}
    left = await world.poll(0, opened.number, 0.0)
    assert [envelope.number for envelope in left][:1] == [prepared.number], "what was acknowledged is forgotten"


async def host_remembers_what_it_is_told_and_says_so_to_whoever_asks(world: World) -> None:
    assert (JOB, NODE) in await world.cluster.hosts()
    before = await world.cluster.ask(JOB, NODE)
    assert (before.term, before.memo) == (OLD, None)
    record = JobRecord(id=JOB, spec=a_spec(), state=Probing(), created_at=1.0)
    reign = Reign(term=OLD, by="one", commits=3, at=2.0)
    for commits in (4, 5):
        memo = codec.dumps(Memo(reigns=(reign,), commits=commits, record=record)).decode()
        if commits == 4:
            request = PrepareSeats(generation=Generation(1), devices=(DEVICE,))
            await world.cluster.call(JOB, NODE, OLD, EffectId("seats"), request, memo)
        else:
            await world.cluster.poll(JOB, NODE, OLD, 0, 0, 0.0, memo)
        kept = await world.cluster.ask(JOB, NODE)
        assert kept.memo is not None and (kept.memo.commits, kept.memo.record) == (commits, record)
    await world.poll(0, 0, 0.0)
    assert (await world.cluster.ask(JOB, NODE)).memo == kept.memo, "until it is told more"
    with pytest.raises(HostGone):
        await world.cluster.ask(JobId("another"), NODE)


async def repeated_effect_is_carried_out_once(world: World) -> None:
    before = await world.poll(0, 0, 0.0)
    await world.call(PrepareSeats(generation=Generation(1), devices=(DEVICE,)), effect="seats")
    await asyncio.sleep(0.2)
    assert await world.poll(0, 0, 0.0) == before


async def waiting_poll_ends_with_the_event(world: World) -> None:
    last = (await world.poll(0, 0, 0.0))[-1].number
    waiting = asyncio.create_task(world.heard(RankExited, after=last))
    await asyncio.sleep(0.1)
    await world.call(KillRank(device=DEVICE))
    exited = (await waiting).event
    assert isinstance(exited, RankExited) and exited.exit_code == -9


async def higher_term_shuts_out_the_lower(world: World) -> None:
    await world.poll(0, 0, 0.0, NEW)
    with pytest.raises(StaleTerm):
        await world.poll(0, 0, 0.0)
    with pytest.raises(StaleTerm):
        await world.call(PrepareSeats(generation=Generation(2), devices=()))
    with pytest.raises(StaleTerm):
        await world.call(CloseHost())


async def closed_host_is_gone(world: World) -> None:
    await world.call(CloseHost(), term=NEW)
    with pytest.raises(HostGone):
        await world.poll(0, 0, 0.0, NEW)
    await world.call(CloseHost(), term=NEW)


async def added_node_is_seen_and_a_killed_one_is_lost(world: World) -> None:
    node = await world.provider.add("H100", 1, {"rack": "r1"})
    await until_status(world, node, NodeStatus.UP)
    assert {found.id: found.domain for found in await world.cluster.nodes()}[node] == "rack=r1"
    await world.provider.kill(node)
    await until_status(world, node, NodeStatus.LOST)
    with pytest.raises(HostGone):
        await world.open(node)
    with pytest.raises(NotFound):
        await world.provider.kill(NodeId("no-such-node"))


PROMISES: tuple[Callable[[World], Awaitable[None]], ...] = (
    nodes_have_kind_devices_and_status,
    where_no_host_was_opened_there_is_none,
    events_are_told_until_acknowledged,
    host_remembers_what_it_is_told_and_says_so_to_whoever_asks,
    repeated_effect_is_carried_out_once,
    waiting_poll_ends_with_the_event,
    higher_term_shuts_out_the_lower,
    closed_host_is_gone,
    added_node_is_seen_and_a_killed_one_is_lost,
)


async def until_status(world: World, node: NodeId, status: NodeStatus) -> None:
    async with asyncio.timeout(90):
        while {found.id: found.status for found in await world.cluster.nodes()}.get(node) is not status:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
