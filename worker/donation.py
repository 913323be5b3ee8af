"""A survivor without a seat gives what it holds to those who have one, and goes idle.

It takes a rank after the members', connects only to those it sends to, and says goodbye when everything has left. It has no
groups, votes on nothing and trains nothing; it keeps its memory, because the next generation may ask again.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping

from orchestrator.domain.ids import Device, Generation, JobId
from orchestrator.domain.layout import Move
from orchestrator.domain.plan import Plan

from .parallel.carrier import Addressed, Handle, LinksCarrier
from .parallel.links import Links
from .parallel.mesh import job_cookie, ranks_of
from .progress import Progress


class Donation:
    """Like a Session, as far as it goes: `abort` from any thread, everything else in the training thread."""

    def __init__(
        self,
        *,
        plan: Plan,
        donors: tuple[Device, ...],
        me: Device,
        generation: Generation,
        job: JobId,
        listener: socket.socket,
        addresses: Mapping[Device, str],
        moves: tuple[Move, ...],
        progress: Progress,
        form_timeout_s: float = 10.0,
    ) -> None:
        self.plan = plan
        self.generation = generation
        self.ranks = ranks_of(plan, donors)
        self._me = me
        self._job = job
        self._listener = listener
        self._addresses = addresses
        self._moves = moves
        self._progress = progress
        self._form_timeout_s = form_timeout_s
        self._gate = threading.RLock()
        self._aborted = False
        self._links: Links | None = None
        self._carrier: LinksCarrier | None = None

    def open(self) -> None:
        """Connect to the receivers. Raises NotFormed, Aborted."""
        rank = self.ranks[self._me]
        receivers = {move.target for move in self._moves if move.source == self._me and move.target != self._me}
        links = Links(rank, self._progress)
        with self._gate:
            self._links = links
            if self._aborted:
                links.abort()
        self._progress.enter("form")
        try:
            links.form(
                generation=self.generation,
                cookie=job_cookie(self._job),
                listener=self._listener,
                addresses={self.ranks[device]: self._addresses[device] for device in receivers},
                peers=frozenset(self.ranks[device] for device in receivers),
                timeout_s=self._form_timeout_s,
            )
        finally:
            self._progress.leave()
        self._carrier = LinksCarrier(links, rank, len(self.ranks), self._progress)

    def post(self, sends: Addressed, receives: Addressed) -> Handle:
        """Like Session.post. Raises Aborted, PeerLost."""
        assert self._carrier is not None, "open the donation first"
        return self._carrier.post(sends, receives)

    def abort(self) -> None:
        with self._gate:
            self._aborted = True
            links = self._links
        if links is not None:
            links.abort()

    def close(self) -> None:
        """Say goodbye: what was sent stays readable at the other end. Idempotent."""
        with self._gate:
            self._aborted = True
            links, self._links = self._links, None
        if links is not None:
            links.close()
