"""What must have the same bits on a CUDA device as on CPU, or twice on the same device."""

from __future__ import annotations

import pytest
import torch

from orchestrator.domain.generation import Answer
from orchestrator.domain.ids import Step
from orchestrator.domain.spec import TrainSpec
from worker.digest import SLICE, digest
from worker.exact import Quantiser, SquareSum, deterministic_kernels, to_float
from worker.keyed import keep_mask
from worker.parallel.device import ACCELERATOR_SLICE, CudaDevice, host_memory
from worker.parallel.memory import dense, landings
from worker.parallel.optimizer import adamw
from worker.selftest import examine

pytestmark = pytest.mark.timeout(120)
TRAIN = TrainSpec(steps=100, micro_batches=1, micro_batch_size=1, sequence=8, warmup_steps=3)
SIZE = 300_032


def numbers(size: int = SIZE, seed: int = 0) -> torch.Tensor:
    """Normal, very small (denormal squares) and very large ones."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.tensor([1.0, 1e-30, 1e12, 1e-8]).repeat(-(-size // 4))[:size]
    return torch.randn(size, generator=generator) * scale


@pytest.fixture(autouse=True)
def activated() -> None:
    CudaDevice(0).activate()


def test_the_update_has_the_bits_it_has_on_cpu(cuda: torch.device) -> None:
    here = torch.zeros(3, SIZE)
    here[0] = numbers()
    there = here.to(cuda)
    for step in range(1, 5):
        gradient = numbers(seed=step)
        answer = Answer(step=Step(step), norm=2.5 * step, losses=(1.0,))
        adamw(TRAIN, answer, here, gradient, [(64, SIZE // 2)])
        adamw(TRAIN, answer, there, gradient.to(cuda), [(64, SIZE // 2)])
    assert torch.equal(here.view(torch.int32), there.cpu().view(torch.int32))


def test_the_update_has_the_same_bits_whatever_the_cut(cuda: torch.device) -> None:
    whole = torch.zeros(3, SIZE, device=cuda)
    whole[0] = numbers().to(cuda)
    cut, gradient = whole.clone(), numbers(seed=1).to(cuda)
    answer = Answer(step=Step(1), norm=2.5, losses=(1.0,))
    adamw(TRAIN, answer, whole, gradient, [(0, SIZE)])
    for start, stop in ((0, 1), (1, 4097), (4097, SIZE)):
        home = torch.zeros(3, 13 + stop - start, device=cuda)
        home[:, 13:] = cut[:, start:stop]
        adamw(TRAIN, answer, home[:, 13:], gradient[start:stop], [(0, stop - start)])
        cut[:, start:stop] = home[:, 13:]
    assert torch.equal(whole, cut)


def test_fixed_point_sums_have_the_bits_they_have_on_cpu(cuda: torch.device) -> None:
    found = []
    for device in (torch.device("cpu"), cuda):
        total = torch.zeros(SIZE, dtype=torch.int64, device=device)
        peak = torch.zeros((), device=device)
        quantiser = Quantiser(device)
        for seed in range(3):
            quantiser.move(torch.randn(SIZE, generator=torch.Generator().manual_seed(seed)).to(device), total, 40, peak)
        out = torch.empty(SIZE, device=device)
        to_float(out, total, 40)
        halves = SquareSum(shift=20, limb=40).halves(out)
        found.append((total.cpu(), peak.cpu(), out.cpu(), halves))
    (total, peak, out, halves), there = found
    assert torch.equal(total, there[0]) and torch.equal(peak, there[1]) and torch.equal(out, there[2])
    assert halves == there[3]


def test_fixed_point_sums_do_not_depend_on_slices(cuda: torch.device) -> None:
    size = ACCELERATOR_SLICE + 192
    values = torch.randn(size, device=cuda)
    whole, parts = (torch.zeros(size, dtype=torch.int64, device=cuda) for _ in range(2))
    peaks = torch.zeros(2, device=cuda)
    quantiser = Quantiser(cuda)
    quantiser.move(values.clone(), whole, 40, peaks[0])
    quantiser.move(values[:1000].clone(), parts[:1000], 40, peaks[1])
    quantiser.move(values[1000:].clone(), parts[1000:], 40, peaks[1])
    assert torch.equal(whole, parts) and peaks[0] == peaks[1]


def test_hashes_and_masks_are_those_of_the_cpu(cuda: torch.device) -> None:
    values = numbers(3 * SLICE + 1000)
    assert torch.equal(digest(values, values[:999]), digest(values.to(cuda), values.to(cuda)[:999]).cpu())
    rows = torch.arange(500).view(50, 10)
    here = keep_mask(rows, 96, 0.1, 7, "dropout", 3)
    assert torch.equal(here, keep_mask(rows.to(cuda), 96, 0.1, 7, "dropout", 3).cpu())


def test_a_sound_device_passes_its_self_test(cuda: torch.device) -> None:
    assert examine(cuda) == ()


def test_tensors_pass_through_host_memory_whole(cuda: torch.device) -> None:
    sent = torch.randn(7, 33, device=cuda).t()
    assert torch.equal(dense(sent), sent.cpu().contiguous().view(-1))
    landed = torch.zeros_like(sent)
    (view,), spread = landings([landed])
    view[:] = dense(sent).numpy().data.cast("B")
    assert spread is not None and not landed.any()
    spread()
    assert torch.equal(landed, sent)
    assert host_memory(sent).is_pinned()


def test_exact_kernels_are_at_hand(cuda: torch.device) -> None:
    """cuBLAS, attention and scatter refuse to run in exact mode unless they are deterministic."""
    with deterministic_kernels():
        x = torch.randn(2, 4, 128, 32, device=cuda, requires_grad=True)
        mixed = torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
        (mixed @ mixed.transpose(-1, -2)).sum().backward()
        grad = torch.zeros(8, 16, 100, device=cuda)
        grad.scatter_add_(-1, torch.zeros(8, 16, 1, dtype=torch.int64, device=cuda), torch.ones(8, 16, 1, device=cuda))
    assert grad[..., 0].eq(1).all()
