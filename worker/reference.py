"""A job's undisturbed run: one process, one device, no peers. What every plan and every recovery is compared with.

`python -m worker.reference job.json` prints {"losses": [...], "norms": [...], "evaluations": {step: loss}}; of losses and
norms one per step.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from orchestrator.domain import codec
from orchestrator.domain.generation import Answer, Evaluation
from orchestrator.domain.ids import Device, Generation, NodeId, Rank, Step
from orchestrator.domain.origin import FromSeed
from orchestrator.domain.plan import Pipeline, Plan, Seat, Stage
from orchestrator.domain.requests import FormGeneration
from orchestrator.domain.spec import CheckpointSpec, JobSpec

from .checkpoint.handover import NoSnapshots, Snapshots
from .data.sources import load
from .loop import Trainer
from .parallel.data import Messages, Posted
from .parallel.device import device_of
from .parallel.group import ALONE, Group
from .program import load_program
from .progress import Unwatched


@dataclass(frozen=True, kw_only=True)
class Alone:
    """A session of one rank: nobody to send to, and its own vote decides."""

    plan: Plan
    generation: Generation = Generation(1)
    tp: Group = ALONE
    pp: Group = ALONE
    mirror_of: Rank | None = None
    mirrored: Rank | None = None

    @property
    def ranks(self) -> Mapping[Device, Rank]:
        return {self.seat.device: self.seat.rank}

    @property
    def seat(self) -> Seat:
        return self.plan.seats[0]

    def proceed(self) -> None:
        """Nobody closes it."""

    def exchange(self, sends: Messages, receives: Messages) -> None:
        assert not sends and not receives

    def post(self, sends: Messages, receives: Messages) -> Posted:
        raise AssertionError("a rank that is alone has nobody to send to")

    stream = post

    def vote(self, ballot: torch.Tensor, num_maxima: int = 0) -> torch.Tensor:
        return ballot


def run(
    spec: JobSpec,
    steps: int | None = None,
    look: Callable[[Trainer, Answer], None] = lambda trainer, answer: None,
    snapshots: Snapshots | None = None,
    evaluated: Callable[[Evaluation], None] = lambda evaluation: None,
) -> list[Answer]:
    """The first `steps` steps of the job (all of them by default), from its seed. Raises Refused, TrainingDiverged.

    look: is shown the trainer after each step, and takes what snapshots it likes. evaluated: is told of each evaluation.
    """
    processor = device_of(spec.train.device, 0)
    processor.activate()
    spec = replace(spec, checkpoint=CheckpointSpec(every=0))
    program = load_program(spec.program)
    profile = program.describe(spec)
    device = Device(NodeId("reference"), 0)
    stage = Stage(first=0, last=profile.num_layers, devices=(device,))
    plan = Plan(pipelines=(Pipeline(stages=(stage,), micro_batches=tuple(range(spec.train.micro_batches))),))
    session = Alone(plan=plan)
    trainer = Trainer(
        spec,
        profile,
        program,
        load(spec.data),
        device,
        Unwatched(),
        snapshots or NoSnapshots(),
        processor.torch_device,
    )
    trainer.restore(
        session,
        FormGeneration(generation=session.generation, plan=plan, addresses={}, restore=FromSeed(), committed=Step(0)),
    )
    answers = []
    for step in range(1, (steps or spec.train.steps) + 1):
        answers.append(trainer.step(session, Step(step)))
        look(trainer, answers[-1])
    found = [answer.evaluation for answer in answers]
    if len(answers) == spec.train.steps:
        found.append(trainer.evaluate(session, answers[-1].step))
    for one in filter(None, found):
        evaluated(one)
    return answers


def main() -> None:
    evaluations: list[Evaluation] = []
    answers = run(codec.loads(JobSpec, Path(sys.argv[1]).read_bytes()), evaluated=evaluations.append)
    curve = {"losses": [answer.loss for answer in answers], "norms": [answer.norm for answer in answers]}
    print(json.dumps(curve | {"evaluations": {one.step: one.loss for one in evaluations}}))


if __name__ == "__main__":
    main()
