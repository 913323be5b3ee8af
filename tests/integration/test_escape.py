"""Every wait inside a training process ends within leave_s, or the process does: what survives of it, and what is lost."""

from __future__ import annotations

import asyncio
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from orchestrator.domain.host_events import RankExited, RankFinished, RankReported
from orchestrator.domain.ids import Device
from tests.hosted import DEVICES, NODES, Supervisor, a_job, assert_same_curve, running, supervised

pytestmark = pytest.mark.timeout(120)

STAGE_0, STAGE_1 = DEVICES[0], DEVICES[1]


def a_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: dict[int, str], last: dict[int, str] | None = None
) -> str:
    """causal_lm, but in these steps the first stage (with its second micro-batch) and the last one do something, once.

    `group()` is the pipeline's process group there.
    """
    (tmp_path / "stuck.py").write_text(
        textwrap.dedent(
            f"""
            import ctypes, gc, os, signal, sys, time
            from pathlib import Path
            import torch
            from worker.programs.causal_lm import CausalLM

            DOES = ({first!r}, {last or {}!r})

            def group():
                from worker.parallel.gloo import GlooProcessGroup
                (found,) = [g for g in gc.get_objects() if isinstance(g, GlooProcessGroup) and g.label.startswith("pp")]
                return found

            class Stuck(CausalLM):
                def build(self, spec, first, last, tp, leaves):
                    module = super().build(spec, first, last, tp, leaves)
                    whole, seen, stage = module.forward, [], int(last == 4)
                    def forward(x, ids, step):
                        step_now = int(step)
                        seen.append(step_now)
                        done = Path({str(tmp_path)!r}) / f"{{stage}}-{{step_now}}"
                        if step_now in DOES[stage] and not done.exists() and seen.count(step_now) == 2 - stage:
                            done.touch()
                            exec(DOES[stage][step_now], globals())
                        return whole(x, ids, step)
                    module.forward = forward
                    return module

            PROGRAM = Stuck()
            """
        )
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    tmp_path.chmod(0o777)  # ranks, which are a user of their own, look for files there and make some
    return "stuck:PROGRAM"


async def go_on(s: Supervisor, generation: int, gone: tuple[Device, ...] = ()) -> None:
    """Close, settle and form again; those whose process ended are prepared anew."""
    reports = await s.close(generation)
    assert {device for device, report in reports.items() if report.held is None} == set(gone)
    await s.prepare(generation + 1)
    restore = s.settle(reports)
    await s.form(generation + 1, restore, restore.step)


def test_on_gloo_a_thread_stuck_in_a_large_transfer_is_replaced_and_its_memory_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """256 MiB are on their way to a process that is stopped when the first have come: gloo has no way out of that."""
    asks = """if True:
        landed = torch.zeros(1 << 26)
        group().recv([landed], 0, 99)
        while not landed[0]:
            pass
        os.kill(os.getpid(), signal.SIGSTOP)
    """
    sends = "group().send([torch.ones(1 << 26)], 1, 99).wait()"
    program = a_program(tmp_path, monkeypatch, {5: sends}, {5: asks})
    spec = a_job(tmp_path, steps=12, program=program, leave_s=1.5)
    spec = replace(spec, recovery=replace(spec.recovery, backend="gloo"))

    async def scenario() -> None:
        async with supervised(spec, tmp_path, NODES[:1]) as s:
            await running(s, 4)
            pid = s.pids[STAGE_0]
            # One has stopped itself with the transfer under way, and the thread of the other sleeps in its wait.
            states = [psutil.STATUS_SLEEPING, psutil.STATUS_STOPPED]
            await s.until(lambda: [psutil.Process(s.pids[at]).status() for at in (STAGE_0, STAGE_1)] == states)
            began = time.monotonic()
            await go_on(s, 1, gone=(STAGE_1,))
            left = s.at(lambda event: isinstance(event, RankReported)) - began
            print(f"\nleft after {left * 1000:.0f} ms, {psutil.Process(pid).num_threads()} threads")
            reports = s.reports(1)
            assert (reports[STAGE_0].stuck, reports[STAGE_1].stuck) == (1, 0)
            await s.until(lambda: len(s.all(RankFinished)) == 2)
            assert s.pids[STAGE_0] == pid and [exited.device for exited in s.all(RankExited)] == [STAGE_1]
            assert_same_curve(replace(spec, program="causal_lm"), s.answers())

    asyncio.run(scenario())


def test_a_survivor_that_sleeps_is_stopped_or_holds_the_interpreter_is_killed_and_its_mirror_has_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = {
        5: "time.sleep(60)",
        6: "os.kill(os.getpid(), signal.SIGSTOP)",
        7: "ctypes.PyDLL(None).sleep(60)",  # unlike CDLL, PyDLL keeps the interpreter's lock during the call
    }
    spec = a_job(tmp_path, steps=9, program=a_program(tmp_path, monkeypatch, stuck), leave_s=1.0)

    async def scenario() -> None:
        async with supervised(spec, tmp_path, NODES[:1]) as s:
            await running(s, 4)
            kept = s.pids[STAGE_1]
            for generation, step in enumerate(stuck, start=1):
                # From there on it looks at nothing that anybody could tell it.
                await s.until((tmp_path / f"0-{step}").exists)
                began = time.monotonic()
                await go_on(s, generation, gone=(STAGE_0,))
                exited = s.all(RankExited)[-1]
                assert (exited.device, exited.exit_code, exited.user_error) == (STAGE_0, -9, False)
                assert f"did not leave generation {generation} within 1 s" in exited.message
                assert s.reports(generation)[STAGE_0].voted == step - 1, "its page speaks for it"
                print(f"\nstuck in step {step}: formed again after {time.monotonic() - began:.2f} s")
            await s.until(lambda: len(s.all(RankFinished)) == 2)
            assert s.pids[STAGE_1] == kept and len(s.all(RankExited)) == len(stuck)
            assert_same_curve(replace(spec, program="causal_lm"), s.answers())

    asyncio.run(scenario())


def test_ranks_that_nobody_can_reach_train_on_for_longer_than_the_grace(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with supervised(a_job(tmp_path, steps=100_000), tmp_path, NODES[:1], grace_s=1.0) as s:
            await running(s)
            await s.stop_listening()
            before, pids = max(s.answers()), dict(s.pids)
            await asyncio.sleep(2.5)
            s.listen(s.hosts[NODES[0]], after=len(s.events))
            await s.until(lambda: max(s.answers()) > before + 5)
            assert not s.all(RankExited) and s.pids == pids and not s.all(RankReported)

    asyncio.run(scenario())
