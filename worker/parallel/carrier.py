"""What carries a generation's tensors: the seam between a session and its backend, and links, the one we own.

A carrier makes connected process groups and moves tensors between any two ranks that the plan connects. Links are formed
whatever the backend; gloo and nccl use them to find each other and to know who was lost, and what must be true when it has
arrived (state, votes, hashes) goes over links always.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from orchestrator.domain.ids import Rank
from worker.progress import Progress

from .links import Links
from .mesh import EXCHANGE, Circle
from .process_group import LinksProcessGroup

Addressed = Sequence[tuple[Rank, torch.Tensor]]
"""Tensors and the ranks they go to or come from; between two ranks they match in order."""


class Handle(Protocol):
    def wait(self) -> object:
        """Until everything posted with it is through. Raises Aborted, PeerLost."""
        ...

    def landed(self) -> Sequence[bool]:
        """Of each receive, in order: whether it is whole. Never raises, so that a failure does not cost what had come."""
        ...


class Carrier(Protocol):
    def open(self) -> None:
        """Once, on every rank, when links are formed and before anything else."""
        ...

    def group(self, circle: Circle, index: int) -> dist.ProcessGroup:
        """Connected; every member calls this, for the same circles in the same order."""
        ...

    def post(self, sends: Addressed, receives: Addressed) -> Handle:
        """Of members' tensors on the job's kind of device."""
        ...

    def abort(self) -> None:
        """From any thread; links are aborted before."""
        ...

    def give_up(self) -> bool:
        """Whether the training thread is stuck in here; if so it ends with Replaced when it comes out. From any thread."""
        ...

    def close(self) -> None: ...


class LinksCarrier:
    def __init__(self, links: Links, rank: Rank, world: int, progress: Progress) -> None:
        self._links = links
        self._progress = progress
        # Every rank by its number; the exchange needs no group, but this is one that may wait and be watched.
        self._everybody = LinksProcessGroup(
            links,
            label="exchange",
            channel=EXCHANGE,
            members=tuple(Rank(r) for r in range(world)),
            index=rank,
            progress=progress,
        )

    def open(self) -> None:
        """Nothing beyond the links."""

    def group(self, circle: Circle, index: int) -> dist.ProcessGroup:
        return LinksProcessGroup(
            self._links,
            label=circle.name,
            channel=circle.channel,
            members=circle.members,
            index=index,
            progress=self._progress,
        )

    def post(self, sends: Addressed, receives: Addressed) -> Handle:
        return self._everybody.exchange(sends, receives)

    def abort(self) -> None:
        """Nothing beyond the links."""

    def give_up(self) -> bool:
        """Nobody is ever stuck in links."""
        return False

    def close(self) -> None:
        """Nothing beyond the links."""
