"""One TCP connection to one peer: frames out, frames in, and which posted receive each incoming frame fills.

    frame    | channel i64 | tag i64 | length i64 | length bytes |        little-endian

Within a (channel, tag) frames match receives in order; a frame nobody has posted a receive for is kept until somebody
does. It refuses to know groups, collectives and the polling: it reads when told there is something to read.
"""

from __future__ import annotations

import select
import socket
import struct
from collections import deque
from dataclasses import dataclass

import numpy as np

from orchestrator.domain.ids import Rank

from .group import PeerLost
from .pending import Pending

HEADER = struct.Struct("<qqq")
GOODBYE = -1
"""The channel of a peer's last frame: it leaves in good order, so the end of file behind it is no evidence of death."""

STAGING_BYTES = 1 << 14
BURST = 8
"""System calls on one connection before the others, and an abort, get a look in."""

Key = tuple[int, int]


class MessageMismatch(RuntimeError):
    """A frame's length differs from the posted receive's: the ranks do not run the same program."""


@dataclass(slots=True)
class _Frame:
    """An outgoing frame: what is left of it, and whether any of it has left."""

    parts: list[memoryview]
    pending: Pending | None
    started: bool = False


class Connection:
    """Not thread-safe: all of it happens in the training thread."""

    def __init__(self, rank: Rank, sock: socket.socket, poller: select.epoll) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.rank = rank
        self.fd = sock.fileno()
        self.departed = False
        self.sent = 0
        """Whole messages that have left."""
        self.received = 0
        """Whole messages that have come, asked for or not."""
        self.moved = 0
        """Bytes read and written."""
        self._resting = False
        self._sock = sock
        self._poller = poller
        self._writable_wanted = False
        self._outgoing: deque[_Frame] = deque()
        self._posted: dict[Key, deque[tuple[memoryview, Pending]]] = {}
        self._arrived: dict[Key, deque[memoryview]] = {}
        self._staging = memoryview(bytearray(STAGING_BYTES))
        self._staged = 0
        # The frame being read: what is still to come of it, and whom it completes (None: nobody has asked for it yet).
        self._rest: memoryview | None = None
        self._key: Key = (0, 0)
        self._filling: Pending | None = None
        poller.register(self.fd, select.EPOLLIN)

    @property
    def is_awaited(self) -> bool:
        """Something posted here can only complete if the peer goes on."""
        return bool(self._posted) or bool(self._outgoing) or self._filling is not None

    @property
    def expects(self) -> bool:
        """Somebody waits for a message of this peer."""
        return bool(self._posted) or self._filling is not None

    @property
    def has_unsent(self) -> bool:
        return bool(self._outgoing)

    def send(self, channel: int, tag: int, data: memoryview, pending: Pending) -> None:
        """Post `data` (bytes, untouched until `pending` is done). Raises PeerLost."""
        header = memoryview(HEADER.pack(channel, tag, len(data)))
        parts = [header, data] if len(data) else [header]
        pending.hold()
        self._outgoing.append(_Frame(parts, pending))
        if len(self._outgoing) == 1:
            self.push()

    def receive(self, channel: int, tag: int, into: memoryview, pending: Pending) -> None:
        """Post a receive that fills `into` exactly. Raises MessageMismatch."""
        key = (channel, tag)
        arrived = self._arrived.get(key)
        if arrived is None:
            pending.hold()
            self._posted.setdefault(key, deque()).append((into, pending))
            return
        frame = arrived.popleft()
        if not arrived:
            del self._arrived[key]
        self._check_length(key, len(frame), len(into))
        if arrived or self._rest is None or self._filling is not None or self._key != key:
            into[:] = frame
            return
        # The last frame of this key is still coming in: take over what is there, the rest goes straight to its place.
        got = len(frame) - len(self._rest)
        into[:got] = frame[:got]
        self._rest = into[got:]
        self._filling = pending
        pending.hold()

    def take(self, channel: int, tag: int) -> list[bytes]:
        """Every whole frame that has arrived on (channel, tag) without being asked for."""
        key = (channel, tag)
        arrived = self._arrived.pop(key, deque())
        unfinished = bool(arrived) and self._rest is not None and self._filling is None and self._key == key
        if unfinished:
            self._arrived[key] = deque([arrived.pop()])
        return [bytes(frame) for frame in arrived]

    def rest(self, resting: bool) -> None:
        """While it rests nothing is read or written, as on a bad link; what is posted waits."""
        if resting == self._resting:
            return
        self._resting = resting
        if resting:
            self._poller.unregister(self.fd)
        else:
            self._writable_wanted = bool(self._outgoing)
            self._poller.register(self.fd, select.EPOLLIN | (select.EPOLLOUT if self._outgoing else 0))

    def push(self) -> None:
        """Write what the socket takes. Raises PeerLost."""
        if self._resting:
            return
        outgoing = self._outgoing
        for _ in range(BURST):
            if not outgoing:
                break
            frame = outgoing[0]
            parts = frame.parts
            try:
                sent = self._sock.sendmsg(parts, (), socket.MSG_NOSIGNAL)
            except BlockingIOError:
                break
            except OSError:
                self._explain_broken()
                return
            frame.started = True
            self.moved += sent
            while parts and sent >= len(parts[0]):
                sent -= len(parts.pop(0))
            if parts:
                parts[0] = parts[0][sent:]
            else:
                outgoing.popleft()
                self.sent += 1
                if frame.pending is not None:
                    frame.pending.release()
        if bool(outgoing) != self._writable_wanted:
            self._writable_wanted = bool(outgoing)
            self._poller.modify(self.fd, select.EPOLLIN | (select.EPOLLOUT if outgoing else 0))

    def pull(self) -> bool:
        """Read what the socket has, and whether that was anything; `departed` is set when the peer has said goodbye.

        Raises PeerLost, MessageMismatch.
        """
        for turn in range(BURST):
            if self._resting:
                return False
            if self.departed:
                return True
            rest = self._rest
            try:
                if rest is None:
                    wanted = STAGING_BYTES - self._staged
                    count = self._sock.recv_into(self._staging[self._staged :])
                else:
                    # What follows a body is the next header, and often all of a small message: one call reads both.
                    wanted = len(rest) + STAGING_BYTES
                    count = self._sock.recvmsg_into((rest, self._staging))[0]
            except BlockingIOError:
                return turn > 0
            except OSError:
                count = 0
            if count == 0:
                raise PeerLost(self.rank)
            self.moved += count
            if rest is None:
                self._staged += count
            elif count < len(rest):
                self._rest = rest[count:]
                return True
            else:
                self._staged = count - len(rest)
                self._complete()
            self._unpack()
            if count < wanted:
                return True
        return True

    def say_goodbye(self) -> None:
        """Best effort, without waiting: in the middle of a frame there is no room for it."""
        if self._outgoing and self._outgoing[0].started:
            return
        self._outgoing.clear()
        self._outgoing.append(_Frame([memoryview(HEADER.pack(GOODBYE, 0, 0))], None))
        try:
            self.push()
        except PeerLost:
            return

    def close(self) -> None:
        self._sock.close()
        self._outgoing.clear()
        self._posted.clear()
        self._arrived.clear()
        self._rest = self._filling = None

    def _unpack(self) -> None:
        """Take the staged bytes apart. While a body is coming in nothing is staged."""
        at, staged, staging = 0, self._staged, self._staging
        while staged - at >= HEADER.size:
            channel, tag, length = HEADER.unpack_from(staging, at)
            at += HEADER.size
            if channel == GOODBYE:
                self.departed = True
                break
            body = self._begin((channel, tag), length)
            have = min(length, staged - at)
            body[:have] = staging[at : at + have]
            at += have
            if have < length:
                self._rest = body[have:]
                break
            self._complete()
        left = staged - at
        if left and at:
            staging[:left] = bytes(staging[at:staged])
        self._staged = left

    def _begin(self, key: Key, length: int) -> memoryview:
        self._key = key
        posted = self._posted.get(key)
        if posted is None:
            # bytearray would clear what is overwritten at once.
            frame = np.empty(length, dtype=np.uint8).data
            self._arrived.setdefault(key, deque()).append(frame)
            self._filling = None
            return frame
        into, pending = posted.popleft()
        if not posted:
            del self._posted[key]
        self._check_length(key, length, len(into))
        self._filling = pending
        return into

    def _complete(self) -> None:
        self._rest = None
        self.received += 1
        pending, self._filling = self._filling, None
        if pending is not None:
            pending.release()

    def _check_length(self, key: Key, sent: int, expected: int) -> None:
        if sent != expected:
            raise MessageMismatch(
                f"rank {self.rank} sent {sent} bytes on channel {key[0]} (tag {key[1]}) where {expected} were expected; "
                "the ranks do not run the same program, compare their shapes and their order of operations"
            )

    def _explain_broken(self) -> None:
        """A write failed: what the peer said last decides whether it left or was lost."""
        while not self.departed:
            if not self.pull():
                raise PeerLost(self.rank)
