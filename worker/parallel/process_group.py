"""c10d's `ProcessGroup` over links: torch's collectives and its pipelining run on our transport unchanged.

Sums are always taken in group order, so every member gets the same bits, run after run. Every operation posts all it can at
once and returns a `Work`; the rest happens in whichever wait comes next, so a caller may start the exchanges of many
buckets and then wait for them in any order. A collective's messages carry its number within the group, p2p its tag. An
accelerator's tensors pass through host memory on both ends.

    all_reduce, small or of two      everybody sends everything to everybody      1 round    n - 1 times the bytes
    all_reduce, large                reduce-scatter, then all-gather, direct      2 rounds   2 (n - 1) / n times the bytes
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from orchestrator.domain.ids import Rank
from worker.progress import Progress, Unwatched

from .links import Links
from .memory import bytes_of, cut, dense, landings, room_for
from .pending import Pending
from .reduction import Operator, operator_of

DIRECT_BYTES = 1 << 15
"""Up to here one round of whole tensors is cheaper than two rounds of parts."""


class LinksWork(dist.Work):
    """Operations under way on one group. Waiting moves every operation of the rank, not only these."""

    def __init__(self, group: LinksProcessGroup, pendings: Sequence[Pending], result: list[torch.Tensor]) -> None:
        super().__init__()
        self._group = group
        self._pendings = pendings
        self._result = result

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Raises Aborted, PeerLost, MessageMismatch. There is no time limit: `Links.abort` is the way out."""
        self._group.wait(self._pendings)
        return True

    def is_completed(self) -> bool:
        return all(self._group.links.settle(pending) for pending in self._pendings)

    def is_success(self) -> bool:
        return self.is_completed()

    def landed(self) -> list[bool]:
        """Of each receive of an exchange: whether all of it is here. Never raises."""
        received = self._pendings[: len(self._result)]
        for pending in received:
            if pending.is_through:
                pending.finish()
        return [pending.is_through for pending in received]

    def result(self) -> list[torch.Tensor]:
        return self._result

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Completed when returned: nothing of ours moves in the background, so this waits."""
        self.wait()
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result(self._result)
        return future


class LinksProcessGroup(dist.ProcessGroup):
    """members: ranks of the generation in group order. channel: >= 0, used by this group only, alike on all members."""

    def __init__(
        self,
        links: Links,
        *,
        label: str,
        channel: int,
        members: tuple[Rank, ...],
        index: int,
        progress: Progress | None = None,
    ) -> None:
        super().__init__(index, len(members))  # type: ignore[call-arg]
        self.links = links
        self.label = label
        self._channel = channel
        self._members = members
        self._index = index
        self._others = tuple(j for j in range(len(members)) if j != index)
        self._progress: Progress = progress or Unwatched()
        self._collectives = 0

    def getBackendName(self) -> str:
        return "links"

    def wait(self, pendings: Sequence[Pending]) -> None:
        links = self.links
        if all(links.settle(pending) for pending in pendings):
            return
        self._progress.enter(self.label)
        try:
            for pending in pendings:
                links.wait(pending)
        finally:
            self._progress.leave()

    # --- reductions ------------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> LinksWork:  # type: ignore[override]
        """In place. opts: an AllreduceOptions or a ReduceOp; sum, max or min."""
        op = operator_of(opts)
        return LinksWork(self, [self._all_reduce(tensor, op) for tensor in tensors], tensors)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> LinksWork:
        return self.allreduce(tensors, opts)

    def _reduce_scatter_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> LinksWork:
        parts = cut(dense(input), [output.numel()] * self.size())
        return self._reduce_scatter(output, parts, operator_of(opts))

    def reduce_scatter(  # type: ignore[override]
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None
    ) -> LinksWork:
        return self._reduce_scatter(outputs[0], inputs[0], operator_of(opts))

    def barrier(self, opts: Any = None) -> LinksWork:
        return self.allreduce([torch.zeros(1, dtype=torch.uint8)])

    def _all_reduce(self, tensor: torch.Tensor, op: Operator) -> Pending:
        flat = dense(tensor)
        copy_back = None if flat.data_ptr() == tensor.data_ptr() else lambda: tensor.detach().copy_(flat.view(tensor.shape))
        tag = self._next_tag()
        if len(self._members) == 1 or flat.nbytes <= DIRECT_BYTES:
            return self._all_reduce_direct(flat, op, tag, copy_back)
        return self._all_reduce_in_parts(flat, op, tag, copy_back)

    def _all_reduce_direct(self, flat: torch.Tensor, op: Operator, tag: int, then: Any) -> Pending:
        parts = [flat if j == self._index else torch.empty_like(flat) for j in range(len(self._members))]

        def combine() -> None:
            op.combine(parts, self._index, flat)
            if then is not None:
                then()

        pending = self.links.pending(combine)
        if flat.numel():
            mine = bytes_of(flat)
            for j in self._others:
                self._receive(j, tag, bytes_of(parts[j]), pending)
            for j in self._others:
                self._send(j, tag, mine, pending)
        return pending.seal()

    def _all_reduce_in_parts(self, flat: torch.Tensor, op: Operator, tag: int, then: Any) -> Pending:
        size, me = len(self._members), self._index
        width = -(-flat.numel() // size)
        parts = [flat[j * width : (j + 1) * width] for j in range(size)]
        views = [bytes_of(part) for part in parts]
        mine = [parts[me] if j == me else torch.empty_like(parts[me]) for j in range(size)]
        whole = self.links.pending(then)

        def combine_then_spread() -> None:
            op.combine(mine, me, parts[me])
            if len(views[me]):
                for j in self._others:
                    self._send(j, tag - 1, views[me], whole)
            whole.seal()

        reduced = self.links.pending(combine_then_spread)
        # The second round's receives are posted at once: member j's sum of part j can only come after it has read all of
        # our part j, so it may overwrite it.
        for j in self._others:
            if len(views[me]):
                self._receive(j, tag, bytes_of(mine[j]), reduced)
            if len(views[j]):
                self._receive(j, tag - 1, views[j], whole)
        for j in self._others:
            if len(views[j]):
                self._send(j, tag, views[j], reduced)
        reduced.seal()
        return whole

    def _reduce_scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: Operator) -> LinksWork:
        me, tag = self._index, self._next_tag()
        own = dense(inputs[me])
        parts = [own if j == me else torch.empty_like(own) for j in range(len(self._members))]
        target = room_for(output)

        def combine() -> None:
            op.combine(parts, me, target)
            if target.data_ptr() != output.data_ptr():
                output.detach().copy_(target.view(output.shape))

        pending = self.links.pending(combine)
        if target.numel():
            for j in self._others:
                self._receive(j, tag, bytes_of(parts[j]), pending)
            for j in self._others:
                self._send(j, tag, bytes_of(dense(inputs[j])), pending)
        return LinksWork(self, [pending.seal()], [output])

    # --- exchanges -------------------------------------------------------------------------------------------------------

    def _allgather_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> LinksWork:
        parts = cut(output.detach().view(-1), [input.numel()] * self.size())
        return LinksWork(self, [self._gather(parts, input)], [output])

    def allgather(  # type: ignore[override]
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> LinksWork:
        pendings = [self._gather(parts, tensor) for parts, tensor in zip(outputs, inputs, strict=True)]
        return LinksWork(self, pendings, [tensor for parts in outputs for tensor in parts])

    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None) -> LinksWork:
        """Lengths may be uneven; nothing is sent for an empty part."""
        me, tag = self._index, self._next_tag()
        received = [j for j in self._others if outputs[j].numel()]
        views, then = landings([outputs[j] for j in received])
        pending = self.links.pending(then)
        outputs[me].detach().copy_(inputs[me].detach().view(outputs[me].shape))
        for j, view in zip(received, views, strict=True):
            self._receive(j, tag, view, pending)
        for j in self._others:
            if inputs[j].numel():
                self._send(j, tag, bytes_of(dense(inputs[j])), pending)
        return LinksWork(self, [pending.seal()], outputs)

    def alltoall_base(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: Any = None,
    ) -> LinksWork:
        size = len(self._members)
        outputs = cut(output.detach(), output_splits or [output.shape[0] // size] * size)
        inputs = cut(input.detach(), input_splits or [input.shape[0] // size] * size)
        work = self.alltoall(outputs, inputs)
        return LinksWork(self, work._pendings, [output])

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> LinksWork:  # type: ignore[override]
        tensor, root, tag = tensors[0], opts.rootRank, self._next_tag()
        if root == self._index:
            pending = self.links.pending(None)
            view = bytes_of(dense(tensor))
            for j in self._others if tensor.numel() else ():
                self._send(j, tag, view, pending)
        else:
            (view,), then = landings([tensor])
            pending = self.links.pending(then)
            if tensor.numel():
                self._receive(root, tag, view, pending)
        return LinksWork(self, [pending.seal()], tensors)

    def _gather(self, parts: Sequence[torch.Tensor], tensor: torch.Tensor) -> Pending:
        tag = self._next_tag()
        views, then = landings([parts[j] for j in self._others])
        pending = self.links.pending(then)
        if tensor.numel():
            for j, room in zip(self._others, views, strict=True):
                self._receive(j, tag, room, pending)
            view = bytes_of(dense(tensor))
            for j in self._others:
                self._send(j, tag, view, pending)
            parts[self._index].detach().copy_(tensor.detach().view(parts[self._index].shape))
        return pending.seal()

    # --- point to point --------------------------------------------------------------------------------------------------

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int = 0) -> LinksWork:
        """tensors: one, unchanged until waited for; dst: a member's index; tag >= 0, in order within a tag."""
        pending = self.links.pending(None)
        self._send(dst, tag, bytes_of(dense(tensors[0])), pending)
        return LinksWork(self, [pending.seal()], tensors)

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int = 0) -> LinksWork:
        (view,), then = landings(tensors[:1])
        pending = self.links.pending(then)
        self._receive(src, tag, view, pending)
        return LinksWork(self, [pending.seal()], tensors)

    def exchange(
        self, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]]
    ) -> LinksWork:
        """Many sends and receives at once; between two members they match in order, tensors to oneself too."""
        to_me = [tensor for member, tensor in sends if member == self._index]
        for tensor in (tensor for member, tensor in receives if member == self._index):
            tensor.detach().copy_(to_me.pop(0).detach().view(tensor.shape))
        arrivals = []
        for member, tensor in receives:
            if member == self._index:
                arrivals.append(self.links.pending(None).seal())
                continue
            (view,), then = landings([tensor])
            pending = self.links.pending(then)
            arrivals.append(pending)
            self._receive(member, 0, view, pending)
            pending.seal()
        sent = self.links.pending(None)
        for member, tensor in sends:
            if member != self._index:
                self._send(member, 0, bytes_of(dense(tensor)), sent)
        return LinksWork(self, [*arrivals, sent.seal()], [tensor for _, tensor in receives])

    # torch 2.13 renamed these three and still calls both.
    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base  # type: ignore[assignment]
    all_to_all_single = alltoall_base  # type: ignore[assignment]

    def shutdown(self) -> None:
        """Nothing of its own to free: the connections belong to the session."""

    def abort(self) -> None:
        self.links.abort()

    def _next_tag(self) -> int:
        """A collective has two tags, this and the one below; both negative, so that no p2p tag meets them."""
        self._collectives += 1
        return -2 * self._collectives

    def _send(self, member: int, tag: int, data: memoryview, pending: Pending) -> None:
        self.links.send(self._members[member], self._channel, tag, data, pending)

    def _receive(self, member: int, tag: int, into: memoryview, pending: Pending) -> None:
        self.links.receive(self._members[member], self._channel, tag, into, pending)
