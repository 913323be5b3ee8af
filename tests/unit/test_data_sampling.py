"""The order of samples: every sample once per epoch, and the same whatever the plan."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.domain.errors import Refused
from orchestrator.domain.spec import EvaluationSpec, TrainSpec
from worker.data.sampling import batch, evaluated_by, sample_indices, shuffled, split

seeds = st.integers(0, 2**63 - 1)


@given(size=st.integers(1, 700), seed=seeds, epoch=st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_shuffle_is_a_permutation(size: int, seed: int, epoch: int) -> None:
    assert sorted(shuffled(index, size, seed, epoch) for index in range(size)) == list(range(size))


@given(size=st.integers(1, 2**60), seed=seeds, data=st.data())
@settings(deadline=None)
def test_shuffle_of_any_size_stays_inside_and_separates_neighbours(size: int, seed: int, data: st.DataObject) -> None:
    index = data.draw(st.integers(0, size - 1))
    place = shuffled(index, size, seed, 0)
    assert 0 <= place < size
    assert size == 1 or shuffled((index + 1) % size, size, seed, 0) != place


def test_order_differs_between_seeds_and_epochs() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return [shuffled(index, 1000, seed, epoch) for index in range(1000)]

    orders = [order(0, 0), order(0, 1), order(1, 0)]
    for i, one in enumerate(orders):
        for other in [*orders[i + 1 :], list(range(1000))]:
            # Two random permutations agree in one place on average.
            assert sum(a == b for a, b in zip(one, other, strict=True)) < 10


@given(
    num=st.integers(1, 60),
    micro_batches=st.integers(1, 5),
    size=st.integers(1, 4),
    seed=seeds,
)
@settings(max_examples=60, deadline=None)
def test_each_sample_is_used_once_per_epoch(num: int, micro_batches: int, size: int, seed: int) -> None:
    per_step = micro_batches * size
    used = [
        sample
        for step in range(1, 3 * num // per_step + 2)
        for micro_batch in range(micro_batches)
        for sample in sample_indices(seed, step, micro_batch, micro_batches, size, num)
    ]
    for epoch in range(len(used) // num):
        assert sorted(used[epoch * num : (epoch + 1) * num]) == list(range(num))


def test_a_step_holds_the_same_samples_however_it_is_cut_into_micro_batches() -> None:
    def step_samples(step: int, micro_batches: int, size: int) -> list[int]:
        ids = range(micro_batches)
        return [s for i in ids for s in sample_indices(7, step, i, micro_batches, size, 1000)]

    for step in (1, 2, 90):
        assert step_samples(step, 12, 1) == step_samples(step, 4, 3) == step_samples(step, 1, 12)


TRAIN = TrainSpec(steps=1, micro_batches=3, micro_batch_size=2, sequence=5)


def test_the_end_of_the_text_is_held_out_and_no_token_of_it_is_trained_on() -> None:
    tokens = torch.arange(100, dtype=torch.uint8)
    training, held_out = split(tokens, TRAIN, EvaluationSpec(every=1, micro_batches=4))
    assert len(held_out) == 4 * 2 * 5 + 1
    assert torch.equal(torch.cat([training, held_out]), tokens)
    inputs, _ = batch(held_out, [7], 5)
    assert inputs.tolist() == [[94, 95, 96, 97, 98]]
    training, held_out = split(tokens, TRAIN, EvaluationSpec())
    assert torch.equal(training, tokens) and not len(held_out)


def test_a_text_of_which_nothing_is_left_to_train_on_is_refused() -> None:
    evaluation = EvaluationSpec(every=1, micro_batches=4)
    assert split(torch.zeros(47, dtype=torch.uint8), TRAIN, evaluation)[0].numel() == 6
    with pytest.raises(Refused, match=r"holds out 41 bytes of a text of 46.*lower evaluation\.micro_batches"):
        split(torch.zeros(46, dtype=torch.uint8), TRAIN, evaluation)


@given(data=st.data(), ids=st.integers(1, 40), count=st.integers(1, 60))
@settings(deadline=None)
def test_every_held_out_micro_batch_is_evaluated_once_and_by_shares(data: st.DataObject, ids: int, count: int) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, ids), max_size=3)))
    pipelines = [range(a, b) for a, b in pairwise([0, *cuts, ids])]
    shares = [evaluated_by(mine, ids, count) for mine in pipelines]
    assert sorted(number for share in shares for number in share) == list(range(count))
    for mine, share in zip(pipelines, shares, strict=True):
        assert abs(len(share) - count * len(mine) / ids) <= 1


def test_targets_are_the_next_tokens_and_samples_do_not_overlap() -> None:
    tokens = torch.arange(21, dtype=torch.uint8)
    inputs, targets = batch(tokens, [3, 0], 5)
    assert inputs.tolist() == [[15, 16, 17, 18, 19], [0, 1, 2, 3, 4]]
    assert targets.tolist() == [[16, 17, 18, 19, 20], [1, 2, 3, 4, 5]]
    assert inputs.dtype == targets.dtype == torch.int64
