"""What the peers stand on: the job's program as plain torch modules, its samples, and a file with a line per step.

Only the model, the text and the order of samples are ours here; a peer brings its own parallelism, optimizer and loop.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from orchestrator.domain import codec
from orchestrator.domain.ids import Step
from orchestrator.domain.profile import Profile
from orchestrator.domain.spec import JobSpec, TrainSpec
from worker.data.sampling import batch, sample_indices
from worker.data.sources import load, num_samples
from worker.parallel.group import ALONE
from worker.parallel.schedule import learning_rate
from worker.parentage import die_with_parent
from worker.program import Program, StageModule, load_program


class Ground:
    """The job in `spec_file`, as this rank sees it; where no rank is given, the one that torchrun made of this process."""

    def __init__(self, spec_file: str, rank: int | None = None, world_size: int | None = None) -> None:
        torch.set_num_threads(1)
        self.rank = int(os.environ["RANK"]) if rank is None else rank
        self.world_size = int(os.environ["WORLD_SIZE"]) if world_size is None else world_size
        self.spec = codec.loads(JobSpec, Path(spec_file).read_bytes())
        self.program: Program = load_program(self.spec.program)
        self.profile: Profile = self.program.describe(self.spec)
        self.tokens = load(self.spec.data)
        self._num_samples = num_samples(self.tokens, self.spec.train.sequence)

    @property
    def train(self) -> TrainSpec:
        return self.spec.train

    def module(self, first: int, last: int) -> StageModule:
        """Layers first..last-1 around parameters of their own, whole (tp 1), with the job's initial values."""
        leaves = {
            (line.name, layer): nn.Parameter(self.program.initial(self.spec, line).view(line.shape))
            for line in self.profile.lines
            for layer in line.layers
            if first <= layer < last
        }
        return self.program.build(self.spec, first, last, ALONE, leaves)

    def batch(self, step: int, ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of these micro-batches, (len(ids) * B, T) each."""
        train = self.train
        indices = [
            index
            for number in ids
            for index in sample_indices(
                train.seed, step, number, train.micro_batches, train.micro_batch_size, self._num_samples
            )
        ]
        return batch(self.tokens, indices, train.sequence)

    def optimizer(self, module: nn.Module) -> torch.optim.AdamW:
        """torch's own, with the job's settings; matrices decay, norms do not."""
        train, parameters = self.train, list(module.parameters())
        groups: list[dict[str, Any]] = [
            {"params": [parameter for parameter in parameters if parameter.dim() > 1]},
            {"params": [parameter for parameter in parameters if parameter.dim() == 1], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(
            groups,
            lr=train.learning_rate,
            betas=(train.beta1, train.beta2),
            eps=train.epsilon,
            weight_decay=train.weight_decay,
        )

    def set_rate(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(self.train, Step(step))


class StepLog:
    """A line per step: instant (wall clock, s), step, gradients' norm, rank, pid, CPU time so far (s), replicas in it."""

    def __init__(self, path: str, rank: int) -> None:
        self._file = Path(path).open("a", buffering=1)  # noqa: SIM115
        self._rank = rank

    def done(self, step: int, norm: float, members: int = 0) -> None:
        """members: 0 where a step always has everybody's gradients."""
        used = time.process_time()
        self._file.write(f"{time.time():.6f} {step} {norm:.9g} {self._rank} {os.getpid()} {used:.3f} {members}\n")


def arguments(count: int) -> list[str]:
    """This script's, which from here on ends with whoever started it: where torchrun is killed, nobody else would end its
    workers. Exits with a word about them where their number is another."""
    die_with_parent(os.getppid())
    if len(sys.argv) != count + 1:
        sys.exit(f"{sys.argv[0]} takes {count} arguments, {len(sys.argv) - 1} were given; see its docstring")
    return sys.argv[1:]
