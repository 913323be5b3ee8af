"""NCCL as a carrier, for ranks that each own a CUDA device. Its communicators find each other through links.

A collective here is a kernel in a stream: `wait` orders streams and says nothing about success, and one that was aborted on
one side may end with any numbers on another. So it carries what a vote over links makes good: activations, gradients,
compute parameters. `abort` aborts every communicator, which ends kernels that wait for a dead peer.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from orchestrator.domain.ids import Rank

from .carrier import Addressed, Handle
from .group import Aborted, Group
from .links import Links
from .mesh import WORLD, Circle
from .store import LinkStore

WAIT_S = 1800.0


def check(links: Links) -> None:
    """Raises Aborted. Aborting a communicator takes NCCL half a second, for which whoever enters it now would wait."""
    if links.aborted:
        raise Aborted("the generation was aborted")


@dataclass(frozen=True, slots=True)
class NcclGroup(Group):
    links: Links

    @property
    def live(self) -> dist.ProcessGroup | None:
        check(self.links)
        return self.pg

    def meet(self, device: torch.device) -> None:
        """A batch that only some members take part in is allowed on a communicator that all have entered once."""
        self.all_reduce(torch.zeros(1, device=device))

    def trade(self, member: int, give: torch.Tensor | None, room: torch.Tensor | None) -> list[dist.Work]:
        pg: Any = self.live
        if give is None or room is None:
            return Group.trade(self, member, give, room)
        pg._start_coalescing(room.device)  # one launch: neither waits for the other's receive
        pg.send([give], member, 0)
        pg.recv([room], member, 0)
        return [pg._end_coalescing(room.device)]


class NcclCarrier:
    """rank 0 must be linked with everybody: it names the communicator of the whole generation."""

    def __init__(self, links: Links, rank: Rank, world: int) -> None:
        self._device = torch.device("cuda", torch.cuda.current_device())
        self.links = links
        self._rank = rank
        self._store = LinkStore(links, world)
        self._backends: list[Any] = []
        self._world: Any = None
        self._size = world

    def open(self) -> None:
        everybody = Circle("world", WORLD, tuple(Rank(r) for r in range(self._size)))
        self._world = self.group(everybody, self._rank)
        check(self.links)
        # Point-to-point of a few is only allowed on a communicator that all have entered once.
        self._world.allreduce([torch.zeros(1, device=self._device)], dist.AllreduceOptions()).wait()
        torch.cuda.synchronize(self._device)

    def group(self, circle: Circle, index: int) -> dist.ProcessGroup:
        # We close generations ourselves; NCCL's watchdog and its monitor would end the process when a peer is lost.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")  # a dump holds up whoever lets go of a broken group
        nccl: Any = dist.ProcessGroupNCCL  # type: ignore[attr-defined,unused-ignore]
        options = nccl.Options()
        options._timeout = timedelta(seconds=WAIT_S)
        options.global_ranks_in_group = list(circle.members)
        options.group_name = circle.name
        store = PrefixStore(circle.name, self._store)
        backend = nccl(store, index, len(circle.members), options)
        group: Any = dist.ProcessGroup(store, index, len(circle.members))
        group._set_default_backend(dist.ProcessGroup.BackendType.NCCL)
        group._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, backend)
        self._backends.append(backend)
        if self.links.aborted:  # an abort that came meanwhile has not seen it
            self.abort()
        made: dist.ProcessGroup = group
        return made

    def post(self, sends: Addressed, receives: Addressed) -> Handle:
        """One coalesced launch, so that the order of peers on either side does not matter."""
        check(self.links)
        self._world._start_coalescing(self._device)
        for peer, tensor in sends:
            self._world.send([tensor.detach().contiguous()], peer, 0)
        for peer, tensor in receives:
            self._world.recv([tensor.detach()], peer, 0)
        return _Coalesced(self._world._end_coalescing(self._device), len(receives))

    def abort(self) -> None:
        # Each in a thread of its own: aborting one may wait for a kernel that only the abort of another one ends.
        backends, self._backends = self._backends, []
        for backend in backends:
            threading.Thread(target=backend.abort, name="abort", daemon=True).start()

    def give_up(self) -> bool:
        """Its kernels end when their communicators are aborted; who does not leave even so is killed."""
        return False

    def close(self) -> None:
        """Abort: nothing still under way is wanted, and a shutdown would wait for peers."""
        self.abort()
        self._world = None


class _Coalesced:
    def __init__(self, work: Any, receives: int) -> None:
        self._work = work
        self._receives = receives

    def wait(self) -> object:
        return self._work.wait()

    def landed(self) -> list[bool]:
        """Nobody can say, so nothing has."""
        return [False] * self._receives
