"""A checkpoint of a whole tiny model, written by several devices as a job's would be, without anybody training."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from orchestrator.adapters import manifest, spec_file
from orchestrator.adapters.starting_point import Found, find
from orchestrator.domain.errors import Refused
from orchestrator.domain.generation import Answer
from orchestrator.domain.ids import Device, Generation, JobId, NodeId, Step
from orchestrator.domain.layout import buckets
from orchestrator.domain.plan import Pipeline, Plan, Stage
from orchestrator.domain.spec import JobSpec
from worker.checkpoint.shard import ShardWriter
from worker.checkpoint.snapshot import Snapshot
from worker.data import sources
from worker.parallel.optimizer import adamw
from worker.programs.causal_lm import PROGRAM
from worker.state.holdings import Holdings


def a_plan(num_layers: int, micro_batches: int = 2) -> Plan:
    """tp2 x pp2 on two nodes."""
    cut = num_layers // 2
    devices = [Device(NodeId(f"n{index // 2}"), index % 2) for index in range(4)]
    stages = (
        Stage(first=0, last=cut, devices=tuple(devices[:2])),
        Stage(first=cut, last=num_layers, devices=tuple(devices[2:])),
    )
    return Plan(pipelines=(Pipeline(stages=stages, micro_batches=tuple(range(micro_batches))),))


def state_of(spec: JobSpec, seed: int = 0) -> dict[str, torch.Tensor]:
    """Line -> (3, numel): initial weights moved a little, and moments that belong to nothing."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for line in PROGRAM.describe(spec).lines:
        moved = torch.randn(3, line.numel, generator=generator) * 0.05
        moved[2].abs_()  # a mean of squares
        state[line.name] = moved + torch.stack([PROGRAM.initial(spec, line), *torch.zeros(2, line.numel)])
    return state


def gradient_of(spec: JobSpec, seed: int = 0) -> dict[str, torch.Tensor]:
    """Line -> (numel,)."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return {line.name: torch.randn(line.numel, generator=generator) for line in PROGRAM.describe(spec).lines}


def updated(
    spec: JobSpec, state: dict[str, torch.Tensor], gradient: dict[str, torch.Tensor], step: int
) -> dict[str, torch.Tensor]:
    """What training has after `step`, whose gradient that was."""
    after = {name: rows.clone() for name, rows in state.items()}
    for line in PROGRAM.describe(spec).lines:
        adamw(spec.train, answer_of(step), after[line.name], gradient[line.name], [(0, line.numel)] if line.decay else [])
    return after


def answer_of(step: int) -> Answer:
    return Answer(step=Step(step), norm=0.5, losses=(3.0 / step, 2.0 / step))


def save_entry(folder: Path, spec: JobSpec, gradient: dict[str, torch.Tensor], step: int, generation: int = 1) -> Found:
    """A journal entry, which goes on from the checkpoint of the step before."""

    def snapshot(held: Holdings) -> Snapshot:
        for interval in held.intervals:
            position = interval.start
            for part in held.gradients(interval):
                part.copy_(gradient[interval.line][position : position + len(part)])
                position += len(part)
        return Snapshot.of_gradient(held, Generation(generation), answer_of(step))

    return _saved(folder, spec, snapshot, step, generation)


def save(folder: Path, spec: JobSpec, state: dict[str, torch.Tensor], step: int = 5, generation: int = 1) -> Found:
    """In `folder`, as the job of `spec` would have it."""

    def snapshot(held: Holdings) -> Snapshot:
        for interval in held.intervals:
            held.fill(interval, state[interval.line][:, interval.start : interval.stop])
        return Snapshot.of(held, Generation(generation))

    return _saved(folder, spec, snapshot, step, generation)


def _saved(folder: Path, spec: JobSpec, snapshot: Callable[[Holdings], Snapshot], step: int, generation: int) -> Found:
    profile = PROGRAM.describe(spec)
    with suppress(Refused):  # of no text, where a test has none
        profile = replace(profile, text_sha256=sources.digest(sources.load(spec.data)))
    plan = a_plan(profile.num_layers, spec.train.micro_batches)
    shards = []
    for seat in plan.seats:
        held = Holdings(buckets(plan, profile), seat.rank, None, Generation(generation), torch.device("cpu"))
        held.step = Step(step)
        shards.append(ShardWriter(folder, profile, seat.device).write(snapshot(held)))
    spec_file.keep(folder, spec_file.Kept(job=JobId("job-1"), spec=spec, profile=profile))
    path = folder / manifest.directory_name(Step(step), Generation(generation))
    manifest.commit(path, Step(step), Generation(generation), spec_file.hash_of(spec), spec.train.seed, shards)
    return find(path)
