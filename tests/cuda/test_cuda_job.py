"""A whole job on a CUDA device: hosts, zygotes that never touch CUDA, eight forked ranks that share it, and a lost one."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.domain.ids import JobId, NodeId
from orchestrator.domain.requests import OpenHost
from orchestrator.domain.state import Succeeded
from tests.rig import a_rig
from worker.keeper import Zygote
from worker.program import load_program
from worker.reference import run

from .jobs import a_spec, on_cpu

pytestmark = pytest.mark.timeout(200)


def test_a_job_on_cpu_trains_beside_a_device_it_does_not_see(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with a_rig(tmp_path, num_devices=2) as rig:
            job = await rig.run(on_cpu(a_spec(steps=4)))
            assert isinstance(job.state, Succeeded), job.state

    asyncio.run(scenario())


def test_a_killed_rank_does_not_change_the_curve(tmp_path: Path) -> None:
    spec = a_spec(steps=24)

    async def scenario() -> None:
        async with a_rig(tmp_path, num_nodes=4, num_devices=2) as rig:
            job = await rig.run(spec, lambda step: rig.kill_rank(3) if step == 8 else None)
            assert isinstance(job.state, Succeeded), job.state
            print("pauses", [round(incident.pause_s or 0, 3) for incident in job.incidents])
            assert len(job.incidents) == 1 and not job.incidents[0].rolled_back
            wanted = [answer.loss for answer in run(on_cpu(spec))]
            assert sorted(rig.losses) == list(range(1, 25))
            gap = max(abs(rig.losses[step] - loss) / loss for step, loss in enumerate(wanted, start=1))
            print(f"largest gap to the curve on CPU: {gap:.1e}")
            assert gap <= 1e-5

    asyncio.run(scenario())


GREEDY = """
import torch
from worker.programs.causal_lm import CausalLM

class Greedy(CausalLM):
    def build(self, spec, first, last, tp, leaves):
        torch.zeros(1, device="cuda")
        return super().build(spec, first, last, tp, leaves)

PROGRAM = Greedy()
"""


def test_a_program_that_uses_cuda_before_the_fork_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "greedy_program.py").write_text(GREEDY)
    monkeypatch.syspath_prepend(tmp_path)
    tmp_path.chmod(0o755)  # programs are imported by a user of their own
    spec = replace(a_spec(), program="greedy_program:PROGRAM")
    order = OpenHost(
        job=JobId("j"),
        node=NodeId("n"),
        num_devices=1,
        spec=spec,
        profile=load_program("causal_lm").describe(spec),
        checkpoint_dir=str(tmp_path / "checkpoints"),
        log_dir=str(tmp_path / "logs"),
    )

    async def scenario() -> None:
        heard: list[dict[str, object]] = []
        ended = asyncio.Event()
        zygote = Zygote(order, {}, lambda message, fd: heard.append(message), lambda code: ended.set())
        zygote.start()
        try:
            async with asyncio.timeout(90):
                await ended.wait()
        finally:
            if zygote.is_alive:
                zygote.kill()
        assert heard[-1]["kind"] == "failed" and "used CUDA" in str(heard[-1]["message"])

    asyncio.run(scenario())
