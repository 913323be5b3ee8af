"""How the ranks of a generation find each other: one connection per pair that needs to talk.

    lower rank                                    higher rank
      dial ─────────────────────────────────────▶ accept
      hello: cookie, generation, from, to ──────▶ is it for this generation and for me? else drop
      ◀───────────────────────────────── welcome  both have it

The addresses are in the plan and every listener was bound before its process was forked, so nobody is asked where anybody
is. A connection of another generation is dropped: an older one is stale, a newer one cannot be meant for what we form;
whoever was dropped without a welcome dials again. It knows nothing of frames and groups.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from orchestrator.domain.ids import Generation, Rank

from .group import Aborted

HELLO = struct.Struct("<8s16sqqq")
MAGIC = b"evrstep1"
WELCOME = b"welcome!"
COOKIE_BYTES = 16
QUIET_S = 0.1
FIRST_RETRY_S, LAST_RETRY_S = 0.004, 0.05
MAX_STRANGERS = 256
"""Accepted connections that have not said who they are; the oldest is dropped beyond this."""


class NotFormed(RuntimeError):
    """Not every peer was there when the deadline passed."""


@dataclass(slots=True)
class _Dial:
    peer: Rank
    due: float
    retry_s: float = FIRST_RETRY_S
    sock: socket.socket | None = None
    greeted: bool = False
    reply: bytes = b""


@dataclass(slots=True)
class _Stranger:
    sock: socket.socket
    hello: bytes = b""


@dataclass(kw_only=True)
class Forming:
    """One attempt to reach every peer. `wake` is readable once the generation is aborted; `aborted` says the same."""

    rank: Rank
    generation: Generation
    cookie: bytes
    listener: socket.socket
    addresses: Mapping[Rank, str]
    peers: Iterable[Rank]
    wake: int
    aborted: Callable[[], bool]
    timeout_s: float
    tell_quiet: Callable[[float, Iterable[Rank]], None]
    """Told who is missing, and for how long nobody has come, every QUIET_S in which nobody comes."""
    _formed: dict[Rank, socket.socket] = field(default_factory=dict)
    _dials: dict[Rank, _Dial] = field(default_factory=dict)
    _dialling: dict[int, _Dial] = field(default_factory=dict)
    _strangers: dict[int, _Stranger] = field(default_factory=dict)
    _came: int = 0
    _came_at: float = 0.0
    _told_at: float = 0.0

    def run(self) -> dict[Rank, socket.socket]:
        """A connected socket per peer. Raises Aborted, NotFormed; then every socket it opened is closed."""
        peers = frozenset(self.peers)
        now = time.monotonic()
        deadline = now + self.timeout_s
        self._came_at = self._told_at = now
        self._dials = {peer: _Dial(peer, now) for peer in sorted(peers) if peer > self.rank}
        callers = {peer for peer in peers if peer < self.rank}
        complete = False
        with select.epoll() as poller:
            try:
                poller.register(self.wake, select.EPOLLIN)
                if callers:
                    self.listener.setblocking(False)
                    poller.register(self.listener.fileno(), select.EPOLLIN)
                while len(self._formed) < len(peers):
                    self._turn(poller, callers, deadline)
                    self._note_quiet(peers)
                complete = True
                return self._formed
            finally:
                self._close_all(keep_formed=complete)

    def _turn(self, poller: select.epoll, callers: set[Rank], deadline: float) -> None:
        now = time.monotonic()
        if now >= deadline:
            raise NotFormed(self._who_is_missing(callers))
        until = min(deadline, now + QUIET_S)
        for dial in self._dials.values():
            if dial.sock is None and dial.due <= now:
                self._dial(dial, poller)
            if dial.sock is None:
                until = min(until, dial.due)
        for fd, _ in poller.poll(max(0.0, until - time.monotonic())):
            if fd == self.wake or self.aborted():
                raise Aborted(f"generation {self.generation} was closed while it formed")
            if fd == self.listener.fileno():
                self._accept(poller)
            elif fd in self._dialling:
                self._answer(self._dialling[fd], poller)
            elif fd in self._strangers:
                self._listen(self._strangers[fd], callers, poller)

    def _note_quiet(self, peers: frozenset[Rank]) -> None:
        now, came = time.monotonic(), len(self._formed)
        if came != self._came:
            self._came, self._came_at, self._told_at = came, now, now
        elif now - self._told_at >= QUIET_S:
            self._told_at = now
            self.tell_quiet(now - self._came_at, peers - self._formed.keys())

    def _dial(self, dial: _Dial, poller: select.epoll) -> None:
        host, _, port = self.addresses[dial.peer].rpartition(":")
        family, kind, protocol, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
        dial.sock = socket.socket(family, kind | socket.SOCK_CLOEXEC, protocol)
        dial.sock.setblocking(False)
        dial.greeted, dial.reply = False, b""
        self._dialling[dial.sock.fileno()] = dial
        poller.register(dial.sock.fileno(), select.EPOLLOUT)
        try:
            dial.sock.connect(address)
        except BlockingIOError:
            pass
        except OSError:
            self._dial_again(dial)

    def _answer(self, dial: _Dial, poller: select.epoll) -> None:
        assert dial.sock is not None
        try:
            if not dial.greeted:
                if dial.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    self._dial_again(dial)
                    return
                dial.sock.send(HELLO.pack(MAGIC, self.cookie, self.generation, self.rank, dial.peer), socket.MSG_NOSIGNAL)
                dial.greeted = True
                poller.modify(dial.sock.fileno(), select.EPOLLIN)
                return
            # Not a byte more than the welcome: what follows are the peer's first frames.
            more = dial.sock.recv(len(WELCOME) - len(dial.reply))
        except BlockingIOError:
            return
        except OSError:
            more = b""
        dial.reply += more
        if not more or not WELCOME.startswith(dial.reply):
            self._dial_again(dial)
        elif dial.reply == WELCOME:
            del self._dialling[dial.sock.fileno()], self._dials[dial.peer]
            poller.unregister(dial.sock.fileno())
            self._formed[dial.peer] = dial.sock

    def _dial_again(self, dial: _Dial) -> None:
        assert dial.sock is not None
        del self._dialling[dial.sock.fileno()]
        dial.sock.close()
        dial.sock = None
        dial.due = time.monotonic() + dial.retry_s
        dial.retry_s = min(dial.retry_s * 2, LAST_RETRY_S)

    def _accept(self, poller: select.epoll) -> None:
        while True:
            try:
                sock, _ = self.listener.accept()
            except BlockingIOError:
                return
            except OSError:  # the caller was gone before we looked
                continue
            sock.setblocking(False)
            if len(self._strangers) >= MAX_STRANGERS:
                self._drop(next(iter(self._strangers.values())))
            self._strangers[sock.fileno()] = _Stranger(sock)
            poller.register(sock.fileno(), select.EPOLLIN)

    def _listen(self, stranger: _Stranger, callers: set[Rank], poller: select.epoll) -> None:
        try:
            more = stranger.sock.recv(HELLO.size - len(stranger.hello))
        except BlockingIOError:
            return
        except OSError:
            more = b""
        stranger.hello += more
        if more and len(stranger.hello) < HELLO.size:
            return
        peer = self._expected(stranger.hello, callers) if more else None
        if peer is None:
            self._drop(stranger)
            return
        try:
            stranger.sock.send(WELCOME, socket.MSG_NOSIGNAL)
        except OSError:
            self._drop(stranger)
            return
        del self._strangers[stranger.sock.fileno()]
        poller.unregister(stranger.sock.fileno())
        # A peer dials again only when its earlier connection broke, so the later one is the living one.
        earlier = self._formed.pop(peer, None)
        if earlier is not None:
            earlier.close()
        self._formed[peer] = stranger.sock

    def _expected(self, hello: bytes, callers: set[Rank]) -> Rank | None:
        magic, cookie, generation, caller, called = HELLO.unpack(hello)
        mine = (magic, cookie, generation, called) == (MAGIC, self.cookie, self.generation, self.rank)
        return Rank(caller) if mine and caller in callers else None

    def _drop(self, stranger: _Stranger) -> None:
        del self._strangers[stranger.sock.fileno()]
        stranger.sock.close()

    def _who_is_missing(self, callers: set[Rank]) -> str:
        silent = [f"{peer} at {self.addresses[peer]}" for peer in sorted(self._dials)]
        absent = [str(peer) for peer in sorted(callers - self._formed.keys())]
        said = [f"no welcome from rank {', '.join(silent)}"] if silent else []
        said += [f"no call from rank {', '.join(absent)}"] if absent else []
        return (
            f"rank {self.rank} could not form generation {self.generation} within {self.timeout_s:g} s: "
            f"{'; '.join(said)}; check that these processes live and that their addresses can be reached"
        )

    def _close_all(self, *, keep_formed: bool) -> None:
        unfinished = [dial.sock for dial in self._dialling.values()] + [s.sock for s in self._strangers.values()]
        if not keep_formed:
            unfinished += self._formed.values()
        for sock in unfinished:
            if sock is not None:
                with contextlib.suppress(OSError):
                    sock.close()
        self._dialling.clear()
        self._strangers.clear()
