"""Hosts, zygotes and ranks for real: two hosts in one process, two ranks each, and a supervisor of a few lines."""

from __future__ import annotations

import asyncio
import os
import signal
import textwrap
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import psutil
import pytest

from orchestrator.domain.errors import EverstepError, StaleTerm
from orchestrator.domain.generation import Answer, RankReport
from orchestrator.domain.ids import Device, EffectId, Generation, JobId, NodeId, Step, Term
from orchestrator.domain.layout import layout, transfers
from orchestrator.domain.plan import Pipeline, Plan, Stage
from orchestrator.domain.protocol import (
    CloseGeneration,
    CloseHost,
    FormGeneration,
    FromMemory,
    FromSeed,
    HostEvent,
    HostFailed,
    HostOpened,
    HostRequest,
    KillRank,
    OpenHost,
    PrepareSeats,
    RankExited,
    RankFinished,
    RankReady,
    RankReported,
    Restore,
    SeatsPrepared,
    StepsPassed,
)
from orchestrator.domain.spec import CheckpointSpec, DataSpec, JobSpec, RecoverySpec, TrainSpec
from worker.host import Host
from worker.program import load_program
from worker.reference import run as run_alone

pytestmark = pytest.mark.timeout(120)

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
            self.polls.append(asyncio.create_task(self._poll(host)))
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

    async def end(self) -> None:
        for poll in self.polls:
            poll.cancel()
        await asyncio.gather(*self.polls, return_exceptions=True)
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
    expected = run_alone(spec)
    assert sorted(answers) == [answer.step for answer in expected]
    for answer in expected:
        assert answers[answer.step].loss == pytest.approx(answer.loss, rel=1e-5)


def a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_import: str = "") -> str:
    """causal_lm, but for what importing it does; in step 5 its last stage does what step_5.py says by then."""
    name = f"program_{abs(hash(on_import))}"
    (tmp_path / f"{name}.py").write_text(
        textwrap.dedent(
            """
            import ctypes, os, sys, threading, time
            from worker.programs.causal_lm import CausalLM

            {on_import}

            class Altered(CausalLM):
                def build(self, spec, first, last, tp, leaves):
                    stage = super().build(spec, first, last, tp, leaves)
                    whole = stage.forward
                    def forward(x, ids, step):
                        if last == 4 and int(step) == 5:
                            print("step 5 begins")
                            exec(open({script!r}).read())
                        return whole(x, ids, step)
                    stage.forward = forward
                    return stage

            PROGRAM = Altered()
            """
        ).format(script=str(tmp_path / "step_5.py"), on_import=on_import)
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    return f"{name}:PROGRAM"


async def running(s: Supervisor, step: int = 3) -> None:
    """Generation 1 has begun and some steps have passed."""
    await s.opened()
    await s.prepare(1)
    await s.form(1, FromSeed())
    await s.ready(1)
    await s.stepped(step)


def test_a_killed_rank_is_replaced_and_the_loss_curve_is_that_of_an_undisturbed_run(tmp_path: Path) -> None:
    spec = a_job(tmp_path, steps=60)

    async def scenario() -> None:
        async with supervised(spec, tmp_path) as s:
            await running(s)
            first_pids, victim = dict(s.pids), DEVICES[2]
            await s.send(victim.node, KillRank(device=victim))
            await s.until(lambda: bool(s.all(RankExited)))
            reports = await s.close(1)
            await s.prepare(2)
            restore = s.settle(reports)
            await s.form(2, restore, restore.step)
            await s.ready(2)
            (exited,) = s.all(RankExited)
            assert (exited.device, exited.exit_code, exited.user_error) == (victim, -9, False)
            assert exited.pid == first_pids[victim]
            assert {device for device in DEVICES if s.pids[device] == first_pids[device]} == set(DEVICES) - {victim}
            assert [set(e.phases) for e in s.all(RankReady)] == [{"fork", "form", "build", "transfer", "gather"}] * 8
            await s.until(lambda: len(s.all(RankFinished)) == len(DEVICES))
            # Finished ranks are a source like any other, and say so when their generation is closed.
            last = await s.close(2)
            assert [(report.held.step if report.held else None) for report in last.values()] == [spec.train.steps] * 4
            assert_same_curve(spec, s.answers())

    asyncio.run(scenario())


@pytest.mark.timeout(240)
def test_two_hundred_generations_in_one_set_of_processes_leave_nothing_behind(tmp_path: Path) -> None:
    spec = a_job(tmp_path, steps=1_000_000)

    def held(pid: int) -> tuple[int, int, int]:
        """Descriptors, threads, resident KiB."""
        process = psutil.Process(pid)
        return process.num_fds(), process.num_threads(), process.memory_info().rss // 1024

    async def scenario() -> None:
        async with supervised(spec, tmp_path) as s:
            await running(s)
            pids = dict(s.pids)
            early: dict[Device, tuple[int, int, int]] = {}
            for generation in range(1, 201):
                if generation == 20:
                    early = {device: held(pid) for device, pid in pids.items()}
                reports = await s.close(generation)
                await s.prepare(generation + 1)
                restore = s.settle(reports)
                await s.form(generation + 1, restore, restore.step)
                await s.ready(generation + 1)
                s.forget_before(generation)
            late = {device: held(pid) for device, pid in pids.items()}
            assert s.pids == pids
            print(f"\nafter 20 generations {sorted(early.values())}, after 200 {sorted(late.values())}")
            for device in pids:
                assert late[device][:2] == early[device][:2]
                assert late[device][2] < early[device][2] + 8 * 1024

    asyncio.run(scenario())


def test_survivors_report_a_lost_peer_before_anybody_tells_them_and_only_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with supervised(a_job(tmp_path, steps=10_000), tmp_path, NODES[:1]) as s:
            await running(s)
            os.kill(s.pids[DEVICES[1]], signal.SIGKILL)
            await s.until(lambda: len(s.all(RankReported)) == 1)
            (reported,) = s.all(RankReported)
            assert (reported.report.device, reported.report.lost_peer) == (DEVICES[0], 1)
            assert reported.report.held is not None
            reports = await s.close(1)
            restore = s.settle({**reports, DEVICES[1]: replace(reports[DEVICES[1]], held=None)})
            await s.prepare(2)
            await s.form(2, restore, restore.step)
            await s.stepped(restore.step + 2)
            s.reports(1)

    asyncio.run(scenario())


def test_a_close_that_overtakes_its_form_is_answered_and_the_form_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with supervised(a_job(tmp_path), tmp_path, NODES[:1]) as s:
            await s.opened()
            await s.prepare(1)
            reports = await s.close(1)
            assert [(r.voted, r.answer, r.held, r.lost_peer) for r in reports.values()] == [(0, None, None, None)] * 2
            await s.form(1, FromSeed())
            # The same for a preparation: what was closed before it was prepared still answers for itself, once.
            await s.send_all(CloseGeneration(generation=Generation(2)))
            await s.prepare(2)
            await s.until(lambda: len(s.reports(2)) == 2)
            await s.prepare(3)
            await s.form(3, FromSeed(), reason="longer than any socket's buffer " * 100_000)
            await s.stepped(2)
            assert {e.generation for e in s.all(RankReady)} == {3}
            assert not s.all(RankExited)

    asyncio.run(scenario())


def test_a_rank_that_does_not_leave_is_killed_and_its_page_speaks_for_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with supervised(a_job(tmp_path, steps=10_000, leave_s=0.3), tmp_path, NODES[:1]) as s:
            await running(s)
            os.kill(s.pids[DEVICES[0]], signal.SIGSTOP)
            reports = await s.close(1)
            (exited,) = s.all(RankExited)
            assert (exited.device, exited.exit_code, exited.user_error) == (DEVICES[0], -9, False)
            assert "did not leave generation 1 within 0.3 s" in exited.message
            frozen, living = reports[DEVICES[0]], reports[DEVICES[1]]
            assert frozen.held is None and frozen.voted >= 3
            assert abs(frozen.passed - living.passed) <= 1

    asyncio.run(scenario())


def test_a_program_that_ends_its_rank_is_told_from_one_that_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = a_program(tmp_path, monkeypatch)
    cases = (
        ("raise ValueError('the data is odd')", 1, True, "ValueError: the data is odd"),
        ("sys.exit(3)", 3, True, "sys.exit(3)"),
        ("os._exit(0)", 0, True, "exited by itself with code 0"),
        ("ctypes.string_at(0)", -signal.SIGSEGV, False, "killed by SIGSEGV"),
    )

    async def scenario() -> None:
        async with supervised(a_job(tmp_path, program=program), tmp_path, NODES[:1]) as s:
            await s.opened()
            for generation, (does, exit_code, user_error, says) in enumerate(cases, start=1):
                (tmp_path / "step_5.py").write_text(does)
                await s.prepare(generation)
                await s.form(generation, FromSeed())
                await s.close_after_exit(generation)
                exited = s.all(RankExited)[-1]
                assert len(s.all(RankExited)) == generation
                assert (exited.device, exited.exit_code, exited.user_error) == (DEVICES[1], exit_code, user_error)
                assert says in exited.message
                assert exited.log_tail.count("step 5 begins") == 1  # of this process, not of those before it
                assert exited.report.passed == 4

    asyncio.run(scenario())


def test_a_dead_zygote_fails_the_host_and_takes_its_ranks_along(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with supervised(a_job(tmp_path, steps=10_000), tmp_path, NODES[:1]) as s:
            await running(s)
            os.kill(s.hosts[NODES[0]].zygote_pid, signal.SIGKILL)
            await s.until(lambda: len(s.all(RankExited)) == 2)
            (failed,) = s.all(HostFailed)
            assert "zygote ended with exit code -9" in failed.message

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("on_import", "says"),
    [
        ("raise RuntimeError('no licence')", "no licence"),
        ("threading.Thread(target=time.sleep, args=(60,), daemon=True).start()", "started 1 thread"),
    ],
)
def test_a_program_that_cannot_be_warmed_fails_the_host_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_import: str, says: str
) -> None:
    program = a_program(tmp_path, monkeypatch, on_import)

    async def scenario() -> None:
        async with supervised(a_job(tmp_path, program=program), tmp_path, NODES[:1]) as s:
            await s.until(lambda: bool(s.all(HostFailed)))
            (failed,) = s.all(HostFailed)
            assert says in failed.message
            assert any(says in line for line in failed.log_tail)

    asyncio.run(scenario())


def test_a_host_obeys_the_highest_term_only_and_a_repeated_request_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with supervised(a_job(tmp_path), tmp_path, NODES[:1]) as s:
            await s.opened()
            host, request = s.hosts[NODES[0]], PrepareSeats(generation=Generation(1), devices=DEVICES[:2])
            for _ in range(3):
                await host.handle(Term(1), EffectId("same"), request)
            await s.until(lambda: bool(s.all(SeatsPrepared)))
            s.pids.update(s.all(SeatsPrepared)[0].pids)
            waiting = asyncio.create_task(host.poll(Term(1), 10_000, 20.0))
            await asyncio.sleep(0.05)
            s.term = Term(2)
            await s.send_all(PrepareSeats(generation=Generation(1), devices=DEVICES[:2]))
            with pytest.raises(StaleTerm):
                await waiting
            with pytest.raises(StaleTerm):
                await host.handle(Term(1), EffectId("late"), CloseHost())
            with pytest.raises(EverstepError, match="has not been opened"):
                await Host().handle(Term(1), EffectId("early"), request)
            envelopes, heartbeat = await host.poll(Term(2), len(s.events), 5.0)
            assert len(s.all(SeatsPrepared)) == 1  # for three repeated requests
            assert [e.event.pids for e in envelopes if isinstance(e.event, SeatsPrepared)] == [s.pids]  # for the new one
            assert set(heartbeat.ranks) == set(DEVICES[:2])

    asyncio.run(scenario())


def test_unheard_ranks_train_on_until_the_limit_the_job_sets(tmp_path: Path) -> None:
    spec = a_job(tmp_path, steps=100_000)
    spec = replace(spec, recovery=replace(spec.recovery, max_isolation_s=2.0))

    async def scenario() -> None:
        async with supervised(spec, tmp_path, NODES[:1]) as s:
            await running(s)
            for poll in s.polls:
                poll.cancel()
            before, unheard_since = max(s.answers()), time.monotonic()
            await s.until(lambda: not any(is_running(pid) for pid in s.pids.values()))
            assert time.monotonic() - unheard_since > 1.5, "a poll may have been answered just before"
            events, _ = await s.hosts[NODES[0]].poll(s.term, 0, 5.0)
            exits = [e.event for e in events if isinstance(e.event, RankExited)]
            assert all("the job allows 2 s" in event.message and not event.user_error for event in exits)
            assert all(event.report.passed > before for event in exits)

    asyncio.run(scenario())
