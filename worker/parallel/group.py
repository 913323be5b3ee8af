"""One axis as one rank sees it: a c10d process group and this rank's place in it.

Everything above this file speaks to groups and never asks which backend carries them. A group of one does nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist

from orchestrator.domain.ids import Rank

if TYPE_CHECKING:
    from collections.abc import Sequence

Op = Literal["sum", "max"]


class Aborted(RuntimeError):
    """The generation was closed while an operation was pending; nothing of it may be used."""


class PeerLost(RuntimeError):
    """A peer's connection broke: positive evidence that its process is gone."""

    def __init__(self, rank: Rank) -> None:
        super().__init__(f"connection to rank {rank} broke")
        self.rank = rank


@dataclass(frozen=True, slots=True)
class Group:
    """members: ranks of the generation in group order; index: this rank's place; pg: None for a group of one."""

    name: str
    members: tuple[Rank, ...]
    index: int
    pg: dist.ProcessGroup | None

    @property
    def size(self) -> int:
        return len(self.members)

    @property
    def live(self) -> dist.ProcessGroup | None:
        """pg, about to be used."""
        return self.pg

    def all_reduce(self, tensor: torch.Tensor, op: Op = "sum") -> torch.Tensor:
        """In place; summed in group order, so that every member gets the same bits (links)."""
        if (pg := self.live) is not None:
            options = dist.AllreduceOptions()
            options.reduceOp = dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX  # type: ignore[assignment]
            pg.allreduce([tensor], options).wait()
        return tensor

    def tally(self, tensor: torch.Tensor, num_maxima: int) -> torch.Tensor:
        """In place: the last `num_maxima` elements become the members' maxima, all before them the sums; one round."""
        if (pg := self.live) is not None:
            sums, maxima = tensor[: tensor.numel() - num_maxima], tensor[tensor.numel() - num_maxima :]
            works = []
            for part, op in ((sums, dist.ReduceOp.SUM), (maxima, dist.ReduceOp.MAX)):
                if part.numel():
                    options = dist.AllreduceOptions()
                    options.reduceOp = op  # type: ignore[assignment]
                    works.append(pg.allreduce([part], options))
            for work in works:
                work.wait()
        return tensor

    def all_gather_into(self, out: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        """out: the members' tensors laid end to end, size * tensor.numel() elements; both contiguous."""
        if (pg := self.live) is None:
            out.view(-1).copy_(tensor.view(-1))
        else:
            pg._allgather_base(out.view(-1), tensor.view(-1)).wait()
        return out

    def reduce_scatter_into(self, out: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        """out: this member's part of the sum of `tensor`, which is size parts laid end to end; both contiguous."""
        if (pg := self.live) is None:
            out.view(-1).copy_(tensor.view(-1))
        else:
            options = dist.ReduceScatterOptions()
            options.reduceOp = dist.ReduceOp.SUM  # type: ignore[assignment]
            pg._reduce_scatter_base(out.view(-1), tensor.view(-1), options).wait()
        return out

    def all_to_all(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        """inputs[j] goes to member j, outputs[j] comes from member j; lengths may be uneven and may be 0."""
        if (pg := self.live) is None:
            outputs[0].copy_(inputs[0])
        else:
            pg.alltoall(list(outputs), list(inputs), dist.AllToAllOptions()).wait()

    def meet(self, device: torch.device) -> None:
        """Every member calls this before point-to-point of a few; most backends need nothing of the kind."""

    def trade(self, member: int, give: torch.Tensor | None, room: torch.Tensor | None) -> list[dist.Work]:
        """Send to a member and receive from it at once, in whatever order it does; done when all of these are."""
        sent = [] if give is None else [self.isend(give, member)]
        return sent if room is None else [*sent, self.irecv(room, member)]

    def isend(self, tensor: torch.Tensor, member: int, tag: int = 0) -> dist.Work:
        pg = self.live
        assert pg is not None
        return pg.send([tensor], member, tag)

    def irecv(self, tensor: torch.Tensor, member: int, tag: int = 0) -> dist.Work:
        pg = self.live
        assert pg is not None
        return pg.recv([tensor], member, tag)


ALONE = Group("alone", (Rank(0),), 0, None)
