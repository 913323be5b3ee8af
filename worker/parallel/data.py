"""The data axis: gradients to their owners, on to the mirrors, and parameters back, by direct exchange of uneven intervals.

    reduce   every member sends each owner its interval of the bucket; the owner sums them in the order of members
    mirror   the owner sends its reduced gradient, all buckets as one message, to the rank that mirrors it
    gather   the owner sends its updated interval, in compute dtype, to every member of the bucket

Each is one batch of messages that is posted whole before anything is waited for. Between two ranks messages are matched in
the order they were posted, which is bucket order on both sides. Who the members are is the plan's business, how messages
travel the session's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from orchestrator.domain.ids import Device, Generation, Rank
from orchestrator.domain.layout import Bucket
from orchestrator.domain.plan import Plan, Seat

from ..backlog import Landed, backlog_of
from ..faultpoints import faultpoint
from ..progress import Progress
from ..state.buffers import Buffers
from ..state.holdings import Holdings
from .gradients import Gradients
from .group import Group

Messages = Sequence[tuple[Rank, torch.Tensor]]


class Posted(Protocol):
    def wait(self) -> object: ...
    def landed(self) -> Sequence[bool]:
        """Of each receive, in order: whether it is whole. Never raises."""


class Session(Protocol):
    """What training needs of one generation's connections; every method raises Aborted or PeerLost."""

    @property
    def generation(self) -> Generation: ...
    @property
    def plan(self) -> Plan: ...
    @property
    def ranks(self) -> Mapping[Device, Rank]:
        """Members and donors."""

    @property
    def seat(self) -> Seat: ...
    @property
    def tp(self) -> Group: ...
    @property
    def pp(self) -> Group: ...
    @property
    def mirror_of(self) -> Rank | None:
        """The rank that mirrors this one."""

    @property
    def mirrored(self) -> Rank | None:
        """The rank that this one mirrors."""

    def proceed(self) -> None:
        """Nothing is asked of anybody: only whether the generation is still one."""
        ...

    def exchange(self, sends: Messages, receives: Messages) -> None: ...
    def post(self, sends: Messages, receives: Messages) -> Posted: ...
    def stream(self, sends: Messages, receives: Messages) -> Posted:
        """Faster than `post` where it can be; what was received is worth nothing unless a vote that follows passes."""
        ...

    def vote(self, ballot: torch.Tensor, num_maxima: int = 0) -> torch.Tensor: ...


class DataAxis:
    """One rank's part of the data axis in one generation; buckets: every bucket of the plan, in order."""

    def __init__(
        self,
        session: Session,
        buckets: Sequence[Bucket],
        buffers: Buffers,
        gradients: Gradients,
        holdings: Holdings,
        progress: Progress,
    ) -> None:
        self._session = session
        self._backlog = backlog_of(holdings.gradient.device, progress)
        self._gradients = gradients
        self._holdings = holdings
        self._compute_dtype = buffers.compute.dtype
        me = session.seat.rank
        places = {segment.bucket: segment.offset for segment in holdings.segments}
        used = [(bucket, places.get(number)) for number, bucket in enumerate(buckets) if me in bucket.shares]
        arrivals = torch.empty(
            sum((len(bucket.members) - 1) * _owned(bucket, me) for bucket, _ in used),
            dtype=gradients.flat.dtype,
            device=gradients.flat.device,
        )
        self._gradients_out: list[tuple[Rank, torch.Tensor]] = []
        self._gradients_in: list[tuple[Rank, torch.Tensor]] = []
        self._sums: list[tuple[torch.Tensor, list[torch.Tensor], tuple[int, ...]]] = []
        self._weights_out: list[tuple[Rank, int, int]] = []
        self._weights_in: list[tuple[Rank, torch.Tensor]] = []
        self._weights_kept: list[tuple[torch.Tensor, int, int]] = []
        position = 0
        for (bucket, place), offset in zip(used, buffers.offsets, strict=False):
            mine = _owned(bucket, me)
            addends = []
            for j, member in enumerate(bucket.members):
                low, high = offset + bucket.cuts[j], offset + bucket.cuts[j + 1]
                if member == me:
                    addends.append(gradients.flat[low:high])
                    if place is not None:
                        self._weights_kept.append((buffers.compute[low:high], place, place + mine))
                    continue
                if high > low:
                    self._gradients_out.append((member, gradients.flat[low:high]))
                    self._weights_in.append((member, buffers.compute[low:high]))
                if place is not None:
                    arrival = arrivals[position : position + mine]
                    position += mine
                    addends.append(arrival)
                    self._gradients_in.append((member, arrival))
                    self._weights_out.append((member, place, place + mine))
            if place is not None:
                self._sums.append((holdings.gradient[place : place + mine], addends, bucket.layers))

    def reduce(self) -> None:
        """Afterwards the gradient of every owned interval is complete in the holdings."""
        if self._gradients_out or self._gradients_in:
            posted = self._session.stream(self._gradients_out, self._gradients_in)
            faultpoint("in_reduce")
            posted.wait()
        for total, addends, layers in self._sums:
            self._gradients.complete(total, addends, layers)

    def mirror(self) -> Landed | None:
        """Once waited for, the gradient of every mirrored interval is complete in memory too: whoever votes says so."""
        holdings, session = self._holdings, self._session
        to, of, cut = session.mirror_of, session.mirrored, holdings.owned
        sends = [(to, holdings.gradient[:cut])] if to is not None and cut else []
        receives = [(of, holdings.gradient[cut:])] if of is not None and holdings.gradient.numel() > cut else []
        if not (sends or receives):
            return None
        posted = session.stream(sends, receives)
        faultpoint("in_mirror")
        return Landed(posted, self._backlog, session.proceed)

    def gather(self) -> None:
        """Afterwards every compute parameter of this rank is its owner's master weight, rounded to compute dtype."""
        weights = self._holdings.state[0, : self._holdings.owned].to(self._compute_dtype)
        sends = [(member, weights[start:stop]) for member, start, stop in self._weights_out]
        posted = self._session.stream(sends, self._weights_in) if sends or self._weights_in else None
        faultpoint("in_gather")
        for kept, start, stop in self._weights_kept:
            kept.copy_(weights[start:stop])
        if posted is not None:
            posted.wait()


def _owned(bucket: Bucket, me: Rank) -> int:
    start, stop = bucket.shares[me]
    return stop - start
