"""What a job's first step would else import and set up is done once, before ranks are forked from who did it.

It owns a step in miniature: every kind of layer, both ends of a pipeline, one update. Nothing computed here is ever used.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from orchestrator.domain.generation import Answer
from orchestrator.domain.ids import Device, Generation, NodeId, Rank, Step
from orchestrator.domain.layout import buckets
from orchestrator.domain.plan import Pipeline, Plan, Seat, Stage
from orchestrator.domain.profile import Profile
from orchestrator.domain.spec import JobSpec

from .parallel.alternation import backward
from .parallel.group import ALONE
from .parallel.optimizer import adamw
from .program import Program
from .state.buffers import DTYPES, Buffers, Shape
from .state.holdings import Holdings


def warm(spec: JobSpec, profile: Profile, program: Program) -> None:
    """Run whatever a rank would else import or set up in its first step, in this process, starting no thread.

    The first and the last two layers go forward and backward once, as stages of two pipelines of one rank would, on one
    short sequence; then one optimizer step. With a torch that is built for CUDA they go forward only: in its first backward
    autograd looks for devices, hidden ones too, which starts a thread of the driver's and one for each device found.
    """
    torch.set_num_threads(1)
    train = replace(spec.train, micro_batches=1, micro_batch_size=1, sequence=min(spec.train.sequence, 64))
    spec = replace(spec, train=train)
    depth = profile.num_layers
    device = Device(NodeId("warm"), 0)
    for first, last in sorted({(0, min(2, depth)), (max(depth - 2, 0), depth)}):
        lines = tuple(line for line in profile.lines if any(first <= layer < last for layer in line.layers))
        part = replace(profile, lines=lines)
        plan = Plan(pipelines=(Pipeline(stages=(Stage(first=first, last=last, devices=(device,)),), micro_batches=(0,)),))
        seat = Seat(rank=Rank(0), device=device, pipeline=0, stage=0, tp=0)
        used = buckets(plan, part)
        held = Holdings(used, Rank(0), None, Generation(0), torch.device("cpu"))
        memory = Buffers(part, Shape.of(plan, seat), used, DTYPES[train.dtype], torch.device("cpu"))
        module = program.build(spec, first, last, ALONE, memory.leaves)
        tokens = torch.zeros(1, train.sequence, dtype=torch.int64)
        zero = torch.zeros(1, dtype=torch.int64)
        x = tokens if first == 0 else torch.zeros(module.hidden_shape, dtype=module.hidden_dtype, requires_grad=True)
        y = module(x, ids=zero, step=zero)
        gradient = None if last == depth else torch.ones_like(y)
        y = module.loss(y, tokens) if last == depth else y
        if not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
            backward(y, gradient)
        adamw(train, Answer(step=Step(1), norm=0.0, losses=(0.0,)), held.state, held.gradient, held.decayed)
