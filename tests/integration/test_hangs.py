"""A rank that hangs is named, shown and replaced; whoever waits for it is left alone. Real processes, one host per node."""

from __future__ import annotations

import asyncio
import os
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.domain.failure import Cause
from orchestrator.domain.ids import Device, NodeId
from orchestrator.domain.spec import ParallelSpec
from orchestrator.domain.state import Failed, Succeeded
from tests.jobs import a_job, largest_gap
from tests.rig import a_rig

pytestmark = pytest.mark.timeout(120)

PROGRAM = """
import ctypes, os, signal, time
from worker.programs.causal_lm import CausalLM

FOLDER = {folder!r}

def first(name):
    # Once per job, whoever comes first and however often the step is run again.
    try:
        os.close(os.open(os.path.join(FOLDER, name), os.O_CREAT | os.O_EXCL))
        return True
    except FileExistsError:
        return False

def a_loop_that_holds_the_gil():
    ctypes.PyDLL(None).sleep(60)

class Hanging(CausalLM):
    def build(self, spec, first_layer, last_layer, tp, leaves):
        stage = super().build(spec, first_layer, last_layer, tp, leaves)
        whole = stage.forward
        def forward(x, ids, step):
            # By itself and at its own step: from outside a stop may come as late as the next hang.
            if int(step) == 7 and first_layer > 0 and first("stop"):
                os.kill(os.getpid(), signal.SIGSTOP)
            if int(step) == 14 and first("gil"):
                a_loop_that_holds_the_gil()
            if int(step) == 22 and first("slow"):
                time.sleep(1.2)
            return whole(x, ids, step)
        stage.forward = forward
        return stage

PROGRAM = Hanging()
"""


MISMATCHED = """
import torch
from worker.programs.causal_lm import CausalLM

class Mismatched(CausalLM):
    def build(self, spec, first_layer, last_layer, tp, leaves):
        stage = super().build(spec, first_layer, last_layer, tp, leaves)
        now = [0, 0]
        whole = stage.forward
        def forward(x, ids, step):
            now[:] = int(step), int(ids)
            return whole(x, ids, step)
        def once_more(_):
            # When backward has come to its end: what the others then call is no collective of this group.
            if tp.index == 0 and now == [7, spec.train.micro_batches - 1]:
                tp.all_reduce(torch.zeros(8))
        stage.forward = forward
        if ("embedding", 0) in leaves:
            leaves["embedding", 0].register_post_accumulate_grad_hook(once_more)
        return stage

PROGRAM = Mismatched()
"""


def importable(folder: Path, name: str, program: str, monkeypatch: pytest.MonkeyPatch) -> str:
    (folder / f"{name}.py").write_text(textwrap.dedent(program))
    monkeypatch.syspath_prepend(str(folder))
    folder.chmod(0o777)  # ranks, which are a user of their own, look for files there and make some
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(folder), os.environ.get("PYTHONPATH", ""))))
    return f"{name}:PROGRAM"


def test_a_program_whose_ranks_call_different_collectives_is_told_so_and_nobody_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = importable(tmp_path, "mismatched", MISMATCHED, monkeypatch)

    async def scenario() -> None:
        async with a_rig(tmp_path, num_nodes=1, num_devices=2) as rig:
            job = await rig.run(replace(a_job(steps=28), program=program, parallel=ParallelSpec(tp=2, pp=1)))
            assert isinstance(job.state, Failed), job.state
            assert "wait for each other in a circle" in job.state.message and "same collectives" in job.state.message
            assert job.committed == 6 and not job.incidents and job.generation == 1, "it would be the same again"

    asyncio.run(scenario())


def test_a_stopped_rank_and_one_that_holds_the_gil_are_named_and_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = importable(tmp_path, "hanging", PROGRAM.format(folder=str(tmp_path)), monkeypatch)
    victim = Device(NodeId("n0"), 1)

    async def scenario() -> None:
        async with a_rig(tmp_path, num_nodes=1, num_devices=2) as rig:
            spec = replace(a_job(steps=28), program=program, parallel=ParallelSpec(tp=1, pp=2))

            job = await rig.run(spec)
            for incident in job.incidents:
                print(incident.fault.message, incident.pause_s, dict(incident.phases), *incident.stack, sep="\n  ")
            assert isinstance(job.state, Succeeded), job.state
            stop_one, gil = job.incidents
            assert stop_one.fault.cause is gil.fault.cause is Cause.HANG
            assert stop_one.fault.devices == (victim,) and "stopped (SIGSTOP)" in stop_one.fault.message
            assert any("a_loop_that_holds_the_gil" in line for line in gil.stack)
            assert "slept outside any wait" in gil.fault.message and "1 rank waits for it" in gil.fault.message
            # A look that finds nobody still, on a machine that is busy with something else, costs nothing.
            assert sum(one.rolled_back for one in job.incidents) == 0
            assert largest_gap(rig.losses, spec) <= 1e-5

    asyncio.run(scenario())
