"""Hosts, zygotes and ranks for real: two hosts in one process, two ranks each, and a supervisor of a few lines."""

from __future__ import annotations

import asyncio
import os
import signal
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from orchestrator.domain.errors import EverstepError, StaleTerm
from orchestrator.domain.host_events import HostFailed, RankExited, RankFinished, RankReady, RankReported, SeatsPrepared
from orchestrator.domain.ids import Device, EffectId, Generation, Term
from orchestrator.domain.origin import FromSeed
from orchestrator.domain.requests import CloseGeneration, CloseHost, KillRank, PrepareSeats
from tests.hosted import DEVICES, NODES, a_job, assert_same_curve, is_running, running, supervised
from worker.host import Host

pytestmark = pytest.mark.timeout(120)


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
    tmp_path.chmod(0o777)  # ranks, which are a user of their own, look for files there and make some
    return f"{name}:PROGRAM"


def test_a_killed_rank_is_replaced_by_who_stood_by_and_the_loss_curve_is_that_of_an_undisturbed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = a_job(tmp_path, steps=60, program=a_program(tmp_path, monkeypatch))
    monkeypatch.setattr("worker.rounds.AHEAD_S", 0.0)
    goes_on = tmp_path / "goes-on"
    (tmp_path / "step_5.py").write_text(f"while not os.path.exists({str(goes_on)!r}): time.sleep(0.002)")

    async def scenario() -> None:
        async with supervised(spec, tmp_path) as s:
            await running(s)
            first_pids, victim = dict(s.pids), DEVICES[2]
            await s.until(lambda: victim in s.hosts[victim.node].understudies)
            understudy = s.hosts[victim.node].understudies[victim]
            await s.send(victim.node, KillRank(device=victim))
            await s.until(lambda: bool(s.all(RankExited)))
            goes_on.touch()
            reports = await s.close(1)
            await s.prepare(2)
            restore = s.settle(reports)
            await s.form(2, restore, restore.step)
            await s.ready(2)
            (exited,) = s.all(RankExited)
            assert (exited.device, exited.exit_code, exited.user_error) == (victim, -9, False)
            assert exited.pid == first_pids[victim] and s.pids[victim] == understudy
            assert {device for device in DEVICES if s.pids[device] == first_pids[device]} == set(DEVICES) - {victim}
            assert [set(e.phases) for e in s.all(RankReady)] == [{"fork", "form", "build", "transfer", "gather"}] * 8
            await s.until(lambda: len(s.all(RankFinished)) == len(DEVICES))
            # Finished ranks are a source like any other, and say so when their generation is closed.
            last = await s.close(2)
            assert [(report.held.step if report.held else None) for report in last.values()] == [spec.train.steps] * 4
            assert_same_curve(replace(spec, program="causal_lm"), s.answers())

    asyncio.run(scenario())


@pytest.mark.timeout(240)
def test_two_hundred_generations_in_one_set_of_processes_leave_nothing_behind(tmp_path: Path) -> None:
    spec = a_job(tmp_path, steps=1_000_000)

    def held(pid: int) -> tuple[int, int, int]:
        """Descriptors, threads, resident KiB."""
        process = psutil.Process(pid)
        return process.num_fds(), process.num_threads(), process.memory_info().rss // 1024

    def is_no_more(now: tuple[int, int, int], then: tuple[int, int, int]) -> bool:
        return now[0] <= then[0] and now[1] <= then[1]

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
            # What a generation needs for a moment, as it begins, it has just begun to give back.
            # Early ones may have been looked at in such a moment: a leak would be of nine times as many generations.
            await s.until(lambda: all(is_no_more(held(pid), early[device]) for device, pid in pids.items()))
            for device in pids:
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
        async with supervised(a_job(tmp_path, steps=10_000, leave_s=1.0), tmp_path, NODES[:1]) as s:
            await running(s)
            os.kill(s.pids[DEVICES[0]], signal.SIGSTOP)
            reports = await s.close(1)
            (exited,) = s.all(RankExited)
            assert (exited.device, exited.exit_code, exited.user_error) == (DEVICES[0], -9, False)
            assert "did not leave generation 1 within 1 s" in exited.message
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
            await s.until(lambda: len(s.all(RankExited)) == 2 and bool(s.all(HostFailed)))
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
            await s.stop_listening()
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
            envelopes, heartbeat = await host.poll(Term(2), len(s.events), 60.0)
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
            await s.stop_listening()
            host, after = s.hosts[NODES[0]], len(s.events)
            await host.poll(s.term, after, 0.0)
            before, unheard_since = max(s.answers()), time.monotonic()
            await s.until(lambda: not any(is_running(pid) for pid in s.pids.values()))
            assert time.monotonic() - unheard_since > 1.9
            s.listen(host, after)
            await s.until(lambda: len(s.all(RankExited)) == 2)
            exits = s.all(RankExited)
            assert all("the job allows 2 s" in event.message and not event.user_error for event in exits)
            assert all(event.report.passed > before for event in exits)

    asyncio.run(scenario())
