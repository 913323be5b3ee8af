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
    collect: called with each micro-batch's id after its backward.
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
        collect: Callable[[int], None],
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
        self._collect = collect
        self._scale = 1.0 / (train.micro_batches * train.micro_batch_size * train.sequence)
        self._sums: list[torch.Tensor] = []
        self._running: Sequence[int] = self._ids
        self._begun = 0
        self._done: Callable[[int], None] = collect
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

    def run(self, step: Step, notice: Callable[[int], None] | None = None) -> dict[int, float]:
        """Gradients are added to the leaves'. Returns, on the last stage, id -> mean loss of that micro-batch's tokens.

        notice: called with each id after its backward, before `collect` is. Raises Aborted, PeerLost, and whatever the
        program raises.
        """

        def done(number: int) -> None:
            if notice is not None:
                notice(number)
            self._collect(number)

        self._pass(step, self._ids, self._schedule, done)
        if not self._is_last:
            return {}
        tokens = self._train.micro_batch_size * self._train.sequence
        return {number: total / tokens for number, total in zip(self._ids, torch.stack(self._sums).tolist(), strict=True)}

    def recompute(self, step: Step, number: int) -> None:
        """Add to the leaves' gradients those of one id, of any pipeline, and no more; every rank of this one calls it."""
        if self._single is None and self._num_stages > 1:
            self._single = ScheduleGPipe(self._piped(), 1, loss_fn=self._loss, scale_grads=False)
        self._pass(step, (number,), self._single, lambda _: None)

    def _pass(
        self,
        step: Step,
        numbers: Sequence[int],
        schedule: Schedule1F1B | ScheduleGPipe | None,
        done: Callable[[int], None],
    ) -> None:
        self._sums.clear()
        self._running, self._begun, self._done = numbers, 0, done
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
                for x, target, number, at in zip(*parts, strict=True):
                    self._loss(self._module(x, ids=number, step=at), target).backward()  # type: ignore[no-untyped-call]
                    done(int(number))

    def _loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        total = self._module.loss(output, target)
        self._sums.append(total.detach())
        return total * self._scale

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

    def _piped(self) -> _CollectingStage:
        """Shapes are given up front, so that stages exchange none."""
        module, train = self._module, self._train
        tokens = torch.empty(train.micro_batch_size, train.sequence, dtype=torch.int64, device="meta")
        hidden = torch.empty(module.hidden_shape, dtype=module.hidden_dtype, device="meta", requires_grad=True)
        logits = torch.empty(module.logits_shape, dtype=module.hidden_dtype, device="meta", requires_grad=True)
        return _CollectingStage(
            lambda chunk: self._done(self._running[chunk]),
            module,
            self._stage,
            self._num_stages,
            self._device,
            input_args=tokens if self._is_first else hidden,
            output_args=logits if self._is_last else hidden,
            group=self._pp.pg,
        )


class _CollectingStage(PipelineStage):
    """collect: called with the number of each chunk that has been backward."""

    def __init__(self, collect: Callable[[int], None], *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._collect = collect

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **settings: Any) -> None:
        super().backward_one_chunk(bwd_chunk_id, *args, **settings)
        self._collect(bwd_chunk_id)


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
