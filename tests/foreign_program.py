"""The built-in program as a user's own, which has words of its own for another library."""

from __future__ import annotations

import torch

from orchestrator.domain.profile import Line, Profile
from orchestrator.domain.spec import JobSpec
from worker.checkpoint.foreign import Foreign, ForeignTensor
from worker.parallel.group import Group
from worker.program import Leaves, StageModule
from worker.programs import causal_lm


class Mine:
    def describe(self, spec: JobSpec) -> Profile:
        return causal_lm.PROGRAM.describe(spec)

    def initial(self, spec: JobSpec, line: Line) -> torch.Tensor:
        return causal_lm.PROGRAM.initial(spec, line)

    def build(self, spec: JobSpec, first: int, last: int, tp: Group, leaves: Leaves) -> StageModule:
        return causal_lm.PROGRAM.build(spec, first, last, tp, leaves)

    def foreign(self, spec: JobSpec) -> Foreign:
        """A line may be several tensors there."""
        tensors = [
            ForeignTensor(name=f"mine.{line.name}", line=line.name, shape=line.shape)
            for line in self.describe(spec).lines
            if line.name != "head"
        ]
        rows, width = self.describe(spec).lines[-1].shape
        half = rows // 2
        tensors += [
            ForeignTensor(name="mine.head.low", line="head", shape=(half, width), turn=lambda head: head[:half]),
            ForeignTensor(name="mine.head.high", line="head", shape=(half, width), turn=lambda head: head[half:]),
        ]
        return Foreign(config={"model_type": "mine"}, tensors=tuple(tensors), files={"words.txt": b"mine"})


PROGRAM = Mine()
