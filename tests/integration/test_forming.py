"""How links find each other: who is missing is named, who is not meant is turned away, and forming can be left at once."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rank_processes import COOKIE

from orchestrator.domain.ids import Generation, Rank
from worker.parallel.forming import NotFormed
from worker.parallel.group import Aborted
from worker.parallel.links import Links
from worker.parallel.process_group import LinksProcessGroup

pytestmark = pytest.mark.timeout(120)

AT_ONCE_S = 5.0
"""On any machine; every limit that could end a wait here instead is at least twice as long."""


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
