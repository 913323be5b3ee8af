"""Real rank processes for tests: forked from a server that has torch imported, each with a bound listener and a pipe."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from orchestrator.domain.ids import Generation, Rank
from worker.parallel.links import Links
from worker.parallel.process_group import LinksProcessGroup

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "torch.distributed.pipelining", "worker.session"])

COOKIE = b"0123456789abcdef"


@dataclass
class Child:
    """What a rank's function is given. pipe: to and from the test."""

    rank: int
    size: int
    listener: socket.socket
    addresses: dict[Rank, str]
    pipe: Connection

    def links(self, generation: int = 1, timeout_s: float = 60.0) -> Links:
        links = Links(Rank(self.rank))
        links.form(
            generation=Generation(generation),
            cookie=COOKIE,
            listener=self.listener,
            addresses=self.addresses,
            peers=[Rank(r) for r in range(self.size) if r != self.rank],
            timeout_s=timeout_s,
        )
        return links

    def everybody(self, links: Links, channel: int = 1) -> LinksProcessGroup:
        members = tuple(Rank(r) for r in range(self.size))
        return LinksProcessGroup(links, label="all", channel=channel, members=members, index=self.rank)


class Ranks:
    """size processes that run function(child, *args); what it returns is their result. Use as a context manager."""

    def __init__(self, size: int, function: Callable[..., Any], *args: Any) -> None:
        self.listeners = [socket.create_server(("127.0.0.1", 0), backlog=64) for _ in range(size)]
        self.addresses = {Rank(r): f"127.0.0.1:{s.getsockname()[1]}" for r, s in enumerate(self.listeners)}
        self.pipes: list[Connection] = [None] * size  # type: ignore[list-item]
        self.processes: list[Any] = [None] * size
        for rank in range(size):
            self.start(rank, function, *args)

    def start(self, rank: int, function: Callable[..., Any], *args: Any) -> None:
        mine, theirs = CONTEXT.Pipe()
        child = Child(rank, len(self.listeners), self.listeners[rank], self.addresses, theirs)
        process = CONTEXT.Process(target=_run, args=(function, child, args), daemon=True)
        process.start()
        theirs.close()
        self.pipes[rank], self.processes[rank] = mine, process

    def kill(self, rank: int) -> float:
        """SIGKILL; the instant on the clock all processes share."""
        os.kill(self.processes[rank].pid, signal.SIGKILL)
        return time.monotonic()

    def receive(self, rank: int, timeout_s: float = 100.0) -> Any:
        """The next thing the rank sent or returned. An exception there fails the test with its traceback."""
        assert self.pipes[rank].poll(timeout_s), f"rank {rank} said nothing for {timeout_s} s"
        kind, value = self.pipes[rank].recv()
        assert kind != "raised", f"rank {rank} raised:\n{value}"
        return value

    def results(self, timeout_s: float = 100.0) -> list[Any]:
        return [self.receive(rank, timeout_s) for rank in range(len(self.processes))]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.join(10)
        for pipe in self.pipes:
            pipe.close()
        for listener in self.listeners:
            listener.close()


def tell(child: Child, value: Any) -> None:
    child.pipe.send(("said", value))


def run_all(size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    with Ranks(size, function, *args) as ranks:
        return ranks.results()


def _run(function: Callable[..., Any], child: Child, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    try:
        child.pipe.send(("returned", function(child, *args)))
    except BaseException:
        child.pipe.send(("raised", traceback.format_exc()))
