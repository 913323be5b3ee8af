"""Stages that take turns forward and backward: the gradients of one process, bit for bit, and few activations at once."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn

from orchestrator.domain.ids import Rank
from worker.parallel.alternation import Alternation, backward
from worker.parallel.group import Group

WIDTH, ROWS = 5, 3
CPU = torch.device("cpu")


class Passed(dist.Work):
    """A receive that is waited for where it is needed."""

    def __init__(self, wait: Callable[[], None]) -> None:
        super().__init__()
        self._wait = wait

    def wait(self, timeout: object = None) -> bool:
        self._wait()
        return True


@dataclass(frozen=True, slots=True)
class Queues(Group):
    """A pipeline of threads: what member a sends to b goes through mail[a, b]."""

    mail: dict[tuple[int, int], queue.Queue[torch.Tensor]]

    def isend(self, tensor: torch.Tensor, member: int, tag: int = 0) -> dist.Work:
        assert not tensor.requires_grad
        self.mail[self.index, member].put(tensor.clone())
        return Passed(lambda: None)

    def irecv(self, tensor: torch.Tensor, member: int, tag: int = 0) -> dist.Work:
        def wait() -> None:
            tensor.copy_(self.mail[member, self.index].get(timeout=10))

        return Passed(wait)


def a_stage(number: int) -> nn.Module:
    torch.manual_seed(number)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


def inputs(count: int) -> tuple[torch.Tensor, ...]:
    return torch.randn(count * ROWS, WIDTH, generator=torch.Generator().manual_seed(1)).chunk(count)


def loss_of(y: torch.Tensor) -> torch.Tensor:
    return (y * y).sum() * 0.25


def run_stages(num_stages: int, count: int) -> tuple[list[nn.Module], list[list[str]]]:
    """The stages after one pass over `count` micro-batches, and what each did in which order."""
    pairs = [(a, b) for a in range(num_stages) for b in (a - 1, a + 1)]
    mail: dict[tuple[int, int], queue.Queue[torch.Tensor]] = {pair: queue.Queue() for pair in pairs}
    stages, told = [a_stage(s) for s in range(num_stages)], [[] for _ in range(num_stages)]
    members = tuple(Rank(s) for s in range(num_stages))

    def work(s: int) -> None:
        order = Alternation(Queues("pp", members, s, None, mail), (ROWS, WIDTH), torch.float32, CPU)
        parts = inputs(count)

        def forward(place: int, given: torch.Tensor | None) -> torch.Tensor:
            told[s].append(f"F{place}")
            assert (given is None) == (s == 0)
            y = stages[s](parts[place] if given is None else given)
            return loss_of(y) if s == num_stages - 1 else y

        order.run(count, forward, lambda place: told[s].append(f"B{place}"))

    threads = [threading.Thread(target=work, args=(s,)) for s in range(num_stages)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(one.qsize() for one in mail.values()), "everything that was sent was received"
    return stages, told


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_gradients_are_those_of_one_process_to_the_bit(num_stages: int, count: int) -> None:
    stages, told = run_stages(num_stages, count)
    alone = [a_stage(s) for s in range(num_stages)]
    for x in inputs(count):
        loss_of(nn.Sequential(*alone)(x)).backward()
    for mine, wanted in zip(stages, alone, strict=True):
        for parameter, other in zip(mine.parameters(), wanted.parameters(), strict=True):
            assert torch.equal(parameter.grad, other.grad)
    for s, did in enumerate(told):
        assert sorted(did) == sorted(f"{kind}{place}" for kind in "FB" for place in range(count))
        under_way = [sum(1 if one[0] == "F" else -1 for one in did[: end + 1]) for end in range(len(did))]
        assert max(under_way) == min(count, num_stages - s), "each stage keeps as few activations as it can"


def test_two_stages_take_turns_as_drawn() -> None:
    _, told = run_stages(2, 4)
    assert " ".join(told[0]) == "F0 F1 B0 F2 B1 F3 B2 B3"
    assert " ".join(told[1]) == "F0 B0 F1 B1 F2 B2 F3 B3"


def test_what_a_program_raises_comes_out_as_it_is() -> None:
    def forward(place: int, given: torch.Tensor | None) -> torch.Tensor:
        raise KeyError("odd")

    order = Alternation(Group("alone", (Rank(0),), 0, None), (ROWS, WIDTH), torch.float32, CPU)
    with pytest.raises(KeyError, match="odd"):
        order.run(2, forward, lambda _: None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_given_gradient_is_taken_as_it_is(dtype: torch.dtype) -> None:
    x = torch.randn(4, WIDTH).to(dtype).requires_grad_()
    gradient = torch.randn(4, WIDTH).to(dtype)
    gradient[0, 0], gradient[1, 1] = float("inf"), -0.0
    backward(x * 3, gradient)
    mine, x.grad = x.grad, None
    (x * 3).backward(gradient)
    assert mine is not None and x.grad is not None
    assert torch.equal(mine.view(torch.uint8), x.grad.view(torch.uint8))
