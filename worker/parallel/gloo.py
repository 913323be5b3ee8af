"""Gloo as a carrier: a choice, not the default, because a transfer under way on it can't be left.

Its groups find each other through links (no store server anywhere); what passes between any two ranks goes over links too.
`abort` shuts its connected sockets down, which frees ranks that wait in a collective within milliseconds but not one in the
middle of a large transfer: its thread can be given up (see `guard`), and what gloo may still write into is parked, never
destroyed: the groups of an aborted generation, and the operations on them. State never is: all of it moves over links.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from orchestrator.domain.ids import Rank
from worker.progress import Progress

from .carrier import Addressed, Handle, LinksCarrier
from .group import Aborted, PeerLost
from .guard import Guard
from .links import Links
from .mesh import Circle
from .store import LinkStore

WAIT_S = 1800.0
"""Gloo's own limit on one operation; abort is what normally ends a wait."""
BLAME_S = 0.2
"""How long to look for the peer behind a failure that gloo does not name."""

FEW = 64
"""Operations remembered before those that have completed are forgotten."""

_parked: list[object] = []


class GlooProcessGroup(dist.ProcessGroup):
    """Delegates to gloo, adds the list all-to-all it lacks, and says Aborted and PeerLost like links do."""

    def __init__(
        self, gloo: dist.ProcessGroupGloo, circle: Circle, index: int, links: Links, progress: Progress, guard: Guard
    ) -> None:
        super().__init__(index, len(circle.members))  # type: ignore[call-arg]
        self.gloo: Any = gloo
        self.label = circle.name
        self.links = links
        self.progress = progress
        self.guard = guard
        self.started: list[GlooWork] = []
        """Operations that may be under way."""

    def getBackendName(self) -> str:
        return "gloo"

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> GlooWork:  # type: ignore[override]
        return self._start(lambda: self.gloo.allreduce(tensors, opts or dist.AllreduceOptions()), tensors)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> GlooWork:
        return GlooWork(self, [work for t in tensors for work in self.allreduce([t], opts).works], tensors)

    def _allgather_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> GlooWork:
        return self._start(lambda: self.gloo._allgather_base(output, input), [output])

    def allgather(  # type: ignore[override]
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> GlooWork:
        return self._start(lambda: self.gloo.allgather(outputs, inputs), [t for parts in outputs for t in parts])

    def _reduce_scatter_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> GlooWork:
        options = opts or dist.ReduceScatterOptions()
        return self._start(lambda: self.gloo._reduce_scatter_base(output, input, options), [output])

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> GlooWork:  # type: ignore[override]
        return self._start(lambda: self.gloo.broadcast(tensors, opts), tensors)

    def barrier(self, opts: Any = None) -> GlooWork:
        return self.allreduce([torch.zeros(1)])

    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None) -> GlooWork:
        """One flat exchange of all parts; lengths may be uneven."""
        sent = torch.cat([tensor.detach().reshape(-1) for tensor in inputs])
        landed = torch.empty(sum(t.numel() for t in outputs), dtype=sent.dtype)
        cuts = [t.numel() for t in outputs]

        def spread() -> None:
            start = 0
            for output in outputs:
                output.detach().copy_(landed[start : start + output.numel()].view(output.shape))
                start += output.numel()

        splits = [t.numel() for t in inputs]
        start = lambda: self.gloo.alltoall_base(landed, sent, cuts, splits)  # noqa: E731
        return self._start(start, outputs, spread, keep=(sent,))

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int = 0) -> GlooWork:
        dense = [tensor.detach().contiguous() for tensor in tensors]
        return self._start(lambda: self.gloo.send(dense, dst, tag), tensors, keep=tuple(dense))

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int = 0) -> GlooWork:
        return self._start(lambda: self.gloo.recv(tensors, src, tag), tensors)

    def shutdown(self) -> None:
        """The carrier frees it."""

    def _start(
        self,
        start: Callable[[], dist.Work],
        result: list[torch.Tensor],
        then: Callable[[], None] | None = None,
        keep: tuple[torch.Tensor, ...] = (),
    ) -> GlooWork:
        if self.links.aborted or self.gloo is None:
            raise Aborted("the generation was aborted")
        try:
            work = GlooWork(self, [start()], result, then, keep)
        except RuntimeError as error:
            raise self.explain(error) from error
        if len(self.started) >= FEW:
            self.started = [one for one in self.started if not one.is_completed()]
        self.started.append(work)
        return work

    def explain(self, error: RuntimeError) -> RuntimeError:
        """Gloo names an address at best. Aborted first; then whoever's link is broken; else gloo's own words."""
        if self.links.aborted:
            return Aborted("the generation was aborted")
        lost = self.links.find_lost(BLAME_S)
        if self.links.aborted:
            return Aborted("the generation was aborted")
        return error if lost is None else PeerLost(lost)


class GlooWork(dist.Work):
    def __init__(
        self,
        group: GlooProcessGroup,
        works: list[dist.Work],
        result: list[torch.Tensor],
        then: Callable[[], None] | None = None,
        keep: tuple[torch.Tensor, ...] = (),
    ) -> None:
        super().__init__()
        self.works = works
        self._group = group
        self._result = result
        self._then = then
        self._keep = keep

    def wait(self, timeout: timedelta | None = None) -> bool:
        group = self._group
        group.progress.enter(group.label)
        try:
            with group.guard:
                for work in self.works:
                    work.wait()
        except RuntimeError as error:
            raise group.explain(error) from error
        finally:
            group.progress.leave()
        if group.links.aborted:
            raise Aborted("the generation was aborted")
        then, self._then = self._then, None
        if then is not None:
            then()
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self.works)

    def result(self) -> list[torch.Tensor]:
        return self._result

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        self.wait()
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result(self._result)
        return future


class GlooCarrier:
    """host: the interface's own address, which gloo binds to. world: members; everybody: members and donors."""

    def __init__(self, links: Links, rank: Rank, world: int, everybody: int, progress: Progress, host: str) -> None:
        self._links = links
        self._progress = progress
        self._host = host
        self._store = LinkStore(links, world)
        self._exchange = LinksCarrier(links, rank, everybody, progress)
        self._groups: list[GlooProcessGroup] = []
        self._sockets: set[str] = set()
        self._guard = Guard()

    def open(self) -> None:
        """Each group connects by itself."""

    def group(self, circle: Circle, index: int) -> dist.ProcessGroup:
        before = _connected_sockets()
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=WAIT_S)
        options._threads = 1
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._host)]
        store = PrefixStore(circle.name, self._store)
        with self._guard:  # it connects to its peers in there
            gloo = dist.ProcessGroupGloo(store, index, len(circle.members), options)
        group = GlooProcessGroup(gloo, circle, index, self._links, self._progress, self._guard)
        self._sockets |= _connected_sockets().keys() - before.keys()
        self._groups.append(group)
        return group

    def post(self, sends: Addressed, receives: Addressed) -> Handle:
        return self._exchange.post(sends, receives)

    def abort(self) -> None:
        """Shut the sockets down that came with the groups; by inode, because numbers are given out again."""
        for inode, fd in _connected_sockets().items():
            if inode in self._sockets:
                with contextlib.suppress(OSError):
                    copy = socket.socket(fileno=os.dup(fd))
                    copy.shutdown(socket.SHUT_RDWR)
                    copy.close()

    def give_up(self) -> bool:
        return self._guard.give_up()

    def close(self) -> None:
        if self._links.broken:
            _parked.extend(group.gloo for group in self._groups)
            _parked.extend(work for group in self._groups for work in group.started if not work.is_completed())
        for group in self._groups:
            group.gloo = None
        self._groups.clear()
        self._sockets.clear()


def _connected_sockets() -> dict[str, int]:
    """inode -> fd of this process's sockets that do not listen: shutting gloo's listener ends the process."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            inode = entry.readlink().name
            if not inode.startswith("socket:"):
                continue
            fd = int(entry.name)
            copy = socket.socket(fileno=os.dup(fd))
            try:
                inet = copy.family in (socket.AF_INET, socket.AF_INET6)
                if inet and not copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    found[inode] = fd
            finally:
                copy.close()
        except OSError:
            continue
    return found
