"""The transport on CPU: one TCP connection per pair of ranks, one progress loop in the training thread, and a way out.

Everything moves while somebody waits; nothing has a thread. `abort` from any thread makes every wait, present and future,
raise at once, whatever is on the wire: there is no operation that can't be left. It knows ranks, channels and bytes, and
refuses to know groups, tensors and why anybody waits.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping

from orchestrator.domain.ids import Generation, Rank
from worker.progress import Exchanged, Progress, Unwatched

from .connection import Connection
from .forming import QUIET_S, Forming
from .group import Aborted, PeerLost
from .pending import Pending
from .sabotage import BadLink


class Links:
    """One generation's connections of one rank. All but `abort` belongs to the training thread.

    Every operation raises Aborted once `abort` or `close` was called, PeerLost once a peer's connection has broken; where
    both are true it says Aborted, because peers close their connections when they are aborted too.
    """

    def __init__(self, rank: Rank, progress: Progress | None = None) -> None:
        self.rank = rank
        self._progress: Progress = progress or Unwatched()
        self.ready: deque[Pending] = deque()
        """Pendings whose messages are all through, to be finished by the loop."""
        self._connections: dict[Rank, Connection] = {}
        self._by_fd: dict[int, Connection] = {}
        self.bad_link: BadLink | None = None
        """On purpose; any thread may set it, and it shows at the next turn of the loop."""
        self._lost: Rank | None = None
        self._aborted = False
        self._closed = False
        # Re-entrant: a signal handler may abort while this very thread aborts.
        self._gate = threading.RLock()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = select.epoll()
        self._poller.register(self._wake, select.EPOLLIN)

    @property
    def aborted(self) -> bool:
        return self._aborted

    @property
    def broken(self) -> bool:
        """Aborted, or a peer is lost: nothing works any more."""
        return self._aborted or self._lost is not None

    @property
    def peers(self) -> tuple[Rank, ...]:
        return tuple(sorted(self._connections))

    def form(
        self,
        *,
        generation: Generation,
        cookie: bytes,
        listener: socket.socket,
        addresses: Mapping[Rank, str],
        peers: Iterable[Rank],
        timeout_s: float,
    ) -> None:
        """Connect to `peers`. cookie: 16 bytes that name the job. Raises NotFormed after timeout_s, Aborted at once."""
        self._check()
        sockets = Forming(
            rank=self.rank,
            generation=generation,
            cookie=cookie,
            listener=listener,
            addresses=addresses,
            peers=peers,
            wake=self._wake,
            aborted=lambda: self._aborted,
            timeout_s=timeout_s,
            tell_quiet=lambda since_s, missing: self._progress.quiet(
                since_s, (Exchanged(peer, 0, 0, True, False) for peer in missing)
            ),
        ).run()
        for peer, sock in sockets.items():
            connection = Connection(peer, sock, self._poller)
            self._connections[peer] = connection
            self._by_fd[connection.fd] = connection

    def pending(self, then: Callable[[], None] | None = None) -> Pending:
        """A new pending to post under. Raises Aborted, PeerLost."""
        self._check()
        return Pending(self.ready, then)

    def send(self, peer: Rank, channel: int, tag: int, data: memoryview, pending: Pending) -> None:
        """Post `data`, which must not change until `pending` is done. Raises Aborted, PeerLost."""
        connection = self._to(peer)
        if connection.departed:
            raise Aborted(f"rank {peer} has left the generation")
        try:
            connection.send(channel, tag, data, pending)
        except PeerLost as lost:
            raise self._broken(lost) from None
        if connection.departed:
            self._retire(connection)

    def receive(self, peer: Rank, channel: int, tag: int, into: memoryview, pending: Pending) -> None:
        """Post a receive of exactly len(into) bytes. Raises Aborted, PeerLost, MessageMismatch."""
        connection = self._to(peer)
        connection.receive(channel, tag, into, pending)
        if connection.departed and connection.is_awaited:
            raise Aborted(f"rank {peer} has left the generation")

    def wait(self, pending: Pending) -> None:
        """Move whatever can move until `pending` is done. Raises Aborted, PeerLost, MessageMismatch."""
        self._check()
        self._finish_ready()
        told_at = moved_at = time.monotonic()
        while not pending.done:
            if self._turn(QUIET_S):
                moved_at = time.monotonic()
            told_at = self._tell(moved_at, told_at)

    def settle(self, pending: Pending) -> bool:
        """Whether `pending` is done, finishing what is ready but without waiting. Raises Aborted, PeerLost."""
        self._check()
        self._finish_ready()
        return pending.done

    def collect(self, channel: int, tag: int, *, wait: bool) -> list[bytes]:
        """Whole frames that came on (channel, tag) from anybody without a posted receive; waits for one if told to."""
        self._check()
        told_at = moved_at = time.monotonic()
        while True:
            frames = [frame for c in self._connections.values() for frame in c.take(channel, tag)]
            if frames or not wait:
                return frames
            if self._turn(QUIET_S):
                moved_at = time.monotonic()
            told_at = self._tell(moved_at, told_at)

    def find_lost(self, timeout_s: float) -> Rank | None:
        """Look whether any peer's connection has broken, for callers whose own transport can't say who failed."""
        deadline = time.monotonic() + timeout_s
        try:
            self._check()
            while (left := deadline - time.monotonic()) > 0:
                self._turn(left)
        except PeerLost as lost:
            return lost.rank
        except Aborted:
            return None
        return None

    def abort(self) -> None:
        """Make every operation raise Aborted from now on. Any thread, any time, any number of times."""
        with self._gate:
            if self._aborted:
                return
            self._aborted = True
            if not self._closed:
                os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Say goodbye where that needs no waiting, then free every socket. Idempotent."""
        with self._gate:
            if self._closed:
                return
            self._closed = self._aborted = True
            for connection in self._connections.values():
                if not connection.departed and connection.rank != self._lost:
                    connection.say_goodbye()
            self._poller.close()
            for connection in self._connections.values():
                connection.close()
            self._connections.clear()
            self._by_fd.clear()
            self.ready.clear()
            os.close(self._wake)

    def _turn(self, timeout_s: float) -> bool:
        """Whether anything came within timeout_s."""
        if self.bad_link is not None:
            timeout_s = self._rest(self.bad_link, timeout_s)
        events = self._poller.poll(timeout_s)
        for fd, event in events:
            if self._aborted:
                raise Aborted("the generation was closed while an operation was pending")
            connection = self._by_fd.get(fd)
            if connection is None:
                continue
            try:
                if event & select.EPOLLOUT:
                    connection.push()
                if event & ~select.EPOLLOUT and not connection.departed:
                    connection.pull()
            except PeerLost as lost:
                raise self._broken(lost) from None
            if connection.departed:
                self._retire(connection)
            self._finish_ready()
        return bool(events)

    def _tell(self, moved_at: float, told_at: float) -> float:
        """In a wait that lasts, say now and then whom it is for; a step's many short waits must stay cheap."""
        now = time.monotonic()
        if now - told_at < QUIET_S:
            return told_at
        self._progress.quiet(
            now - moved_at,
            (Exchanged(c.rank, c.sent, c.received, c.expects, c.has_unsent) for c in self._connections.values()),
        )
        return now

    def _rest(self, bad_link: BadLink, timeout_s: float) -> float:
        connected = {rank: c for rank, c in self._connections.items() if not c.departed}
        timeout_s = bad_link.apply(connected, timeout_s)
        if bad_link.is_over(time.monotonic()) and self.bad_link is bad_link:
            self.bad_link = None
        return timeout_s

    def _finish_ready(self) -> None:
        ready = self.ready
        while ready:
            ready.popleft().finish()

    def _to(self, peer: Rank) -> Connection:
        self._check()
        connection = self._connections.get(peer)
        if connection is None:
            raise ValueError(f"rank {self.rank} has no connection to rank {peer}; this generation's plan gave it none")
        return connection

    def _retire(self, connection: Connection) -> None:
        """A peer said goodbye. What it sent before stays readable; to wait for more is pointless."""
        if self._by_fd.pop(connection.fd, None) is not None:
            self._poller.unregister(connection.fd)
        if connection.is_awaited:
            raise Aborted(f"rank {connection.rank} has left the generation")

    def _check(self) -> None:
        if self._aborted:
            raise Aborted("this generation is closed" if self._closed else "the generation was aborted")
        if self._lost is not None:
            raise PeerLost(self._lost)

    def _broken(self, lost: PeerLost) -> Exception:
        self._lost = lost.rank
        return Aborted("the generation was aborted") if self._aborted else lost
