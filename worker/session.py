"""One generation as one rank sees it: its process groups, its partners, and the way out of it.

Built from pure data; `open` connects to exactly the peers this rank needs and asks nobody where they are. It owns sockets
and groups and frees them; it refuses to know steps, parameters and why a generation ends.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping

import torch
import torch.distributed as dist

from orchestrator.domain.ids import Device, Generation, JobId, Rank
from orchestrator.domain.layout import Move
from orchestrator.domain.plan import Plan, Seat
from orchestrator.domain.profile import Profile
from orchestrator.domain.spec import Backend

from .faultpoints import faultpoint
from .parallel.carrier import Addressed, Carrier, Handle, LinksCarrier
from .parallel.gloo import GlooCarrier
from .parallel.group import Aborted, Group
from .parallel.links import Links
from .parallel.mesh import WORLD, Circle, Mesh, job_cookie, mesh, ranks_of
from .parallel.nccl import NcclCarrier, NcclGroup
from .parallel.process_group import LinksProcessGroup
from .parallel.sabotage import BadLink
from .parallel.world import enter_world, leave_world
from .progress import Progress


class Session:
    """addresses: host:port of every device's listener. listener: this rank's own, bound; it stays the caller's.

    One session is open per process at a time, because torch's registry is the process's. Everything but `abort` belongs to
    the training thread. Every operation raises Aborted once the generation was aborted, PeerLost when a peer's
    connection broke. Close a broken session only when told that its generation is closed: until then peers that
    still train would read our end of file as a death.
    """

    tp: Group
    pp: Group
    """Its pg is usable as PipelineStage(group=...)."""
    mirror_of: Rank | None
    """Who mirrors what this rank owns."""
    mirrored: Rank | None
    """Whose intervals this rank mirrors."""

    def __init__(
        self,
        *,
        plan: Plan,
        profile: Profile,
        seat: Seat,
        generation: Generation,
        job: JobId,
        listener: socket.socket,
        addresses: Mapping[Device, str],
        mirrors: int,
        moves: tuple[Move, ...],
        backend: Backend,
        progress: Progress,
        donors: tuple[Device, ...] = (),
        form_timeout_s: float = 10.0,
    ) -> None:
        self.plan = plan
        self.profile = profile
        self.seat = seat
        self.generation = generation
        self.ranks = ranks_of(plan, donors)
        """Members and donors."""
        self._donors = donors
        self._job = job
        self._listener = listener
        self._addresses = addresses
        self._mirrors = mirrors
        self._moves = moves
        self._backend = backend
        self._progress = progress
        self._form_timeout_s = form_timeout_s
        self._gate = threading.RLock()
        self._aborted = False
        self._links: Links | None = None
        self._plain: LinksCarrier | None = None
        self._carrier: Carrier | None = None
        self._mesh: Mesh | None = None
        self._voters: tuple[Group, ...] = ()
        self._groups: dict[tuple[Rank, ...], Group] = {}

    def open(self) -> None:
        """Connect and make the groups. Raises NotFormed after form_timeout_s, Aborted, PeerLost; then close it."""
        found = mesh(self.plan, self.profile, self.seat, mirrors=self._mirrors, moves=self._moves, donors=self._donors)
        links = Links(self.seat.rank, self._progress)
        with self._gate:
            self._links = links
            if self._aborted:
                links.abort()
        self._mesh = found
        self.mirror_of, self.mirrored = found.mirror_of, found.mirrored
        self._progress.enter("form")
        try:
            links.form(
                generation=self.generation,
                cookie=job_cookie(self._job),
                listener=self._listener,
                addresses={rank: self._addresses[device] for device, rank in self.ranks.items()},
                peers=found.peers | self._introduced(),
                timeout_s=self._form_timeout_s,
            )
            plain = LinksCarrier(links, self.seat.rank, len(self.ranks), self._progress)
            carrier = self._make_carrier(links, plain)
            with self._gate:
                self._plain, self._carrier = plain, carrier
                if self._aborted:
                    raise Aborted("the generation was aborted while it formed")
            carrier.open()
            self.tp = self._join(carrier, found.tp)
            self.pp = self._join(carrier, found.pp)
            self._voters = self._join_voters(carrier, plain, found)
            self._groups = {circle.members: self._join(carrier, circle) for circle in found.buckets}
        finally:
            self._progress.leave()
        everybody = tuple(seat.rank for seat in self.plan.seats)
        world = LinksProcessGroup(links, label="world", channel=WORLD, members=everybody, index=self.seat.rank)
        enter_world(self.seat.rank, world, self.pp.pg, self.pp.members)

    def group(self, members: tuple[Rank, ...]) -> Group:
        """The group of a bucket's members; the same group for the same members. Raises KeyError for any other tuple."""
        return self._groups[members]

    def exchange(self, sends: Addressed, receives: Addressed) -> None:
        """Send and receive whole tensors, all at once; between two ranks they match in the order given on either side."""
        self.post(sends, receives).wait()

    def post(self, sends: Addressed, receives: Addressed = ()) -> Handle:
        """Like `exchange`, waited for later. Tensors sent must not change and those received hold nothing until then."""
        if self._plain is None:
            raise Aborted("this generation is closed")
        return self._plain.post(sends, receives)

    def stream(self, sends: Addressed, receives: Addressed = ()) -> Handle:
        """Like `post`, by the fastest way between members' devices, which may be one that says nothing of its failures.

        What was received, and what was computed from it, is worth nothing unless a vote that follows passes.
        """
        if self._carrier is None:
            raise Aborted("this generation is closed")
        return self._carrier.post(sends, receives)

    def vote(self, ballot: torch.Tensor, num_maxima: int = 0) -> torch.Tensor:
        """The sum of every rank's ballot (float64, flat, on the host); who sees it knows that every rank had entered.

        Of its last `num_maxima` elements it is the maximum.

        Along the axes: tp, pp, then across pipelines; each sum in group order, so every rank gets the same bits. Where
        pipelines differ in depth their first stages vote for them and tell the others.
        """
        self.proceed()
        if not self._voters:
            raise Aborted("this generation is closed")
        tp, pp, *across = self._voters
        total = ballot.detach().clone()
        tp.tally(total, num_maxima)
        pp.tally(total, num_maxima)
        # From here on others may see the vote pass without this rank.
        faultpoint("in_vote")
        for group in across:
            group.tally(total, num_maxima)
        assert self._mesh is not None
        if not self._mesh.even and pp.pg is not None:
            options = dist.BroadcastOptions()
            options.rootRank, options.rootTensor = 0, 0
            pp.pg.broadcast([total], options).wait()
        return total

    def spoil_links(self, bad_link: BadLink) -> None:
        """From now on, until it is over, this rank's ends of these links are bad. Any thread."""
        with self._gate:
            if self._links is not None:
                self._links.bad_link = bad_link

    def proceed(self) -> None:
        """Raises Aborted: for whoever computes for long and asks nothing of others meanwhile."""
        if self._aborted:
            raise Aborted("this generation is closed")

    def abort(self) -> None:
        """Make every operation of this generation raise at once. Any thread, any time, any number of times."""
        with self._gate:
            if self._aborted:
                return
            self._aborted = True
            links, carrier = self._links, self._carrier
        if links is not None:
            links.abort()
        if carrier is not None:
            carrier.abort()

    def give_up(self) -> bool:
        """Whether the training thread is stuck where no abort ends its wait; it ends by itself when it comes out.

        Only after `abort`, from another thread. Then this session's training thread is whoever takes over.
        """
        with self._gate:
            carrier = self._carrier
        return carrier is not None and carrier.give_up()

    def close(self) -> None:
        """Free sockets and groups; the listener stays open. Idempotent."""
        with self._gate:
            self._aborted = True
            links, self._links = self._links, None
            carrier, self._carrier, self._plain = self._carrier, None, None
        if links is None:
            return
        if carrier is not None:
            carrier.close()
        leave_world()
        links.close()
        self._groups = {}
        self._voters = ()

    def _join(self, carrier: Carrier, circle: Circle) -> Group:
        index = circle.members.index(self.seat.rank)
        pg = None if len(circle.members) == 1 else carrier.group(circle, index)
        if isinstance(carrier, NcclCarrier):
            return NcclGroup(circle.name, circle.members, index, pg, carrier.links)
        return Group(circle.name, circle.members, index, pg)

    def _join_voters(self, carrier: Carrier, plain: LinksCarrier, found: Mesh) -> tuple[Group, ...]:
        """tp, pp, and across where this rank is in it.

        An nccl collective that is aborted on one side may end with any numbers on another, which would take them for a vote
        that has passed: votes go over links.
        """
        across = (found.across,) if found.across else ()
        if self._backend == "nccl":
            return tuple(self._join(plain, circle) for circle in (found.tp, found.pp, *across))
        return (self.tp, self.pp, *(self._join(carrier, circle) for circle in across))

    def _make_carrier(self, links: Links, plain: LinksCarrier) -> Carrier:
        rank, world = self.seat.rank, self.plan.world_size
        if self._backend == "gloo":
            host = self._addresses[self.seat.device].rpartition(":")[0].strip("[]")
            return GlooCarrier(links, rank, world, len(self.ranks), self._progress, host)
        if self._backend == "nccl":
            return NcclCarrier(links, rank, world)
        return plain

    def _introduced(self) -> frozenset[Rank]:
        """nccl's communicator of the whole generation is named by rank 0, who must reach everybody."""
        if self._backend != "nccl":
            return frozenset()
        everybody = frozenset(seat.rank for seat in self.plan.seats)
        return everybody - {self.seat.rank} if self.seat.rank == 0 else frozenset({Rank(0)})
