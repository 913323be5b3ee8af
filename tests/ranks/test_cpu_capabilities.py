"""Owner and mirror get the same bits on CPUs of different vector width: two ranks, each with a capability of its own.

torch picks its kernels once per process, so each rank is a process started with ATEN_CPU_CAPABILITY; this file is what it
runs.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from orchestrator.domain.ids import Device, Generation, JobId, NodeId, Step
from orchestrator.domain.origin import FromSeed
from orchestrator.domain.plan import Pipeline, Plan, Stage
from orchestrator.domain.requests import FormGeneration
from orchestrator.domain.spec import CheckpointSpec, DataSpec, JobSpec, TrainSpec
from worker.checkpoint.handover import NoSnapshots
from worker.data.sources import load
from worker.loop import Trainer
from worker.program import load_program
from worker.progress import Unwatched
from worker.session import Session

pytestmark = pytest.mark.timeout(300)

SPEC = JobSpec(
    name="two",
    program="causal_lm",
    data=DataSpec(files=("{stdlib}/json/*.py",)),
    train=TrainSpec(steps=20, micro_batches=2, micro_batch_size=1, sequence=32, warmup_steps=1),
    model={"layers": 1, "width": 32, "heads": 4, "kv_heads": 2, "ffn": 64},
    checkpoint=CheckpointSpec(every=0),
)
DEVICES = (Device(NodeId("a"), 0), Device(NodeId("b"), 0))
PLAN = Plan(
    pipelines=tuple(
        Pipeline(stages=(Stage(first=0, last=3, devices=(device,)),), micro_batches=(number,))
        for number, device in enumerate(DEVICES)
    )
)
MODES = (False, True)
"""exact or not."""
CAPABILITIES = {"default": "DEFAULT", "avx2": "AVX2", "avx512": "AVX512"}


def cpu_has(capability: str) -> bool:
    wanted = {"default": [], "avx2": ["avx2", "fma"], "avx512": ["avx512f", "avx512bw", "avx512vl", "avx512dq", "fma"]}
    flags = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")), "").split()
    return set(wanted[capability]) <= set(flags)


@pytest.mark.parametrize(("first", "second"), [("default", "avx2"), ("avx2", "avx512"), ("avx512", "default")])
def test_owner_and_mirror_apply_the_same_bits(first: str, second: str) -> None:
    """In one generation as floats are summed, and in the next one in exact mode."""
    for capability in (first, second):
        if not cpu_has(capability):
            pytest.skip(f"this CPU has no {capability}: bits of owner and mirror are NOT compared under it here")
    one, other = _train((first, second))
    assert (one["capability"], other["capability"]) == (CAPABILITIES[first], CAPABILITIES[second])
    assert len(one["runs"]) == len(other["runs"]) == len(MODES)
    for mine, theirs in zip(one["runs"], other["runs"], strict=True):
        assert mine["losses"] == theirs["losses"] and len(mine["losses"]) == 5
        assert mine["owned"] == theirs["mirrored"]
        assert theirs["owned"] == mine["mirrored"]
        assert mine["owned"] != theirs["owned"]


def _train(capabilities: tuple[str, str]) -> list[dict[str, Any]]:
    listeners = [socket.create_server(("127.0.0.1", 0), backlog=8) for _ in capabilities]
    addresses = [f"127.0.0.1:{listener.getsockname()[1]}" for listener in listeners]
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(number), str(listener.fileno()), *addresses],
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=[listener.fileno()],
            env={**os.environ, "ATEN_CPU_CAPABILITY": capability, "PYTHONPATH": str(Path(__file__).parents[2])},
        )
        for number, (capability, listener) in enumerate(zip(capabilities, listeners, strict=True))
    ]
    try:
        for process in processes:
            assert process.wait(200) == 0
        return [json.loads(process.stdout.read()) for process in processes if process.stdout is not None]
    finally:
        for process in processes:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        for listener in listeners:
            listener.close()


def _rank(number: int, listener: int, addresses: list[str]) -> dict[str, Any]:
    torch.set_num_threads(1)
    calls = socket.socket(fileno=listener)
    runs = [_run(number, calls, addresses, Generation(n), exact) for n, exact in enumerate(MODES, start=1)]
    return {"capability": torch.backends.cpu.get_cpu_capability(), "runs": runs}


def _run(number: int, calls: socket.socket, addresses: list[str], generation: Generation, exact: bool) -> dict[str, Any]:
    spec = replace(SPEC, train=replace(SPEC.train, exact=exact))
    program = load_program(spec.program)
    profile = program.describe(spec)
    form = FormGeneration(
        generation=generation,
        plan=PLAN,
        addresses=dict(zip(DEVICES, addresses, strict=True)),
        restore=FromSeed(),
        committed=Step(0),
    )
    session = Session(
        plan=PLAN,
        profile=profile,
        seat=PLAN.seats[number],
        generation=form.generation,
        job=JobId("two"),
        listener=calls,
        addresses=form.addresses,
        mirrors=1,
        moves=(),
        backend="links",
        progress=Unwatched(),
        form_timeout_s=60.0,
    )
    session.open()
    trainer = Trainer(spec, profile, program, load(spec.data), DEVICES[number], Unwatched(), NoSnapshots())
    trainer.restore(session, form)
    answers = [trainer.step(session, Step(step)) for step in range(1, 6)]
    held = trainer.holdings
    assert held is not None
    session.close()
    return {
        "losses": [answer.losses for answer in answers],
        "owned": _hash(held.state[:, : held.owned]),
        "mirrored": _hash(held.state[:, held.owned :]),
    }


def _hash(state: torch.Tensor) -> str:
    return hashlib.sha256(state.contiguous().numpy().tobytes()).hexdigest()


if __name__ == "__main__":
    print(json.dumps(_rank(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])))
