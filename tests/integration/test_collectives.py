"""What passes over links, in real processes: every collective against plain sums, and torch's own pipelining."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_processes import Child, run_all
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from orchestrator.domain.ids import Rank
from worker.parallel.group import Group
from worker.parallel.world import enter_world, leave_world

pytestmark = pytest.mark.timeout(120)

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8)
LENGTHS = (0, 1, 3, 1000, 40_001)
"""The last is cut into parts by all_reduce, and unevenly."""


def value_of(rank: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + length)
    if dtype.is_floating_point:
        return torch.randn(length, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(0, 50, (length,), generator=generator).to(dtype)


def sum_in_order(values: list[torch.Tensor]) -> torch.Tensor:
    total = values[0].clone()
    for value in values[1:]:
        total += value
    return total


def check_every_collective(child: Child) -> int:
    links = child.links()
    pg, size, me = child.everybody(links), child.size, child.rank
    group = Group("all", tuple(Rank(r) for r in range(size)), me, pg)
    checked = 0
    for dtype in DTYPES:
        for length in LENGTHS:
            values = [value_of(r, length, dtype) for r in range(size)]
            total = sum_in_order(values)
            assert torch.equal(group.all_reduce(values[me].clone()), total)
            assert torch.equal(
                group.all_reduce(values[me].clone(), "max"), torch.stack(values).amax(0) if length else total
            )
            column = torch.stack([values[me], values[me]], dim=1)[:, 0]  # not contiguous
            pg.allreduce([column]).wait()
            assert torch.equal(column, total)

            out = torch.empty(size * length, dtype=dtype)
            assert torch.equal(group.all_gather_into(out, values[me]), torch.cat(values))
            parts = [[torch.empty_like(value) for value in values]]
            pg.allgather(parts, [values[me]]).wait()
            assert torch.equal(torch.cat(parts[0]), torch.cat(values))

            wide = [value_of(r, size * length, dtype) for r in range(size)]
            expected = sum_in_order(wide)[me * length : (me + 1) * length]
            assert torch.equal(group.reduce_scatter_into(torch.empty(length, dtype=dtype), wide[me]), expected)

            # Member j gets length * (j % 3) elements from everybody: uneven, and nothing for some.
            inputs = [value_of(100 * me + j, length * (j % 3), dtype) for j in range(size)]
            outputs = [torch.empty(length * (me % 3), dtype=dtype) for _ in range(size)]
            group.all_to_all(outputs, inputs)
            for j in range(size):
                assert torch.equal(outputs[j], value_of(100 * j + me, length * (me % 3), dtype))

            for root in range(size):
                options = dist.BroadcastOptions()
                options.rootRank = root
                copy = values[me].clone()
                pg.broadcast([copy], options).wait()
                assert torch.equal(copy, values[root])
            checked += 1
    pg.barrier().wait()
    links.close()
    return checked


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_collective_equals_the_plain_result_in_group_order(size: int) -> None:
    assert run_all(size, check_every_collective) == [len(DTYPES) * len(LENGTHS)] * size


def wait_in_any_order(child: Child) -> bool:
    links = child.links()
    pg, size, me = child.everybody(links), child.size, child.rank
    other = child.everybody(links, channel=2)
    totals = [torch.full((n,), float(me + n)) for n in (10, 50_000, 7)]
    works = [pg.allreduce([t]) for t in totals] + [other.allreduce([torch.ones(3)])]
    inputs = [[torch.full((5,), 100.0 * me + j + b) for j in range(size)] for b in range(6)]
    outputs = [[torch.empty(5) for _ in range(size)] for _ in range(6)]
    works += [pg.alltoall(outputs[b], inputs[b]) for b in range(6)]
    # Tags: received in another order than sent, two of one tag in order.
    left, right = (me - 1) % size, (me + 1) % size
    works += [pg.send([torch.full((4,), float(10 * me + i))], right, tag) for i, tag in enumerate((5, 6, 5))]
    landed = [torch.empty(4) for _ in range(3)]
    works += [pg.recv([landed[1]], left, 6), pg.recv([landed[0]], left, 5), pg.recv([landed[2]], left, 5)]
    for work in works if me % 2 else reversed(works):
        work.wait()
    for n, total in zip((10, 50_000, 7), totals, strict=True):
        assert torch.equal(total, torch.full((n,), float(sum(r + n for r in range(size)))))
    for b in range(6):
        for j in range(size):
            assert torch.equal(outputs[b][j], torch.full((5,), 100.0 * j + me + b))
    assert [t[0].item() for t in landed] == [10 * left, 10 * left + 1, 10 * left + 2]
    links.close()
    return True


def test_operations_posted_together_may_be_waited_for_in_any_order() -> None:
    assert all(run_all(3, wait_in_any_order))


def send_before_it_is_asked_for(child: Child) -> bool:
    """Large frames that arrive before their receive is posted, wholly or in part, while others are waited for."""
    links = child.links()
    pg, other = child.everybody(links), 1 - child.rank
    big = torch.arange(3_000_000, dtype=torch.float32) + child.rank
    sends = [pg.send([big], other, 1), pg.send([torch.ones(2)], other, 2)]
    small, landed = torch.empty(2), torch.empty_like(big)
    for _ in range(child.rank):
        pg.recv([small], other, 2).wait()  # behind the big frame on the wire
    receive = pg.recv([landed], other, 1)
    if child.rank == 0:
        pg.recv([small], other, 2).wait()
    for work in (*sends, receive):
        work.wait()
    assert torch.equal(landed, torch.arange(3_000_000, dtype=torch.float32) + other)
    assert torch.equal(small, torch.ones(2))
    pg.barrier().wait()
    links.close()
    return True


def test_frames_nobody_asked_for_yet_are_kept() -> None:
    assert all(run_all(2, send_before_it_is_asked_for))


# --- torch's pipelining --------------------------------------------------------------------------------------------------


def layers() -> list[nn.Module]:
    torch.manual_seed(3)
    return [nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2)]


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(16, 8, generator=generator), torch.randn(16, 8, generator=generator)


def pipeline_stage(child: Child) -> list[Any]:
    links = child.links()
    members = (Rank(0), Rank(1))
    world = child.everybody(links, channel=9)
    pipeline = child.everybody(links)
    enter_world(Rank(child.rank), world, pipeline, members)
    module = layers()[child.rank]
    stage = PipelineStage(module, child.rank, 2, torch.device("cpu"), group=pipeline)
    schedule = Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)
    x, y = batch()
    losses: list[torch.Tensor] = []
    for _ in range(2):
        module.zero_grad()
        if child.rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=y, losses=losses)
    summed = torch.ones(2)
    dist.all_reduce(summed)
    assert summed.tolist() == [2.0, 2.0]
    gathered = torch.empty(2)
    dist.all_gather_single(gathered, torch.full((1,), float(child.rank)), group=pipeline)
    assert gathered.tolist() == [0.0, 1.0]
    scattered = torch.empty(1)
    dist.reduce_scatter_single(scattered, torch.ones(2), group=pipeline)
    assert scattered.item() == 2.0
    objects = [None, None]
    dist.all_gather_object(objects, {"rank": child.rank}, group=pipeline)
    assert objects == [{"rank": 0}, {"rank": 1}]
    dist.barrier()
    leave_world()
    links.close()
    return [p.grad.tolist() for p in module.parameters()] + [[loss.item() for loss in losses]]


def test_torch_pipelining_on_links_equals_a_local_run() -> None:
    first, second = layers()
    x, y = batch()
    losses = []
    for _ in range(2):
        first.zero_grad()
        second.zero_grad()
        for a, b in zip(x.chunk(4), y.chunk(4), strict=True):
            loss = nn.functional.mse_loss(second(first(a)), b)
            losses.append(loss.item())
            (loss / 4).backward()
    results = run_all(2, pipeline_stage)
    for module, result in zip((first, second), results, strict=True):
        for parameter, gradient in zip(module.parameters(), result, strict=False):
            torch.testing.assert_close(parameter.grad, torch.tensor(gradient))
    assert results[1][-1] == pytest.approx(losses[-4:])  # those of the last step
