"""A rank that stands by builds what it can before its role is known: buffers, module, and one step for practice.

The heaviest stage of the plan that runs is built, so that no other needs more memory than has been touched; where the role
turns out to be that stage, its buffers are taken as they are. Nothing that is computed here is ever used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from orchestrator.domain.generation import Answer
from orchestrator.domain.ids import Device, Generation, Rank, Step
from orchestrator.domain.layout import Bucket, buckets, partners
from orchestrator.domain.plan import Plan, Seat
from orchestrator.domain.profile import Profile
from orchestrator.domain.spec import JobSpec

from .parallel.alternation import backward
from .parallel.group import Group
from .parallel.optimizer import adamw
from .program import Program
from .state.buffers import Buffers, Shape
from .state.holdings import Holdings


def understudied(plan: Plan, profile: Profile, me: Device) -> Seat:
    """The seat to be built for: of the stage with most parameters, at the tp index this device would most likely get."""
    weight = [0] * profile.num_layers
    for line in profile.lines:
        for layer in line.layers:
            weight[layer] += line.numel

    def size(seat: Seat) -> int:
        stage = plan.stage_at(seat)
        return sum(weight[stage.first : stage.last])

    return max((seat for seat in plan.seats if seat.tp == me.index % plan.tp), key=lambda seat: (size(seat), -seat.rank))


def practise(spec: JobSpec, profile: Profile, program: Program, plan: Plan, seat: Seat, memory: Buffers) -> None:
    """One micro-batch of `seat` forward and backward in `memory` and one update, with a tp group of one that pretends."""
    stage, shape = plan.stage_at(seat), memory.shape
    tp = _Pretending("practice", tuple(Rank(t) for t in range(shape.degree)), seat.tp, None)
    module = program.build(spec, stage.first, stage.last, tp, memory.leaves)
    device = memory.compute.device
    tokens = torch.zeros(spec.train.micro_batch_size, spec.train.sequence, dtype=torch.int64, device=device)
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    if stage.first == 0:
        x = tokens
    else:
        x = torch.zeros(module.hidden_shape, dtype=module.hidden_dtype, device=device, requires_grad=True)
    y = module(x, ids=zero, step=zero)
    if stage.last == profile.num_layers:
        backward(module.loss(y, tokens))
    else:
        backward(y, torch.zeros_like(y))
    held = _largest(buckets(plan, profile), plan, spec.recovery.mirrors, device)
    answer = Answer(step=Step(1), norm=0.0, losses=(0.0,))
    adamw(replace(spec.train, micro_batches=1), answer, held.state, held.gradient, held.decayed)
    memory.zero()


def built_for(plan: Plan, profile: Profile, seat: Seat, dtype: torch.dtype, device: torch.device) -> Buffers:
    used = [bucket for bucket in buckets(plan, profile) if seat.rank in bucket.shares]
    memory = Buffers(profile, Shape.of(plan, seat), used, dtype, device)
    memory.compute.zero_()  # touched: the system hands pages out on the first write
    return memory


def _largest(found: Sequence[Bucket], plan: Plan, mirrors: int, device: torch.device) -> Holdings:
    """The most that any rank of the plan holds: its pages are given back to the allocator, not to the system."""
    partner = {mirror: owner for owner, mirror in partners(plan).items()} if mirrors else {}
    of = plan.seat_of
    mirrored = {seat.rank: of[partner[seat.device]].rank if seat.device in partner else None for seat in plan.seats}

    def owned(rank: Rank | None) -> int:
        shares = [bucket.shares.get(rank, (0, 0)) for bucket in found] if rank is not None else []
        return sum(stop - start for start, stop in shares)

    rank = max(mirrored, key=lambda rank: (owned(rank) + owned(mirrored[rank]), -rank))
    return Holdings(found, rank, mirrored[rank], Generation(0), device)


class _Pretending(Group):
    """A group of several that asks nobody: shapes are right, values mean nothing."""

    def all_gather_into(self, out: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        out.view(self.size, -1).copy_(tensor.view(1, -1).expand(self.size, -1))
        return out

    def reduce_scatter_into(self, out: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        out.view(-1).copy_(tensor.view(self.size, -1)[self.index])
        return out

    def all_to_all(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        for out in outputs:
            out.zero_()
