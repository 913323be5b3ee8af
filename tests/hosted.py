"""Real hosts in the test's own process with zygotes and ranks below them, and a supervisor of a few lines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import pytest

from orchestrator.domain.generation import Answer, RankReport
from orchestrator.domain.host_events import (
    HostEvent,
    HostOpened,
    RankExited,
    RankReady,
    RankReported,
    SeatsPrepared,
    StepsPassed,
)
from orchestrator.domain.ids import Device, EffectId, Generation, JobId, NodeId, Step, Term
from orchestrator.domain.layout import layout, transfers
from orchestrator.domain.origin import FromMemory, FromSeed, Restore
from orchestrator.domain.plan import Pipeline, Plan, Stage
from orchestrator.domain.requests import CloseGeneration, CloseHost, FormGeneration, HostRequest, OpenHost, PrepareSeats
from orchestrator.domain.spec import CheckpointSpec, DataSpec, JobSpec, RecoverySpec, TrainSpec
from worker.host import Host
from worker.program import load_program
from worker.reference import run as run_alone

NODES = (NodeId("n0"), NodeId("n1"))
DEVICES = tuple(Device(node, index) for node in NODES for index in range(2))
E = TypeVar("E")


def a_job(tmp_path: Path, *, steps: int = 40, program: str = "causal_lm", leave_s: float = 2.0) -> JobSpec:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"the {n * n % 97}th of many lines says {n % 13} and {n % 7}\n" for n in range(400)))
    return JobSpec(
        name="t",
        program=program,
        data=DataSpec(files=(str(text),)),
        train=TrainSpec(steps=steps, micro_batches=4, micro_batch_size=1, sequence=32, seed=3, warmup_steps=2),
        model={"layers": 2, "width": 32, "heads": 2, "ffn": 64},
        checkpoint=CheckpointSpec(every=0),
        recovery=RecoverySpec(leave_s=leave_s),
    )


def a_plan(nodes: tuple[NodeId, ...] = NODES) -> Plan:
    """A pipeline of two stages on each node."""
    ids = 4 // len(nodes)
    return Plan(
        pipelines=tuple(
            Pipeline(
                stages=(
                    Stage(first=0, last=2, devices=(Device(node, 0),)),
                    Stage(first=2, last=4, devices=(Device(node, 1),)),
                ),
                micro_batches=tuple(range(ids * number, ids * number + ids)),
            )
            for number, node in enumerate(nodes)
        )
    )


@dataclass
class Supervisor:
    """Sends requests, records events with the instant they arrived, settles."""

    spec: JobSpec
    tmp_path: Path
    hosts: dict[NodeId, Host]
    events: list[tuple[float, HostEvent]] = field(default_factory=list)
    term: Term = Term(1)
    requests: int = 0
    pids: dict[Device, int] = field(default_factory=dict)
    addresses: dict[Device, str] = field(default_factory=dict)
    polls: list[asyncio.Task[None]] = field(default_factory=list)

    @property
    def plan(self) -> Plan:
        return a_plan(tuple(self.hosts))

    async def send(self, node: NodeId, request: HostRequest) -> None:
        self.requests += 1
        await self.hosts[node].handle(self.term, EffectId(f"e{self.requests}"), request)

    async def send_all(self, request: HostRequest) -> None:
        for node in self.hosts:
            await self.send(node, request)

    async def open(self) -> None:
        profile = load_program("causal_lm").describe(self.spec)
        for node, host in self.hosts.items():
            self.listen(host)
            await self.send(
                node,
                OpenHost(
                    job=JobId("j1"),
                    node=node,
                    num_devices=2,
                    spec=self.spec,
                    profile=profile,
                    checkpoint_dir=str(self.tmp_path / "checkpoints"),
                    log_dir=str(self.tmp_path / "logs"),
                ),
            )

    async def opened(self) -> None:
        await self.until(lambda: len(self.all(HostOpened)) == len(self.hosts), 90.0)  # imports torch, twice

    async def prepare(self, generation: int) -> None:
        devices = self.plan.devices
        for node in self.hosts:
            mine = tuple(device for device in devices if device.node == node)
            await self.send(node, PrepareSeats(generation=Generation(generation), devices=mine))
        await self.until(lambda: sum(e.generation == generation for e in self.all(SeatsPrepared)) == len(self.hosts))
        for event in self.all(SeatsPrepared):
            self.pids.update(event.pids)
            self.addresses.update(event.addresses)

    async def form(self, generation: int, restore: Restore, committed: int = 0, reason: str = "") -> None:
        form = FormGeneration(
            generation=Generation(generation),
            plan=replace(self.plan, reason=reason),
            addresses=dict(self.addresses),
            restore=restore,
            committed=Step(committed),
        )
        await self.send_all(form)

    async def ready(self, generation: int) -> None:
        await self.until(lambda: sum(e.generation == generation for e in self.all(RankReady)) == len(self.plan.devices))

    async def stepped(self, step: int) -> None:
        await self.until(lambda: max(self.answers(), default=0) >= step)

    async def close(self, generation: int) -> dict[Device, RankReport]:
        await self.send_all(CloseGeneration(generation=Generation(generation)))
        await self.until(lambda: len(self.reports(generation)) == len(self.plan.devices))
        return self.reports(generation)

    async def close_after_exit(self, generation: int) -> None:
        await self.until(lambda: any(e.report.generation == generation for e in self.all(RankExited)))
        await self.close(generation)

    def settle(self, reports: dict[Device, RankReport]) -> FromMemory:
        """If anybody saw the vote pass it is committed; holders are those who have that step or can apply its answer."""
        answer = max((r.answer for r in reports.values() if r.answer), key=lambda answer: answer.step, default=None)
        step = answer.step if answer else Step(0)
        profile = load_program("causal_lm").describe(self.spec)
        parts = layout(self.plan, profile, mirrors=1)
        sources = {
            device: parts.held(device)
            for device, report in reports.items()
            if report.held and (report.held.step == step or (report.held.step == step - 1 and report.voted == step))
        }
        found = transfers(sources, parts)
        assert not found.missing
        return FromMemory(step=step, answer=answer, moves=found.moves)

    def all(self, kind: type[E]) -> list[E]:
        return [event for _, event in self.events if isinstance(event, kind)]

    def at(self, matches: Callable[[HostEvent], bool]) -> float:
        return next(at for at, event in self.events if matches(event))

    def reports(self, generation: int) -> dict[Device, RankReport]:
        """Every seat's last word; fails where there are two."""
        told = [e.report for e in self.all(RankReported)] + [e.report for e in self.all(RankExited)]
        mine = [report for report in told if report.generation == generation]
        assert len({report.device for report in mine}) == len(mine)
        return {report.device: report for report in mine}

    def forget_before(self, generation: int) -> None:
        """Events of older generations, which a long test would search again and again."""
        self.events = [(at, event) for at, event in self.events if _generation(event) >= generation]

    def answers(self) -> dict[int, Answer]:
        return {answer.step: answer for event in self.all(StepsPassed) for answer in event.answers}

    async def until(self, holds: Callable[[], bool], timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not holds():
            for poll in self.polls:
                if poll.done() and not poll.cancelled():
                    poll.result()
            assert time.monotonic() < deadline, [event for _, event in self.events if not isinstance(event, StepsPassed)]
            await asyncio.sleep(0.001)

    async def _poll(self, host: Host, after: int = 0) -> None:
        while True:
            envelopes, _ = await host.poll(self.term, after, 0.5)
            for envelope in envelopes:
                assert envelope.number == after + 1
                after = envelope.number
                self.events.append((time.monotonic(), envelope.event))

    def listen(self, host: Host, after: int = 0) -> None:
        """Have its events above `after` recorded."""
        self.polls.append(asyncio.create_task(self._poll(host, after)))

    async def stop_listening(self) -> None:
        """Nothing is asked of any host any more."""
        for poll in self.polls:
            poll.cancel()
        await asyncio.gather(*self.polls, return_exceptions=True)
        self.polls.clear()

    async def end(self) -> None:
        await self.stop_listening()
        await self.send_all(CloseHost())


def _generation(event: HostEvent) -> int:
    found = getattr(event, "generation", None) or getattr(getattr(event, "report", None), "generation", None)
    return int(found) if found is not None else 1 << 30


@asynccontextmanager
async def supervised(
    spec: JobSpec, tmp_path: Path, nodes: tuple[NodeId, ...] = NODES, grace_s: float = 60.0
) -> AsyncIterator[Supervisor]:
    """Opened hosts; afterwards they are closed and nothing of them is left."""
    before = descriptors()
    supervisor = Supervisor(spec, tmp_path, {node: Host(isolation_grace_s=grace_s) for node in nodes})
    zygotes: list[int] = []
    try:
        await supervisor.open()
        zygotes = [host.zygote_pid for host in supervisor.hosts.values() if host.zygote_pid]
        yield supervisor
    finally:
        await supervisor.end()
        await supervisor.send_all(CloseHost())
    assert not [pid for pid in (*zygotes, *supervisor.pids.values()) if is_running(pid)]
    assert descriptors() == before


def descriptors() -> list[str]:
    """What this process holds open that a host could have opened."""
    links = []
    for fd in Path("/proc/self/fd").iterdir():
        try:
            links.append(str(fd.readlink()))
        except FileNotFoundError:
            continue
    return sorted(link.split(":")[0] for link in links if link.startswith(("socket:", "/memfd:", "anon_inode:[pidfd]")))


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def assert_same_curve(spec: JobSpec, answers: dict[int, Answer]) -> None:
    expected = run_alone(replace(spec, train=replace(spec.train, emulated_layer_s=0.0)))
    assert sorted(answers) == [answer.step for answer in expected]
    for answer in expected:
        assert answers[answer.step].loss == pytest.approx(answer.loss, rel=1e-5)


async def running(s: Supervisor, step: int = 3) -> None:
    """Generation 1 has begun and some steps have passed."""
    await s.opened()
    await s.prepare(1)
    await s.form(1, FromSeed())
    await s.ready(1)
    await s.stepped(step)
