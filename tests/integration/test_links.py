"""Links and the process group on them, in real processes: every collective against plain sums, and every way out."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_processes import COOKIE, Child, Ranks, run_all, tell
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from orchestrator.domain.ids import Generation, Rank
from worker.parallel.connection import MessageMismatch
from worker.parallel.forming import NotFormed
from worker.parallel.group import Aborted, Group, PeerLost
from worker.parallel.links import Links
from worker.parallel.process_group import LinksProcessGroup
from worker.parallel.world import enter_world, leave_world

pytestmark = pytest.mark.timeout(120)

AT_ONCE_S = 5.0
"""On any machine; every limit that could end a wait here instead is at least twice as long."""

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


BIG = 1 << 26
"""fp32 elements: 256 MiB."""


def in_group(child: Child, links: Links, what: str, length: int) -> None:
    """One operation that can't complete because the others never take part."""
    pg, size, other = child.everybody(links), child.size, (child.rank + 1) % child.size
    tensor = torch.ones(length)
    if what == "send":
        pg.send([tensor], other, 0).wait()
    elif what == "recv":
        pg.recv([tensor], other, 0).wait()
    elif what == "allreduce":
        pg.allreduce([tensor]).wait()
    elif what == "allgather":
        pg._allgather_base(torch.empty(size * length), tensor).wait()
    elif what == "reduce_scatter":
        pg._reduce_scatter_base(tensor, torch.ones(size * length)).wait()
    elif what == "alltoall":
        pg.alltoall([torch.empty(length) for _ in range(size)], [tensor] * size).wait()
    elif what == "broadcast":
        options = dist.BroadcastOptions()
        options.rootRank = other
        pg.broadcast([tensor], options).wait()
    else:
        pg.barrier().wait()


def abort_inside(child: Child, what: str, length: int, delay_s: float) -> float:
    """Seconds from the abort, made by another thread, to the exception in the waiting one."""
    links = child.links()
    if child.rank != 0:
        child.pipe.recv()  # take no part; answer nothing
        links.close()
        return 0.0
    at = [0.0]

    def abort() -> None:
        time.sleep(delay_s)
        at[0] = time.monotonic()
        links.abort()
        links.abort()

    threading.Thread(target=abort).start()
    with pytest.raises(Aborted):
        in_group(child, links, what, length)
    raised = time.monotonic()
    with pytest.raises(Aborted):
        in_group(child, links, what, 1)
    links.close()
    links.close()
    links.abort()
    with pytest.raises(Aborted):
        in_group(child, links, what, 1)
    return raised - at[0]


@pytest.mark.parametrize(
    "what", ["send", "recv", "allreduce", "allgather", "reduce_scatter", "alltoall", "broadcast", "barrier"]
)
def test_abort_leaves_every_operation_at_once(what: str) -> None:
    with Ranks(3, abort_inside, what, 1 << 22, 0.1) as ranks:
        left = ranks.receive(0)
        for rank in (1, 2):
            ranks.pipes[rank].send("done")
            ranks.receive(rank)
    assert left < AT_ONCE_S


def transfer(child: Child, role: str, how: str) -> Any:
    """Rank 0 does `role`; rank 1 does the other half, again and again, until it is killed or told to stop."""
    links = child.links()
    pg = child.everybody(links)
    tensor = torch.ones(BIG)
    other = {"send": "recv", "recv": "send"}.get(role, role)
    peer, landed = Rank(1 - child.rank), torch.empty(BIG if role == "exchange" else 0)
    mine = role if child.rank == 0 else other
    tell(child, "ready")
    if child.rank == 0 and how == "abort":
        threading.Timer(0.25, lambda: (tell(child, time.monotonic()), links.abort())).start()
    rounds = 0
    try:
        while True:
            work = (
                pg.allreduce([tensor])
                if mine == "allreduce"
                else pg.exchange([(peer, tensor)], [(peer, landed)])
                if mine == "exchange"
                else pg.send([tensor], 1 - child.rank, 0)
                if mine == "send"
                else pg.recv([tensor], 1 - child.rank, 0)
            )
            work.wait()
            rounds += 1
    except (Aborted, PeerLost) as error:
        at = time.monotonic()
        return type(error).__name__, getattr(error, "rank", None), at


@pytest.mark.parametrize("role", ["send", "recv", "allreduce", "exchange"])
def test_a_peer_killed_inside_256_mib_is_seen_at_once(role: str) -> None:
    with Ranks(2, transfer, role, "kill") as ranks:
        assert ranks.receive(0) == ranks.receive(1) == "ready"
        time.sleep(0.25)
        killed = ranks.kill(1)
        name, rank, at = ranks.receive(0)
    assert (name, rank) == ("PeerLost", 1)
    assert at - killed < AT_ONCE_S


@pytest.mark.parametrize("role", ["send", "recv", "allreduce", "exchange"])
def test_an_abort_inside_256_mib_leaves_at_once(role: str) -> None:
    with Ranks(2, transfer, role, "abort") as ranks:
        assert ranks.receive(0) == ranks.receive(1) == "ready"
        aborted = ranks.receive(0)
        name, _, at = ranks.receive(0)
    assert name == "Aborted"
    assert at - aborted < AT_ONCE_S


def lose_or_leave(child: Child, how: str) -> str:
    links = child.links()
    pg = child.everybody(links)
    pg.barrier().wait()
    if child.rank == 1:
        if how == "die":
            os._exit(1)
        if how == "die while aborted":
            tell(child, "formed")
            child.pipe.recv()
        links.close()
        return "left"
    try:
        if how == "die while aborted":
            child.pipe.recv()
            links.abort()
        pg.recv([torch.ones(1)], 1, 0).wait()
    except (Aborted, PeerLost) as error:
        return type(error).__name__
    return "completed"


def test_a_peer_that_closes_in_good_order_is_not_reported_lost() -> None:
    with Ranks(2, lose_or_leave, "leave") as ranks:
        assert ranks.receive(0) == "Aborted"
    with Ranks(2, lose_or_leave, "die") as ranks:
        assert ranks.receive(0) == "PeerLost"


def test_aborted_wins_over_a_lost_peer() -> None:
    with Ranks(2, lose_or_leave, "die while aborted") as ranks:
        assert ranks.receive(1) == "formed"
        ranks.kill(1)
        ranks.processes[1].join(60)
        ranks.pipes[0].send("go on")
        assert ranks.receive(0) == "Aborted"


def mismatched(child: Child) -> str:
    links = child.links()
    pg = child.everybody(links)
    if child.rank == 0:
        pg.send([torch.ones(3)], 1, 0).wait()
        child.pipe.recv()
        return ""
    with pytest.raises(MessageMismatch) as caught:
        pg.recv([torch.ones(4)], 0, 0).wait()
    return str(caught.value)


def test_a_wrong_length_names_the_sender_and_both_lengths() -> None:
    with Ranks(2, mismatched) as ranks:
        message = ranks.receive(1)
        ranks.pipes[0].send("done")
    assert "rank 0 sent 12 bytes" in message and "16 were expected" in message


# --- forming -------------------------------------------------------------------------------------------------------------


def form(rank: int, listener: socket.socket, addresses: dict[Rank, str], generation: int, timeout_s: float) -> Links:
    links = Links(Rank(rank))
    try:
        links.form(
            generation=Generation(generation),
            cookie=COOKIE,
            listener=listener,
            addresses=addresses,
            peers=[other for other in addresses if other != rank],
            timeout_s=timeout_s,
        )
    except BaseException:
        links.close()
        raise
    return links


@pytest.fixture
def listeners() -> Any:
    made = [socket.create_server(("127.0.0.1", 0), backlog=16) for _ in range(3)]
    yield made
    for listener in made:
        listener.close()


def addresses_of(listeners: list[socket.socket]) -> dict[Rank, str]:
    return {Rank(r): f"127.0.0.1:{s.getsockname()[1]}" for r, s in enumerate(listeners)}


def in_threads(*functions: Callable[[], Any]) -> list[Any]:
    results: list[Any] = [None] * len(functions)

    def run(i: int) -> None:
        try:
            results[i] = functions[i]()
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


def test_missing_peers_are_named_when_the_deadline_passes(listeners: list[socket.socket]) -> None:
    addresses = addresses_of(listeners)
    with pytest.raises(NotFormed) as caught:
        form(1, listeners[1], addresses, 7, 0.3)
    message = str(caught.value)
    assert "generation 7" in message and "no call from rank 0" in message and f"2 at {addresses[Rank(2)]}" in message


def test_callers_of_other_generations_and_strangers_are_dropped(listeners: list[socket.socket]) -> None:
    addresses = addresses_of(listeners[:2])
    # Left in the backlog by generation 4, by somebody who belongs to 6 already, and by nobody of ours.
    early = [threading.Thread(target=lambda g=g: _swallow(form, 0, listeners[0], addresses, g, 0.4)) for g in (4, 6)]
    stranger = socket.create_connection(listeners[1].getsockname())
    stranger.sendall(b"GET / HTTP/1.1\r\n" + b"x" * 100)
    for thread in early:
        thread.start()
    time.sleep(0.1)
    made = in_threads(lambda: form(0, listeners[0], addresses, 5, 10), lambda: form(1, listeners[1], addresses, 5, 10))
    assert all(isinstance(links, Links) for links in made), made
    groups = [LinksProcessGroup(made[r], label="two", channel=1, members=(Rank(0), Rank(1)), index=r) for r in range(2)]
    tensors = [torch.ones(3), torch.ones(3) * 2]
    in_threads(*(lambda r=r: groups[r].allreduce([tensors[r]]).wait() for r in range(2)))
    assert torch.equal(tensors[0], torch.full((3,), 3.0)) and torch.equal(tensors[1], tensors[0])
    for thread in early:
        thread.join(10)
    stranger.close()
    for links in made:
        links.close()


def _swallow(function: Callable[..., Links], *args: Any) -> None:
    with pytest.raises(NotFormed):
        function(*args)


def test_a_rank_that_comes_later_is_waited_for(listeners: list[socket.socket]) -> None:
    addresses = addresses_of(listeners[:2])
    # Nobody listens at first where rank 1 will be: dialling again until it is there.
    port = listeners[1].getsockname()[1]
    listeners[1].close()

    def late() -> Links:
        time.sleep(0.3)
        listeners[1] = socket.create_server(("127.0.0.1", port), backlog=16)
        return form(1, listeners[1], addresses, 1, 10)

    made = in_threads(lambda: form(0, listeners[0], addresses, 1, 10), late)
    assert all(isinstance(links, Links) for links in made), made
    for links in made:
        links.close()


def test_abort_ends_forming_at_once(listeners: list[socket.socket]) -> None:
    links = Links(Rank(1))
    at = [0.0]

    def abort() -> None:
        at[0] = time.monotonic()
        links.abort()

    timer = threading.Timer(0.1, abort)
    timer.start()
    with pytest.raises(Aborted):
        links.form(
            generation=Generation(1),
            cookie=COOKIE,
            listener=listeners[1],
            addresses=addresses_of(listeners),
            peers=[Rank(0), Rank(2)],
            timeout_s=10,
        )
    assert time.monotonic() - at[0] < AT_ONCE_S
    timer.join()
    links.close()


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
