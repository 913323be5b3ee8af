"""Fixed-point sums: whoever adds up which micro-batches, the bits are the same; what does not fit is seen by everybody."""

from __future__ import annotations

from dataclasses import replace
from math import isfinite

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.domain.ids import Device, NodeId, Step
from orchestrator.domain.layout import buckets
from orchestrator.domain.plan import Pipeline, Plan, Stage
from orchestrator.domain.profile import exact_groups, splits_a_block
from tests.builders import a_profile
from tests.tiny_model import PROGRAM, a_spec
from worker.exact import GROWTH_BITS, SLICE, SUM_BITS, Quantiser, Scale, SquareSum, to_float
from worker.findings import TrainingDiverged
from worker.parallel.gradients import MAX_PASSES, ExactGradients
from worker.spoiling import spoil_gradient
from worker.state.buffers import Buffers, Shape

PROFILE = a_profile()


def some_gradients(seed: int, count: int, size: int) -> list[torch.Tensor]:
    """Of magnitudes from 2**-30 to 2**6, some zero."""
    generator = torch.Generator().manual_seed(seed)
    scales = torch.randint(-30, 7, (count, size), generator=generator)
    values = torch.ldexp(torch.randn(count, size, generator=generator), scales)
    return list(values * (torch.rand(count, size, generator=generator) < 0.9))


def add_quantised(total: torch.Tensor, values: torch.Tensor, shift: int) -> float:
    """The largest absolute value."""
    peak, moved = torch.zeros(()), values.clone()
    Quantiser(torch.device("cpu")).move(moved, total, shift, peak)
    assert not moved.any()
    return float(peak)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.lists(st.integers(0, 3), min_size=1, max_size=12), st.integers(1, 300), st.randoms())
def test_bits_are_the_same_whoever_adds_up_what(seed: int, pipeline_of: list[int], size: int, rng: object) -> None:
    """pipeline_of: which of four pipelines computes each id."""
    gradients = some_gradients(seed, len(pipeline_of), size)
    (shift,) = Scale.of([max(float(g.abs().max()) for g in gradients)], len(gradients)).shifts

    def reduced(order: list[int], of: list[int]) -> torch.Tensor:
        parts = [torch.zeros(size, dtype=torch.int64) for _ in range(4)]
        for number in order:
            add_quantised(parts[of[number]], gradients[number], shift)
        out = torch.empty(size)
        to_float(out, parts[0] + parts[1] + parts[2] + parts[3], shift)
        return out

    whole = reduced(list(range(len(gradients))), [0] * len(gradients))
    shuffled = list(range(len(gradients)))
    rng.shuffle(shuffled)  # type: ignore[attr-defined]
    assert torch.equal(reduced(shuffled, pipeline_of), whole)
    exact = torch.stack(gradients).double().sum(0)
    bound = len(gradients) * 2.0 ** -(shift + 1) + exact.abs() * 2.0**-24
    assert bool(((whole.double() - exact).abs() <= bound).all())


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.floats(1e-18, 1e30), st.integers(1, 2048), st.integers(1, 70_000))
def test_the_largest_sum_a_scale_admits_stays_within_its_bits(
    seed: int, maximum: float, contributions: int, size: int
) -> None:
    scale = Scale.of([maximum], contributions)
    assert scale.fits([maximum]) and scale.fits([maximum * 2.0 ** (GROWTH_BITS - 1)])
    assert not scale.fits([maximum * 2.0 ** (GROWTH_BITS + 1)])
    total = torch.zeros(1, dtype=torch.int64)
    add_quantised(total, torch.tensor([maximum]), scale.shifts[0])
    assert int(total) * contributions < 1 << (SUM_BITS - GROWTH_BITS + 1)
    assert int(total) * contributions << (GROWTH_BITS - 1) < 1 << SUM_BITS


def test_no_scale_made_of_nothing_fits_anything_but_nothing() -> None:
    scale = Scale.of([0.0, 1.0], 8)
    assert scale.fits([0.0, 0.5])
    assert not scale.fits([1e-9, 0.5])


@pytest.mark.parametrize("odd", [-3.0, float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, SLICE - 1, SLICE, 2 * SLICE + 5])
def test_the_largest_value_shows_what_is_not_finite(odd: float, place: int) -> None:
    values = torch.ones(2 * SLICE + 9)
    values[place] = odd
    peak = add_quantised(torch.zeros(len(values), dtype=torch.int64), values, 0)
    assert peak == 3.0 if odd == -3.0 else not isfinite(peak)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(-40, 20))
def test_the_norm_has_the_same_bits_whoever_owns_which_blocks(seed: int, owner_of: list[int], exponent: int) -> None:
    blocks = [g * 2.0**exponent for g in some_gradients(seed, len(owner_of), 64)]
    largest_one = max(float(block.abs().max()) for block in blocks)
    square_sum = SquareSum.of(Scale.of([largest_one], 1), PROFILE, 1)

    def squares(owner_of: list[int]) -> float:
        shares = [torch.cat([b for b, o in zip(blocks, owner_of, strict=True) if o == owner] or [torch.zeros(64)])
                  for owner in range(4)]  # fmt: skip
        halves = torch.tensor([square_sum.halves(share) for share in shares], dtype=torch.float64).sum(0).tolist()
        return square_sum.value(halves)

    assert squares(owner_of) == squares([0] * len(blocks))
    assert squares(owner_of) == pytest.approx(float(torch.cat(blocks).double().square().sum()), rel=1e-9)


# --- one rank's sums and votes -------------------------------------------------------------------------------------------

SPEC = a_spec(train={"exact": True, "micro_batches": 4}, tied=True)


def exact_gradients() -> tuple[ExactGradients, Buffers]:
    profile = PROGRAM.describe(SPEC)
    device = Device(NodeId("n"), 0)
    plan = Plan(
        pipelines=(
            Pipeline(stages=(Stage(first=0, last=profile.num_layers, devices=(device,)),), micro_batches=(0, 1, 2, 3)),
        )
    )
    buffers = Buffers(profile, Shape.of(plan, plan.seats[0]), buckets(plan, profile), torch.float32, torch.device("cpu"))
    return ExactGradients(SPEC.train, profile, buffers), buffers


def a_pass(made: ExactGradients, buffers: Buffers, factor: float = 1.0) -> torch.Tensor:
    """One ballot, with every micro-batch's gradients the same function of its id."""
    with made.adding_up():
        for number in range(4):
            for leaf in buffers.leaves.values():
                assert leaf.grad is not None
                leaf.grad.add_(factor * (number + 1) * 2.0**-10)
            made.collect(number)
    owned = torch.empty(buffers.offsets[-1])
    for run in buffers.runs:
        if run.start == run.into:
            made.complete(owned[run.start : run.stop], [made.flat[run.start : run.stop]], run.layers)
    return made.ballot(owned, dict.fromkeys(range(4), 1.0))


def test_a_step_of_which_nothing_is_known_is_run_twice_and_uses_of_a_tied_line_add_up() -> None:
    made, buffers = exact_gradients()
    made.begin(())
    assert made.answer(a_pass(made, buffers), 1, Step(1)) is None
    answer = made.answer(a_pass(made, buffers), 1, Step(1))
    assert answer is not None
    assert answer.maxima == (4 * 2.0**-10,) * len(exact_groups(PROGRAM.describe(SPEC)))
    numel = {line.name: (line.numel, len(line.layers)) for line in PROGRAM.describe(SPEC).lines}
    expected = sum(count * (uses * 10 * 2.0**-10) ** 2 for count, uses in numel.values()) ** 0.5
    assert answer.norm == pytest.approx(expected, rel=1e-12)
    made.begin(answer.maxima)
    again = made.answer(a_pass(made, buffers), 1, Step(2))
    assert again == replace(answer, step=Step(2)), "the next step fits at once"


def test_a_jump_beyond_the_slack_is_run_again_with_the_scale_it_showed() -> None:
    made, buffers = exact_gradients()
    made.begin((2.0**-8,) * made.num_maxima)
    assert made.answer(a_pass(made, buffers, 2.0**12), 1, Step(5)) is None
    jumped = made.answer(a_pass(made, buffers, 2.0**12), 1, Step(5))
    fresh, others = exact_gradients()
    fresh.begin((2.0**4,) * made.num_maxima)
    assert jumped is not None and jumped == fresh.answer(a_pass(fresh, others, 2.0**12), 1, Step(5))


def test_what_is_not_finite_is_tried_again_and_named_the_second_time() -> None:
    made, buffers = exact_gradients()
    made.begin((1.0,) * made.num_maxima)
    strange = a_pass(made, buffers, float("nan"))
    assert made.answer(strange, 1, Step(3)) is None
    assert made.answer(a_pass(made, buffers), 1, Step(3)) is not None, "it was a bit that flipped"
    made.begin((1.0,) * made.num_maxima)
    assert made.answer(a_pass(made, buffers, float("inf")), 1, Step(3)) is None
    with pytest.raises(TrainingDiverged, match=r"step 3 gave micro-batch 0: loss or gradient nan; .*micro-batch 3"):
        made.answer(a_pass(made, buffers, float("nan")), 1, Step(3))


def test_a_program_that_never_gives_the_same_twice_is_not_run_for_ever() -> None:
    made, buffers = exact_gradients()
    made.begin(())
    for number in range(MAX_PASSES - 1):
        assert made.answer(a_pass(made, buffers, 2.0 ** (12 * number)), 1, Step(1)) is None
    with pytest.raises(TrainingDiverged, match="other gradients in each of 3 passes"):
        made.answer(a_pass(made, buffers, 2.0**60), 1, Step(1))


def test_a_tp_degree_that_cuts_a_block_is_found() -> None:
    assert splits_a_block(PROFILE, 2) is None
    line = splits_a_block(PROFILE, 4)
    assert line is not None and line.numel % (4 * 64)


def test_damage_to_a_gradient_counts_only_before_it_has_become_an_integer() -> None:
    made, buffers = exact_gradients()
    made.begin(())
    assert not made.takes_floats
    with made.adding_up():
        assert made.takes_floats
        spoil_gradient(buffers)
        for number in range(4):
            made.collect(number)
    assert not made.takes_floats
    ballot = made.ballot(torch.zeros(buffers.offsets[-1]), dict.fromkeys(range(4), 1.0))
    assert torch.isnan(ballot).any()
