"""Every wait inside a training process ends within leave_s, or the process does: what survives of it, and what is lost."""

from __future__ import annotations

import asyncio
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from test_host import DEVICES, NODES, Supervisor, a_job, assert_same_curve, running, supervised

from orchestrator.domain.ids import Device
from orchestrator.domain.protocol import RankExited, RankFinished, RankReported

pytestmark = pytest.mark.timeout(120)

STAGE_0, STAGE_1 = DEVICES[0], DEVICES[1]


def a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, first: str = "pass", last: str = "pass") -> str:
    """causal_lm, but in step 5 the first stage (with its second micro-batch) and the last one do something else, once.

    `group()` is the pipeline's process group there.
    """
    name = f"stuck_{abs(hash((first, last)))}"
    (tmp_path / f"{name}.py").write_text(
        textwrap.dedent(
            """
            import gc, os, signal, time
            from pathlib import Path
            import torch
            from worker.programs.causal_lm import CausalLM

            def group():
                from worker.parallel.gloo import GlooProcessGroup
                (found,) = [g for g in gc.get_objects() if isinstance(g, GlooProcessGroup) and g.label.startswith("pp")]
                return found

            class Stuck(CausalLM):
                def build(self, spec, first, last, tp, leaves):
                    module = super().build(spec, first, last, tp, leaves)
                    whole, seen = module.forward, []
                    done = Path({root!r}) / ("last" if last == 4 else "first")
                    def forward(x, ids, step):
                        seen.append(int(step))
                        if not done.exists() and seen.count(5) == (1 if last == 4 else 2):
                            done.touch()
                            if last == 4:
                                {last}
                            else:
                                {first}
                        return whole(x, ids, step)
                    module.forward = forward
                    return module

            PROGRAM = Stuck()
            """
        ).format(root=str(tmp_path), first=first, last=last)
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    return f"{name}:PROGRAM"


async def until_stuck(s: Supervisor, tmp_path: Path, *stages: str) -> None:
    for stage in stages:
        await s.until((tmp_path / stage).exists)
    await asyncio.sleep(0.3)


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
    """256 MiB are on their way to a process that is stopped: gloo has no way out of that."""
    asks = "group().recv([torch.empty(1 << 26)], 0, 99); time.sleep(0.1); os.kill(os.getpid(), signal.SIGSTOP)"
    sends = "group().send([torch.empty(1 << 26)], 1, 99).wait()"
    program = a_program(tmp_path, monkeypatch, first=sends, last=asks)
    spec = a_job(tmp_path, steps=12, program=program, leave_s=0.5)
    spec = replace(spec, recovery=replace(spec.recovery, backend="gloo"))

    async def scenario() -> None:
        async with supervised(spec, tmp_path, NODES[:1]) as s:
            await running(s, 4)
            await until_stuck(s, tmp_path, "first", "last")
            pid = s.pids[STAGE_0]
            began = time.monotonic()
            await go_on(s, 1, gone=(STAGE_1,))
            left = s.at(lambda event: isinstance(event, RankReported)) - began
            print(f"\nleft after {left * 1000:.0f} ms, {psutil.Process(pid).num_threads()} threads")
            reports = s.reports(1)
            assert (reports[STAGE_0].stuck, reports[STAGE_1].stuck) == (1, 0)
            assert left < 0.4, "before its host would have killed it"
            await s.until(lambda: len(s.all(RankFinished)) == 2)
            assert s.pids[STAGE_0] == pid and [exited.device for exited in s.all(RankExited)] == [STAGE_1]
            assert_same_curve(replace(spec, program="causal_lm"), s.answers())

    asyncio.run(scenario())
