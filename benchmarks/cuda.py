"""What exact mode, hashes and snapshots cost on one CUDA device. Needs one, and neither Ray nor Redis.

    python -m benchmarks.cuda [--layers 12 --width 768 --sequence 1024 --micro-batch-size 8 --steps 8]

One rank, no peers: the last line of output is one JSON object, seconds unless said otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median

import torch

from orchestrator.domain.generation import Answer
from orchestrator.domain.ids import Device, Generation, NodeId, Rank, Step
from orchestrator.domain.layout import buckets
from orchestrator.domain.origin import FromSeed
from orchestrator.domain.plan import Pipeline, Plan, Stage
from orchestrator.domain.requests import FormGeneration
from orchestrator.domain.spec import CheckpointSpec, DataSpec, JobSpec, TrainSpec
from worker.checkpoint.custody import Custody
from worker.checkpoint.handover import NoSnapshots
from worker.checkpoint.tray import Tray
from worker.data.sources import load
from worker.digest import digest
from worker.loop import Trainer
from worker.parallel.device import CudaDevice
from worker.parallel.optimizer import adamw
from worker.program import load_program
from worker.progress import Unwatched
from worker.reference import Alone
from worker.state.holdings import Holdings

ROUNDS = 5


def main() -> None:
    options = _options()
    if not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device here; run this where nvidia-smi shows one")
    device = CudaDevice(0)
    device.activate()
    spec = _spec(options)
    found: dict[str, object] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "parameters": sum(line.numel for line in load_program(spec.program).describe(spec).lines),
        "tokens_a_step": 4 * options.micro_batch_size * options.sequence,
    }
    for dtype in ("fp32", "bf16"):
        for exact in (False, True):
            train = replace(spec.train, dtype=dtype, exact=exact)
            found[f"step_{dtype}_{'exact' if exact else 'plain'}"] = _step(replace(spec, train=train), device)
    found |= _holding(spec, device)
    print(json.dumps(found))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for name, value in (("layers", 12), ("width", 768), ("sequence", 1024), ("micro-batch-size", 8), ("steps", 8)):
        parser.add_argument(f"--{name}", type=int, default=value)
    return parser.parse_args()


def _spec(options: argparse.Namespace) -> JobSpec:
    return JobSpec(
        name="cuda",
        program="causal_lm",
        data=DataSpec(files=("{stdlib}/json/*.py",)),
        train=TrainSpec(
            steps=options.steps,
            micro_batches=4,
            micro_batch_size=options.micro_batch_size,
            sequence=options.sequence,
            device="cuda",
        ),
        model={"layers": options.layers, "width": options.width, "heads": options.width // 64, "ffn": 4 * options.width},
        checkpoint=CheckpointSpec(every=0),
    )


def _alone(spec: JobSpec) -> Plan:
    stage = Stage(first=0, last=load_program(spec.program).describe(spec).num_layers, devices=(Device(NodeId("n"), 0),))
    return Plan(pipelines=(Pipeline(stages=(stage,), micro_batches=tuple(range(spec.train.micro_batches))),))


def _step(spec: JobSpec, device: CudaDevice) -> float:
    program, plan = load_program(spec.program), _alone(spec)
    trainer = Trainer(
        spec,
        program.describe(spec),
        program,
        load(spec.data),
        plan.devices[0],
        Unwatched(),
        NoSnapshots(),
        device.torch_device,
    )
    session = Alone(plan=plan)
    form = FormGeneration(generation=Generation(1), plan=plan, addresses={}, restore=FromSeed(), committed=Step(0))
    trainer.restore(session, form)
    times = [_timed(partial(trainer.step, session, Step(step))) for step in range(1, spec.train.steps + 1)]
    return median(times[3:])


def _holding(spec: JobSpec, device: CudaDevice) -> dict[str, float]:
    """What is done with state and gradients outside of forward and backward; an owner without a mirror's part."""
    profile, plan = load_program(spec.program).describe(spec), _alone(spec)
    held = Holdings(buckets(plan, profile), Rank(0), None, Generation(1), device.torch_device)
    answer = Answer(step=Step(1), norm=1.0, losses=(1.0,))
    custody = Custody(plan.devices[0])
    tray = Tray(tuple(map(os.dup, custody.fds)), plan.devices[0], device.torch_device, lambda _: None, lambda _: False)
    tray.lay_out(held)
    while tray.is_touching:
        time.sleep(0.01)

    def hand_over() -> None:
        tray.take(held, Generation(1), None)

    def settle() -> None:
        tray.copied()
        for place in custody.find():
            custody.settle(place)

    work: dict[str, Callable[[], object]] = {
        "update": lambda: adamw(spec.train, answer, held.state, held.gradient, held.decayed),
        "hash": lambda: digest(*held.state).item(),
    }
    found = {"state_mb": held.state.nbytes / 1e6}
    for name, do in work.items():
        do()
        found[name] = median(_timed(do) for _ in range(ROUNDS))
    stalls, copies = [], []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        hand_over()
        stalls.append(time.perf_counter() - began)
        settle()
        copies.append(time.perf_counter() - began)
    tray.close()
    custody.leave()
    # What training waits for, and until when the state may not change: the copy goes on beside what is computed.
    return {**found, "snapshot_stall": median(stalls), "snapshot_copied": median(copies)}


def _timed(do: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    do()
    torch.cuda.synchronize()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
