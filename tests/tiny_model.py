"""A causal language model small enough for tests, and the leaves any tp rank of it would be given."""

from __future__ import annotations

import torch
from torch import nn

from orchestrator.domain.profile import Profile
from orchestrator.domain.spec import DataSpec, JobSpec, TrainSpec
from worker.parallel.group import Group
from worker.program import Leaves, StageModule
from worker.programs.causal_lm import DTYPES, PROGRAM

MODEL: dict[str, object] = {"layers": 2, "width": 32, "heads": 8, "kv_heads": 4, "ffn": 48}


def a_spec(*, train: dict[str, object] | None = None, **model: object) -> JobSpec:
    """Two blocks, 2 x 2 sequences of 16; a model setting of None is left out."""
    settings = {"steps": 5, "micro_batches": 2, "micro_batch_size": 2, "sequence": 16, **(train or {})}
    given = {name: value for name, value in {**MODEL, **model}.items() if value is not None}
    return JobSpec(
        name="test",
        program="causal_lm",
        data=DataSpec(files=("*.txt",)),
        train=TrainSpec(**settings),  # type: ignore[arg-type]
        model=given,
    )


def leaves_of(spec: JobSpec, tp: Group, first: int = 0, last: int | None = None) -> dict[tuple[str, int], nn.Parameter]:
    """Initial leaves of layers first..last-1. Norms are moved off one, so that a wrong gradient shows."""
    profile = PROGRAM.describe(spec)
    leaves = {}
    for line in profile.lines:
        whole = PROGRAM.initial(spec, line).view(line.shape)
        if not line.split:
            whole = whole + torch.linspace(-0.3, 0.3, line.numel)
        part = whole.chunk(tp.size)[tp.index] if line.split else whole
        for layer in line.layers:
            if first <= layer < (profile.num_layers if last is None else last):
                leaves[line.name, layer] = nn.Parameter(part.to(DTYPES[spec.train.dtype], copy=True))
    return leaves


def whole_model(spec: JobSpec, tp: Group) -> tuple[Profile, StageModule, dict[tuple[str, int], nn.Parameter]]:
    profile, leaves = PROGRAM.describe(spec), leaves_of(spec, tp)
    return profile, PROGRAM.build(spec, 0, profile.num_layers, tp, leaves), leaves


def tokens_of(spec: JobSpec, micro_batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """inputs and targets (B, T) of a micro-batch."""
    generator = torch.Generator().manual_seed(micro_batch)
    shape = (spec.train.micro_batch_size, spec.train.sequence + 1)
    tokens = torch.randint(0, 256, shape, generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def number(value: int) -> torch.Tensor:
    """As ids and steps are handed to a stage: int64, shape (1,)."""
    return torch.tensor([value])


def step_gradients(spec: JobSpec, model: StageModule, leaves: Leaves, step: int = 3) -> list[float]:
    """Runs every micro-batch forward and backward; gradients stay in the leaves, losses are returned."""
    losses = []
    for micro_batch in range(spec.train.micro_batches):
        inputs, targets = tokens_of(spec, micro_batch)
        loss = model.loss(model(inputs, number(micro_batch), number(step)), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.item())
    return losses
