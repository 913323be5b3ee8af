"""A checkpoint of a whole tiny model, written by several devices as a job's would be, without anybody training."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from orchestrator.adapters import manifest, spec_file
from orchestrator.adapters.starting_point import Found, find
from orchestrator.domain.errors import Refused
from orchestrator.domain.ids import Device, Generation, JobId, NodeId, Step
from orchestrator.domain.layout import buckets
from orchestrator.domain.plan import Pipeline, Plan, Stage
from orchestrator.domain.spec import JobSpec
from worker.checkpoint.shard import ShardWriter
from worker.checkpoint.snapshot import Snapshot
from worker.data import sources
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
        state[line.name] = moved + torch.stack([PROGRAM.initial(spec, line), torch.zeros(2, line.numel)[0], moved[2]])
    return state


def save(folder: Path, spec: JobSpec, state: dict[str, torch.Tensor], step: int = 5, generation: int = 1) -> Found:
    """In `folder`, as the job of `spec` would have it."""
    profile = PROGRAM.describe(spec)
    with suppress(Refused):  # of no text, where a test has none
        profile = replace(profile, text_sha256=sources.digest(sources.load(spec.data)))
    plan = a_plan(profile.num_layers, spec.train.micro_batches)
    shards = []
    for seat in plan.seats:
        held = Holdings(buckets(plan, profile), seat.rank, None, Generation(generation), torch.device("cpu"))
        held.step = Step(step)
        for interval in held.intervals:
            held.fill(interval, state[interval.line][:, interval.start : interval.stop])
        shards.append(ShardWriter(folder, profile, seat.device).write(Snapshot.of(held, Generation(generation))))
    spec_file.keep(folder, spec_file.Kept(job=JobId("job-1"), spec=spec, profile=profile))
    path = folder / manifest.directory_name(Step(step), Generation(generation))
    manifest.commit(path, Step(step), Generation(generation), spec_file.hash_of(spec), spec.train.seed, shards)
    return find(path)
