"""The update: owner and mirror get the same bits wherever they cut, and it is AdamW."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.domain.generation import Answer
from orchestrator.domain.ids import Step
from orchestrator.domain.spec import TrainSpec
from worker.parallel.optimizer import SLICE, adamw, root_
from worker.parallel.schedule import learning_rate

TRAIN = TrainSpec(steps=100, micro_batches=1, micro_batch_size=1, sequence=8, warmup_steps=3)


def an_answer(step: int, norm: float = 2.5) -> Answer:
    return Answer(step=Step(step), norm=norm, losses=(1.0,))


def a_state(size: int, seed: int = 0) -> tuple[torch.Tensor, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    state = torch.zeros(3, size)
    state[0] = torch.randn(size, generator=generator)
    return state, [torch.randn(size, generator=generator) * 10.0**-step for step in range(4)]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 700), min_size=1, max_size=6), st.integers(0, 63))
def test_bits_are_the_same_whatever_the_cut_and_alignment(widths: list[int], shift: int) -> None:
    size = sum(widths)
    whole, gradients = a_state(size)
    cut, _ = a_state(size)
    for step, gradient in enumerate(gradients, start=1):
        adamw(TRAIN, an_answer(step), whole, gradient, [(0, size)])
        position = 0
        for width in widths:
            home = torch.zeros(3, shift + width)
            home[:, shift:] = cut[:, position : position + width]
            moved = torch.zeros(shift + width)
            moved[shift:] = gradient[position : position + width]
            adamw(TRAIN, an_answer(step), home[:, shift:], moved[shift:], [(0, width)])
            cut[:, position : position + width] = home[:, shift:]
            position += width
    assert torch.equal(whole, cut)


def test_bits_are_the_same_across_slices() -> None:
    size = SLICE + 1000
    whole, gradients = a_state(size)
    tail = whole[:, SLICE - 7 :].clone()
    adamw(TRAIN, an_answer(1), whole, gradients[0], [(0, size)])
    adamw(TRAIN, an_answer(1), tail, gradients[0][SLICE - 7 :], [(0, size)])
    assert torch.equal(whole[:, SLICE - 7 :], tail)


def test_roots_are_correctly_rounded() -> None:
    values = torch.rand(100_000, generator=torch.Generator().manual_seed(1)) * 10 + 1e-30
    # A root of a 24-bit number is never so near the middle of two others that fp64 could round to the wrong one.
    assert torch.equal(root_(values.clone()), values.double().sqrt().float())


def test_it_agrees_with_torch_adamw() -> None:
    state, gradients = a_state(500)
    parameter = torch.nn.Parameter(state[0].clone())
    reference = torch.optim.AdamW([parameter], betas=(TRAIN.beta1, TRAIN.beta2), eps=TRAIN.epsilon, weight_decay=0.1)
    for step, gradient in enumerate(gradients, start=1):
        norm = float(gradient.norm())
        adamw(TRAIN, an_answer(step, norm), state, gradient, [(0, 500)])
        parameter.grad = gradient.clone()
        torch.nn.utils.clip_grad_norm_([parameter], TRAIN.clip_norm)
        reference.param_groups[0]["lr"] = learning_rate(TRAIN, Step(step))
        reference.step()
    torch.testing.assert_close(state[0], parameter.detach(), rtol=1e-5, atol=1e-6)


def test_decay_applies_only_where_asked_and_padding_stays_zero() -> None:
    state = torch.zeros(3, 192)
    state[0, :128] = 1.0
    adamw(TRAIN, an_answer(2), state, torch.zeros(192), [(0, 64)])
    assert torch.all(state[0, :64] < 1.0)
    assert torch.all(state[0, 64:128] == 1.0)
    assert torch.all(state[:, 128:] == 0.0)


def test_the_gradient_is_left_as_it_was() -> None:
    state, gradients = a_state(100)
    before = gradients[0].clone()
    adamw(TRAIN, an_answer(1), state, gradients[0], [])
    assert torch.equal(gradients[0], before)


def test_the_rate_warms_up_then_falls_to_its_minimum() -> None:
    rates = [learning_rate(TRAIN, Step(step)) for step in range(1, 101)]
    assert abs(rates[0] - TRAIN.learning_rate / 3) < 1e-12
    assert rates[2] == TRAIN.learning_rate == max(rates)
    assert rates[2:] == sorted(rates[2:], reverse=True)
    assert abs(rates[-1] - TRAIN.min_learning_rate) < 1e-12
    no_warmup = TrainSpec(steps=10, micro_batches=1, micro_batch_size=1, sequence=8, warmup_steps=0)
    assert learning_rate(no_warmup, Step(1)) <= no_warmup.learning_rate
