"""How the gradients of a step's micro-batches become one: added up in fp32 as autograd does, or exactly, as integers.

    leaves' gradients --collect, after each backward--> flat --reduced to owners--> complete --> fp32, voted on
                                                                                                 '- or run again (exact)

Both kinds give the step what the data axis sends, what the rank puts into the vote, and what the vote's outcome means.
They know neither owners nor peers nor generations.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isfinite, nan
from typing import Protocol

import torch

from orchestrator.domain.generation import Answer, NotFinite
from orchestrator.domain.ids import Step
from orchestrator.domain.profile import Profile, exact_groups
from orchestrator.domain.spec import TrainSpec

from ..exact import Quantiser, Scale, SquareSum, deterministic_kernels, to_float
from ..findings import TrainingDiverged
from ..state.buffers import Buffers

MAX_PASSES = 3
"""Of one exact step: one whose scale does not fit, one whose numbers are bad, and a good one."""


class Gradients(Protocol):
    flat: torch.Tensor
    """What is sent to owners, by bucket address."""
    num_maxima: int
    """How many of the last numbers of a ballot the vote takes the maximum of; the others it sums."""
    takes_floats: bool
    """What is in the leaves' gradients now still counts."""

    def begin(self, maxima: tuple[float, ...]) -> None:
        """A new step. maxima: what the vote on the step before came to."""
        ...

    @contextmanager
    def adding_up(self) -> Iterator[None]:
        """Around every forward and backward of a pass; afterwards `flat` is complete."""
        ...

    def collect(self, micro_batch: int) -> None:
        """After the backward of the micro-batch of this id."""
        ...

    def complete(self, out: torch.Tensor, addends: Sequence[torch.Tensor], layers: tuple[int, ...]) -> None:
        """out: fp32, the sum of parts of everybody's `flat`, of a bucket of these layers; addends may be overwritten."""
        ...

    def ballot(self, owned: torch.Tensor, losses: Mapping[int, float]) -> torch.Tensor:
        """fp64. owned: the complete gradient of what this rank owns; losses: mean of each micro-batch id it knows."""
        ...

    def answer(self, total: torch.Tensor, world_size: int, step: Step) -> Answer | None:
        """What everybody's ballots came to; None where all run the pass again. Raises TrainingDiverged."""
        ...


class PlainGradients:
    """Autograd adds to fp32 in the order of micro-batches. Ballot: finite ranks, squared norm, losses."""

    num_maxima = 0
    takes_floats = True

    def __init__(self, train: TrainSpec, buffers: Buffers) -> None:
        self.flat = buffers.gradient
        self._buffers = buffers
        self._num_ids = train.micro_batches

    def begin(self, maxima: tuple[float, ...]) -> None:
        """Nothing is known of the step before, and nothing needed."""

    @contextmanager
    def adding_up(self) -> Iterator[None]:
        self._buffers.zero()
        yield
        self._buffers.fold()

    def collect(self, micro_batch: int) -> None:
        """They are where they should be."""

    def complete(self, out: torch.Tensor, addends: Sequence[torch.Tensor], layers: tuple[int, ...]) -> None:
        if len(addends) == 1:
            out.copy_(addends[0])
            return
        torch.add(addends[0], addends[1], out=out)
        for addend in addends[2:]:
            out.add_(addend)

    def ballot(self, owned: torch.Tensor, losses: Mapping[int, float]) -> torch.Tensor:
        ballot = torch.zeros(2 + self._num_ids, dtype=torch.float64)
        gradient = owned.double()
        ballot[1] = torch.dot(gradient, gradient)
        ballot[0] = float(isfinite(float(ballot[1])))
        for number, loss in losses.items():
            ballot[2 + number] = loss
        return ballot

    def answer(self, total: torch.Tensor, world_size: int, step: Step) -> Answer:
        finite, squares, *losses = total.tolist()
        if finite != world_size or not all(map(isfinite, (squares, *losses))):
            raise _diverged(step, losses)
        return Answer(step=step, norm=squares**0.5, losses=tuple(losses))


class ExactGradients:
    """Every micro-batch's gradient is rounded to fixed point and added up as integers. Ballot: norm, losses, maxima.

    The scale comes from the last committed maxima, so every rank has the same without a word. Where this step's do not fit
    it (always in the first step, of which nothing is known), the vote shows it to everybody, and everybody runs the step
    again with the maxima that it showed.
    """

    takes_floats = False

    def __init__(self, train: TrainSpec, profile: Profile, buffers: Buffers) -> None:
        groups = exact_groups(profile)
        number = {layers: index for index, layers in enumerate(groups)}
        self.num_maxima = len(groups)
        self.flat = torch.zeros(buffers.offsets[-1], dtype=torch.int64, device=buffers.gradient.device)
        self._number = number
        self._profile = profile
        self._buffers = buffers
        self._num_ids = train.micro_batches
        self._tp = buffers.shape.degree
        # Each use of a tied line and each tp rank of a replicated one adds its own integer.
        self._contributions = train.micro_batches * self._tp * max(len(layers) for layers in groups)
        self._runs = [(number[run.layers], run.of(buffers.gradient), run.into_of(self.flat)) for run in buffers.runs]
        self._quantiser = Quantiser(self.flat.device)
        self._peaks = torch.zeros(train.micro_batches, len(self._runs), device=self.flat.device)
        self._begin_with((0.0,) * self.num_maxima)
        self._passes = self._strange = 0

    def begin(self, maxima: tuple[float, ...]) -> None:
        self._passes = self._strange = 0
        self._begin_with(maxima if len(maxima) == self.num_maxima else (0.0,) * self.num_maxima)

    @contextmanager
    def adding_up(self) -> Iterator[None]:
        self._passes += 1
        self._peaks.zero_()
        self._buffers.zero()
        self.flat.zero_()
        self.takes_floats = True
        with deterministic_kernels():
            yield
        self.takes_floats = False

    def collect(self, micro_batch: int) -> None:
        """The leaves' gradients are zero afterwards."""
        peaks = self._peaks[micro_batch]
        for column, (group, gradient, total) in enumerate(self._runs):
            self._quantiser.move(gradient, total, self._scale.shifts[group], peaks[column])

    def complete(self, out: torch.Tensor, addends: Sequence[torch.Tensor], layers: tuple[int, ...]) -> None:
        total = addends[0]
        for addend in addends[1:]:
            total.add_(addend)
        to_float(out, total, self._scale.shifts[self._number[layers]])

    def ballot(self, owned: torch.Tensor, losses: Mapping[int, float]) -> torch.Tensor:
        ballot = torch.zeros(SquareSum.NUM_HALVES + self._num_ids + self.num_maxima, dtype=torch.float64)
        ballot[: SquareSum.NUM_HALVES] = torch.tensor(self._squares.halves(owned), dtype=torch.float64)
        for number, loss in losses.items():
            ballot[SquareSum.NUM_HALVES + number] = loss
        for number in (~self._peaks.isfinite().all(1)).nonzero().flatten().tolist():
            ballot[SquareSum.NUM_HALVES + number] = nan  # names it to everybody, whatever its loss
        maxima = ballot[SquareSum.NUM_HALVES + self._num_ids :]
        for (group, _, _), peak in zip(self._runs, self._peaks.amax(0).tolist(), strict=True):
            maxima[group] = max(float(maxima[group]), peak)
        return ballot

    def answer(self, total: torch.Tensor, world_size: int, step: Step) -> Answer | None:
        numbers = total.tolist()
        halves, rest = numbers[: SquareSum.NUM_HALVES], numbers[SquareSum.NUM_HALVES :]
        losses, maxima = rest[: self._num_ids], rest[self._num_ids :]
        if not all(map(isfinite, rest)):
            # A bit that flipped in somebody's memory does not do so twice; mathematics does.
            self._strange += 1
            if self._strange > 1:
                raise _diverged(step, losses, "loss or gradient")
        elif self._scale.fits(maxima):
            return Answer(step=step, norm=self._squares.value(halves) ** 0.5, losses=tuple(losses), maxima=tuple(maxima))
        else:
            self._begin_with(maxima)
        if self._passes >= MAX_PASSES:
            raise TrainingDiverged(
                NotFinite(step=step, micro_batches=()),
                f"step {step} gave other gradients in each of {MAX_PASSES} passes; a device computes wrongly, "
                "or the program does not give the same result twice: set train.exact to false to train on",
            )
        return None

    def _begin_with(self, maxima: Sequence[float]) -> None:
        self._scale = Scale.of(maxima, self._contributions)
        self._squares = SquareSum.of(self._scale, self._profile, self._tp)


def gradients_of(train: TrainSpec, profile: Profile, buffers: Buffers) -> Gradients:
    return ExactGradients(train, profile, buffers) if train.exact else PlainGradients(train, buffers)


def _diverged(step: Step, losses: Sequence[float], what: str = "loss") -> TrainingDiverged:
    numbers = tuple(number for number, loss in enumerate(losses) if not isfinite(loss))
    strange = [f"micro-batch {number}: {what} {losses[number]}" for number in numbers]
    return TrainingDiverged(
        NotFinite(step=step, micro_batches=numbers),
        f"step {step} gave {'; '.join(strange) or 'a gradient that is not finite'}; "
        "lower train.learning_rate or train.clip_norm, or lengthen train.warmup_steps",
    )
