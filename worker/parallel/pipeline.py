"""The pipeline axis: one rank's stage through every micro-batch of a step, forward and backward.

    1F1B, two stages, four ids      stage 0   F0 F1 B0 F2 B1 F3 B2 B3
                                    stage 1      F0 B0 F1 B1 F2 B2 F3 B3

The schedule is torch's; a pipeline of one stage runs a plain loop. Losses are divided by the tokens of the whole step, so
that gradients of all pipelines simply add up. Nothing here knows of owners, votes or generations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from orchestrator.domain.ids import Step
from orchestrator.domain.plan import Pipeline, Seat
from orchestrator.domain.spec import TrainSpec

from ..data.sampling import batch, sample_indices
from ..data.sources import num_samples
from ..program import StageModule
from ..progress import Progress
from .group import Aborted, Group, PeerLost


class StageRunner:
    """Runs `module`, this seat's stage, on the micro-batch ids of its pipeline.

    tokens: the whole text, uint8; every rank has it, the first stage reads inputs and the last one targets.
    """

    def __init__(
        self,
        *,
        train: TrainSpec,
        module: StageModule,
        pipeline: Pipeline,
        seat: Seat,
        pp: Group,
        tokens: torch.Tensor,
        device: torch.device,
        progress: Progress,
    ) -> None:
        self._train = train
        self._module = module
        self._ids = pipeline.micro_batches
        self._is_first = seat.stage == 0
        self._is_last = seat.stage == len(pipeline.stages) - 1
        self._tokens = tokens
        self._num_samples = num_samples(tokens, train.sequence)
        self._device = device
        self._progress = progress
        self._scale = 1.0 / (train.micro_batches * train.micro_batch_size * train.sequence)
        self._sums: list[torch.Tensor] = []
        self._running: Sequence[int] = self._ids
        self._begun = 0
        self._after_backward: Callable[[int], None] | None = None
        self._num_stages, self._stage, self._pp = len(pipeline.stages), seat.stage, pp
        self._schedule: Schedule1F1B | None = None
        self._single: ScheduleGPipe | None = None
        if self._num_stages > 1:
            self._schedule = Schedule1F1B(self._piped(), len(self._ids), loss_fn=self._loss, scale_grads=False)
        self._hook = module.register_forward_pre_hook(self._count)

    def close(self) -> None:
        """Let go of the module and the schedule, which refer back here: memory must not wait for the garbage collector."""
        self._hook.remove()
        self._schedule = self._single = None

    def run(self, step: Step, after_backward: Callable[[int], None] | None = None) -> dict[int, float]:
        """Gradients are added to the leaves'. Returns, on the last stage, id -> summed loss of that micro-batch's tokens.

        after_backward: called with each id once its gradients have been added. Raises Aborted, PeerLost, and whatever the
        program raises.
        """
        self._pass(step, self._ids, self._schedule, after_backward)
        return dict(zip(self._ids, torch.stack(self._sums).tolist(), strict=True)) if self._is_last else {}

    def recompute(self, step: Step, number: int) -> None:
        """Forward and backward of one id, which need not be of this pipeline; every rank of the pipeline calls this."""
        if self._single is None and self._num_stages > 1:
            self._single = ScheduleGPipe(self._piped(), 1, loss_fn=self._loss, scale_grads=False)
        self._pass(step, (number,), self._single, None)

    def _pass(
        self,
        step: Step,
        numbers: Sequence[int],
        schedule: Schedule1F1B | ScheduleGPipe | None,
        after_backward: Callable[[int], None] | None,
    ) -> None:
        self._sums.clear()
        self._running, self._begun, self._after_backward = numbers, 0, after_backward
        inputs, targets = self._data(step, numbers)
        ids = torch.tensor(numbers, dtype=torch.int64)
        steps = torch.full_like(ids, step)
        with _own_errors():
            if schedule is not None:
                schedule.step(
                    *((inputs,) if self._is_first else ()),
                    target=targets if self._is_last else None,
                    return_outputs=False,
                    ids=ids,
                    step=steps,
                )
            else:
                parts = (t.chunk(len(numbers)) for t in (inputs, targets, ids, steps))
                for place, (x, target, number, at) in enumerate(zip(*parts, strict=True)):
                    self._loss(self._module(x, ids=number, step=at), target).backward()  # type: ignore[no-untyped-call]
                    self._done(place)

    def _loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        total = self._module.loss(output, target)
        self._sums.append(total.detach())
        return total * self._scale

    def _done(self, place: int) -> None:
        """The backward of the id at this place among those running is through."""
        if self._after_backward is not None:
            self._after_backward(self._running[place])

    def _data(self, step: Step, numbers: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """inputs and targets of these ids, (ids * B, T) each; empty where this stage needs neither."""
        if not (self._is_first or self._is_last):
            return torch.empty(0), torch.empty(0)
        train = self._train
        indices = [
            index
            for number in numbers
            for index in sample_indices(
                train.seed, step, number, train.micro_batches, train.micro_batch_size, self._num_samples
            )
        ]
        inputs, targets = batch(self._tokens, indices, train.sequence)
        return inputs.to(self._device), targets.to(self._device)

    def _count(self, _module: object, _args: object) -> None:
        # Recomputed blocks do not come through here: this is the stage's own forward, once per micro-batch.
        self._progress.micro_batch(self._running[self._begun])
        self._begun += 1

    def _piped(self) -> _Piped:
        """Shapes are given up front, so that stages exchange none."""
        module, train = self._module, self._train
        tokens = torch.empty(train.micro_batch_size, train.sequence, dtype=torch.int64, device="meta")
        hidden = torch.empty(module.hidden_shape, dtype=module.hidden_dtype, device="meta", requires_grad=True)
        logits = torch.empty(module.logits_shape, dtype=module.hidden_dtype, device="meta", requires_grad=True)
        return _Piped(
            self._done,
            module,
            self._stage,
            self._num_stages,
            self._device,
            input_args=tokens if self._is_first else hidden,
            output_args=logits if self._is_last else hidden,
            group=self._pp.pg,
        )


class _Piped(PipelineStage):
    """torch's stage, which also says when the backward of a micro-batch is through."""

    def __init__(self, done: Callable[[int], None], *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._done = done

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        self._done(bwd_chunk_id)


@contextmanager
def _own_errors() -> Iterator[None]:
    """The schedule wraps whatever happens in a stage into RuntimeErrors of its own; a lost peer must stay recognisable."""
    try:
        yield
    except (Aborted, PeerLost):
        raise
    except Exception as error:
        cause: Any = error
        while (cause := cause.__cause__ or cause.__context__) is not None:
            if isinstance(cause, Aborted | PeerLost):
                raise cause from None
        raise
