"""The pipeline axis: one rank's stage through every micro-batch of a step, forward and backward.

Losses are divided by the tokens of the whole step, so that gradients of all pipelines simply add up. Nothing here knows of
owners, votes or generations, nor in which order the stages take their micro-batches (alternation.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from orchestrator.domain.ids import Step
from orchestrator.domain.plan import Pipeline, Seat
from orchestrator.domain.spec import EvaluationSpec, TrainSpec

from ..backlog import AHEAD, backlog_of
from ..data.sampling import batch, evaluated_by, sample_indices, split
from ..data.sources import num_samples
from ..emulation import Pace
from ..program import StageModule
from ..progress import Progress
from ..stopwatch import stopwatch_of
from .alternation import Alternation
from .group import Group


class StageRunner:
    """Runs `module`, this seat's stage, on the micro-batch ids of its pipeline.

    tokens: the whole text, uint8; every rank has it, the first stage reads inputs and the last one targets. evaluation: how
    much of its end is held out.
    collect: called with each micro-batch's id after its backward. pace: how long computing takes at least. proceed: called
    before each, and may raise: where there is one stage alone, nothing else would end a step that nobody waits for.
    """

    def __init__(
        self,
        *,
        train: TrainSpec,
        evaluation: EvaluationSpec,
        module: StageModule,
        pipeline: Pipeline,
        seat: Seat,
        pp: Group,
        tokens: torch.Tensor,
        device: torch.device,
        progress: Progress,
        collect: Callable[[int], None],
        proceed: Callable[[], None],
        pace: Pace,
    ) -> None:
        self._train = train
        self._module = module
        self._ids = pipeline.micro_batches
        self._is_first = seat.stage == 0
        self._is_last = seat.stage == len(pipeline.stages) - 1
        self._tokens, self._held_out = split(tokens, train, evaluation)
        self._evaluated = evaluated_by(self._ids, train.micro_batches, evaluation.micro_batches)
        self._num_samples = num_samples(self._tokens, train.sequence)
        self._device = device
        self._progress = progress
        self._collect = collect
        self._proceed = proceed
        self._scale = 1.0 / (train.micro_batches * train.micro_batch_size * train.sequence)
        self._sums: list[torch.Tensor] = []
        self._passed = 0
        self._pace = pace
        self._stopwatch = stopwatch_of(device)
        self._backlog = backlog_of(device, progress)
        self._order = Alternation(pp, module.hidden_shape, module.hidden_dtype, device, pace, self._stopwatch)

    def run(self, step: Step, notice: Callable[[int], None] | None = None) -> dict[int, float]:
        """Gradients are added to the leaves'. Returns, on the last stage, id -> mean loss of that micro-batch's tokens.

        notice: called with each id after its backward, before `collect` is. Raises Aborted, PeerLost, and whatever the
        program raises.
        """

        def done(number: int) -> None:
            if notice is not None:
                notice(number)
            self._collect(number)

        self._pass(step, self._ids, done)
        if not self._is_last:
            return {}
        tokens = self._train.micro_batch_size * self._train.sequence
        return {number: total / tokens for number, total in zip(self._ids, torch.stack(self._sums).tolist(), strict=True)}

    def computed_s(self) -> float:
        """Per micro-batch, since this was asked last. Only once all of it has been waited for."""
        passed, self._passed = self._passed, 0
        return self._stopwatch.take() / passed if passed else 0.0

    def recompute(self, step: Step, number: int) -> None:
        """Add to the leaves' gradients those of one id, of any pipeline, and no more; every rank of this one calls it."""
        self._pass(step, (number,), lambda _: None)

    def evaluate(self) -> float:
        """The held-out text through the weights as they are, without dropout: on the last stage the summed loss of the
        tokens that this pipeline evaluates, elsewhere 0.0.

        Sums of fp32 numbers of like size in fp64 are exact, so that it does not matter who adds up which.
        """
        numbers = self._evaluated
        inputs, targets = self._held_out_data(numbers)
        totals: list[torch.Tensor] = []

        def forward(place: int, given: torch.Tensor | None) -> torch.Tensor:
            self._backlog.wait(AHEAD, self._proceed)
            self._progress.micro_batch(numbers[place])
            with self._pace.forward():
                x = inputs[place] if given is None else given
                y: torch.Tensor = self._module(x, ids=torch.tensor([numbers[place]]), step=torch.tensor([0]))
                if self._is_last:
                    y = self._module.loss(y, targets[place])
                    totals.append(y)
            self._backlog.given()
            return y

        self._module.eval()
        try:
            self._order.run_forward(len(numbers), forward)
        finally:
            self._module.train()
        self._backlog.wait(0, self._proceed)
        return float(torch.stack(totals).double().sum()) if totals else 0.0

    def _pass(self, step: Step, numbers: Sequence[int], done: Callable[[int], None]) -> None:
        self._sums.clear()
        self._passed += len(numbers)
        inputs, targets = self._data(step, numbers)
        at = torch.tensor([step])

        def forward(place: int, given: torch.Tensor | None) -> torch.Tensor:
            self._backlog.wait(AHEAD, self._proceed)
            number = numbers[place]
            x = inputs[place] if given is None else given
            with self._stopwatch.running():
                self._progress.micro_batch(number)
                return compute(place, number, x)

        def compute(place: int, number: int, x: torch.Tensor) -> torch.Tensor:
            with self._pace.forward():
                y = self._module(x, ids=torch.tensor([number]), step=at)
                return self._loss(y, targets[place]) if self._is_last else y

        def backward_done(place: int) -> None:
            done(numbers[place])
            self._backlog.given()

        self._order.run(len(numbers), forward, backward_done)
        self._backlog.wait(0, self._proceed)

    def _loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        total = self._module.loss(output, target)
        self._sums.append(total.detach())
        return total * self._scale

    def _held_out_data(self, numbers: Sequence[int]) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        if not (numbers and (self._is_first or self._is_last)):
            return (), ()
        size = self._train.micro_batch_size
        indices = [index for number in numbers for index in range(number * size, (number + 1) * size)]
        inputs, targets = batch(self._held_out, indices, self._train.sequence)
        return inputs.to(self._device).chunk(len(numbers)), targets.to(self._device).chunk(len(numbers))

    def _data(self, step: Step, numbers: Sequence[int]) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """inputs and targets of each of these ids, (B, T); none where this stage needs neither."""
        if not (self._is_first or self._is_last):
            return (), ()
        train = self._train
        indices = [
            index
            for number in numbers
            for index in sample_indices(
                train.seed, step, number, train.micro_batches, train.micro_batch_size, self._num_samples
            )
        ]
        inputs, targets = batch(self._tokens, indices, train.sequence)
        return inputs.to(self._device).chunk(len(numbers)), targets.to(self._device).chunk(len(numbers))
