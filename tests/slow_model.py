"""The built-in program with a nap before every forward: steps take long and cost nothing, for what goes on meanwhile."""

from __future__ import annotations

import time

import torch

from orchestrator.domain.profile import Line, Profile
from orchestrator.domain.spec import JobSpec
from worker.parallel.group import Group
from worker.program import Leaves, StageModule
from worker.programs import causal_lm

NAP_S = 0.3


class SlowProgram:
    def describe(self, spec: JobSpec) -> Profile:
        return causal_lm.PROGRAM.describe(spec)

    def initial(self, spec: JobSpec, line: Line) -> torch.Tensor:
        return causal_lm.PROGRAM.initial(spec, line)

    def build(self, spec: JobSpec, first: int, last: int, tp: Group, leaves: Leaves) -> StageModule:
        module = causal_lm.PROGRAM.build(spec, first, last, tp, leaves)
        module.register_forward_pre_hook(lambda *_: time.sleep(NAP_S))
        return module


PROGRAM = SlowProgram()
