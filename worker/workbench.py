"""What one rank computes with: buffers and gradients, kept while its seat computes the same layers, and a stage's module.

It owns building them for a seat, known or only guessed. Nothing here is ever a source of state.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from orchestrator.domain.ids import Device
from orchestrator.domain.layout import Bucket
from orchestrator.domain.plan import Plan
from orchestrator.domain.profile import Profile
from orchestrator.domain.spec import JobSpec

from .emulation import Pace
from .parallel.data import Session
from .parallel.gradients import Gradients, gradients_of
from .parallel.pipeline import StageRunner
from .program import Program
from .progress import Progress
from .standby import built_for, practise, understudied
from .state.buffers import DTYPES, Buffers, Shape


class Workbench:
    """tokens: the whole text, uint8; device: where tensors are; speed: what it stands for, where the job pretends."""

    def __init__(
        self,
        spec: JobSpec,
        profile: Profile,
        program: Program,
        tokens: torch.Tensor,
        device: torch.device,
        speed: float = 1.0,
    ) -> None:
        self._spec = spec
        self._profile = profile
        self._program = program
        self._tokens = tokens
        self._device = device
        self._speed = speed
        self._gradients: Gradients | None = None
        self.buffers: Buffers | None = None
        self.stage: StageRunner | None = None

    def build(
        self, session: Session, plan_buckets: Sequence[Bucket], progress: Progress
    ) -> tuple[StageRunner, Buffers, Gradients]:
        """Everything for the session's seat; what there is of the right shape is used again."""
        plan, seat = session.plan, session.seat
        shape = Shape.of(plan, seat)
        buffers, gradients = self.buffers, self._gradients
        if buffers is None or gradients is None or buffers.shape != shape:
            used = [bucket for bucket in plan_buckets if seat.rank in bucket.shares]
            buffers = Buffers(self._profile, shape, used, DTYPES[self._spec.train.dtype], self._device)
            gradients = self._take(buffers)
        # The module is bound to the generation's tp group; it owns no tensors, so making it anew is cheap.
        module = self._program.build(self._spec, shape.first, shape.last, session.tp, buffers.leaves)
        self.stage = StageRunner(
            train=self._spec.train,
            evaluation=self._spec.evaluation,
            module=module,
            pipeline=plan.pipelines[seat.pipeline],
            seat=seat,
            pp=session.pp,
            tokens=self._tokens,
            device=self._device,
            progress=progress,
            collect=gradients.collect,
            proceed=session.proceed,
            pace=Pace(self._spec.train.emulated_layer_s, self._speed, shape.last - shape.first, plan.tp),
        )
        return self.stage, buffers, gradients

    def practise(self, plan: Plan, me: Device) -> None:
        """Be as ready as can be for a seat of `plan`, whichever it will be."""
        seat = understudied(plan, self._profile, me)
        if self.buffers is None or self.buffers.shape != Shape.of(plan, seat):
            memory = built_for(plan, self._profile, seat, DTYPES[self._spec.train.dtype], self._device)
            practise(self._spec, self._profile, self._program, plan, seat, memory)
            self._take(memory)

    def clear(self) -> None:
        """Let the stage go: the next one is built for another session. Buffers stay."""
        self.stage = None

    def another(self) -> Workbench:
        """An empty one, for who must not touch anything of this one's."""
        return Workbench(self._spec, self._profile, self._program, self._tokens, self._device, self._speed)

    def _take(self, buffers: Buffers) -> Gradients:
        self.buffers, self._gradients = buffers, gradients_of(self._spec.train, self._profile, buffers)
        return self._gradients
