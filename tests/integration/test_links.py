"""Links and the process group on them, in real processes: every way out of what is under way."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_processes import Child, Ranks, tell

from orchestrator.domain.ids import Rank
from worker.parallel.connection import MessageMismatch
from worker.parallel.group import Aborted, PeerLost
from worker.parallel.links import Links

pytestmark = pytest.mark.timeout(120)

AT_ONCE_S = 5.0
"""On any machine; every limit that could end a wait here instead is at least twice as long."""

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
