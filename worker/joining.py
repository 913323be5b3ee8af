"""A newcomer receives what the next plan will give it, while those who hold it train on.

A thread per source reads; each chunk is filled once and then kept current with the update that its holders apply, so it
has their bits. It knows at which step each chunk is, says when all have caught up, and at the end hands over those of the
last step. It refuses to know who decides about plans, and how its sources come by what they send.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from orchestrator.domain.generation import Answer
from orchestrator.domain.host_events import JoinerAt, JoinFailed
from orchestrator.domain.ids import Device, Step
from orchestrator.domain.profile import Interval
from orchestrator.domain.requests import BeginJoin
from orchestrator.domain.spec import TrainSpec

from .feeding import FRAME, HELLO, MAGIC, Kind
from .page.layout import unpack_answer
from .parallel.memory import bytes_of
from .parallel.optimizer import adamw
from .state.holdings import Holdings
from .state.relayout import MESSAGE, STATE_BYTES, messages

QUIET_S, PATIENCE_S = 0.25, 1.5
"""After the end of training sources may still send what they had queued: while it flows, and this long at most."""
GREETING_S = 5.0
"""A caller who has not said by then who it is is hung up on."""
CALL_S = 10.0
"""A source that has not called by then cannot get here: it gives up sooner, and has nobody to tell."""
PROBE_AFTER_S, PROBE_EVERY_S, PROBES = 3, 2, 4
"""Of a source that sends nothing the kernel asks in the background whether it can still be heard; it may have no news."""
CLOSE_BEHIND = 1
"""Steps that may wait at a source for it to count as caught up with."""


class _Broken(Exception):
    """A source is of no use any more; in words."""


@dataclass(slots=True)
class _Source:
    name: Device
    attempt: int
    chunks: list[list[Interval]]
    at: list[Step]
    """Of each chunk; -1 before it has come."""
    passed: Step = Step(0)
    behind: int = 1 << 30
    since: float = field(default_factory=time.monotonic)
    """It is to call."""
    last: Step | None = None
    is_lost: bool = False
    is_here: bool = False

    @property
    def is_caught_up(self) -> bool:
        return self.behind <= CLOSE_BEHIND and all(step == self.passed for step in self.at)


class Joining:
    """holdings: laid out as the next plan wants them, empty. say: from any thread. cookie: names the job."""

    def __init__(
        self,
        *,
        begin: BeginJoin,
        me: Device,
        train: TrainSpec,
        holdings: Holdings,
        listener: socket.socket,
        cookie: bytes,
        say: Callable[[JoinerAt | JoinFailed], None],
        chunk: int = MESSAGE,
        call_s: float = CALL_S,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        self.generation = begin.generation
        self.of = begin.of
        self._me = me
        self._train = train
        self._holdings = holdings
        self._listener = listener
        self._cookie = cookie
        self._say = say
        self._chunk = chunk
        self._call_s = call_s
        self._progress = progress
        self._gate = threading.Lock()
        self._sources: list[_Source] = []
        self._readers: list[tuple[threading.Thread, socket.socket]] = []
        self._received = self._expected = 0
        self._told = False
        self._aborted = False
        self._ended_at: float | None = None
        self._heard_at = 0.0
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_closed = False
        self.expect(begin)

    # --- from the control thread ------------------------------------------------------------------------------------------

    def expect(self, begin: BeginJoin) -> None:
        """What `begin` says comes from each source; where a source had broken, somebody else gives the same again."""
        for source in sorted({m.source for m in begin.moves if m.target == self._me}):
            mine = [m.interval for m in begin.moves if m.target == self._me and m.source == source]
            chunks = messages(mine, self._chunk)
            with self._gate:
                self._expected += sum(map(_total, chunks)) * STATE_BYTES
                self._sources.append(_Source(source, begin.attempt, chunks, [Step(-1)] * len(chunks)))

    def end(self) -> None:
        """Training has stopped: a little patience for what is on its way, then `run` returns."""
        self._ended_at = self._ended_at or time.monotonic()
        self._rouse()

    @property
    def is_told(self) -> bool:
        """Every source has told its last step."""
        with self._gate:
            living = [source for source in self._sources if not source.is_lost]
            return bool(living) and all(source.last is not None for source in living)

    @property
    def is_aborted(self) -> bool:
        return self._aborted

    def abort(self) -> None:
        self._aborted = True
        self._rouse()

    def _rouse(self) -> None:
        with self._gate:
            if not self._is_closed:
                os.eventfd_write(self._wake, 1)

    # --- main thread ------------------------------------------------------------------------------------------------------

    def run(self) -> Holdings | None:
        """What has arrived and is of the last step; None if aborted.

        Returns after `end`, once every source has told its last step or patience is over. Not before: a newcomer that
        reports sooner than those it trains for would look like one of them that leaves by itself.
        """
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        poller.register(self._listener, select.POLLIN)
        self._listener.setblocking(False)
        try:
            while not (self._aborted or self._is_over()):
                for fd, _ in poller.poll(20 if self._ended_at else 1000):  # ms
                    if fd == self._wake:
                        with contextlib.suppress(BlockingIOError):
                            os.eventfd_read(self._wake)
                    else:
                        self._accept()
                self._miss_absent()
            return None if self._aborted else self._whole()
        finally:
            self._hang_up()

    def _is_over(self) -> bool:
        if self._ended_at is None:
            return False
        now = time.monotonic()
        is_patient = now <= max(self._ended_at, self._heard_at) + QUIET_S and now <= self._ended_at + PATIENCE_S
        return self.is_told or not is_patient

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            sock, _ = self._listener.accept()
            sock.setblocking(True)
            reader = threading.Thread(target=self._read, args=(sock,), name="joiner", daemon=True)
            self._readers.append((reader, sock))
            reader.start()

    def _miss_absent(self) -> None:
        due = time.monotonic() - self._call_s
        with self._gate:
            absent = [one for one in self._sources if not (one.is_here or one.is_lost) and one.since < due]
        for source in absent:
            self._lost(source, f"it has not called within {self._call_s:g} s")

    def _hang_up(self) -> None:
        for _, sock in self._readers:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for reader, _ in self._readers:
            reader.join()
        with self._gate:
            self._is_closed = True
            os.close(self._wake)

    def _whole(self) -> Holdings | None:
        with self._gate:
            last = max((source.last for source in self._sources if source.last is not None), default=None)
            if last is None:
                return None
            self._holdings.step = last
            self._holdings.arrived = {}
            for source in self._sources:
                for chunk, step in zip(source.chunks, source.at, strict=True):
                    if step == last:
                        self._holdings.note(chunk)
            return self._holdings

    # --- readers ----------------------------------------------------------------------------------------------------------

    def _read(self, sock: socket.socket) -> None:
        source = None
        with sock:
            try:
                source = self._greet(sock)
                if source is not None:
                    self._follow(sock, source)
            except (OSError, _Broken, struct.error, ValueError, RuntimeError) as problem:
                if source is not None:
                    self._lost(source, str(problem))
        self._rouse()

    def _greet(self, sock: socket.socket) -> _Source | None:
        """Which source calls; None for a stranger."""
        sock.settimeout(GREETING_S)
        magic, cookie, join, attempt, length = HELLO.unpack(_exactly(sock, HELLO.size))
        if (magic, cookie, join) != (MAGIC, self._cookie, self.generation):
            return None
        said = bytes(_exactly(sock, length)).decode()
        sock.settimeout(None)
        _keep_asking(sock)
        with self._gate:
            for source in self._sources:
                if (str(source.name), source.attempt) == (said, attempt) and not (source.is_here or source.is_lost):
                    source.is_here = True
                    return source
        return None

    def _lost(self, source: _Source, why: str) -> None:
        with self._gate:
            source.is_lost = True
            is_news = not self._aborted and source.last is None and self._ended_at is None
        if is_news:
            self._say(
                JoinFailed(
                    device=self._me,
                    generation=self.generation,
                    source=source.name,
                    attempt=source.attempt,
                    message=f"{source.name} broke off: {why}",
                )
            )

    def _follow(self, sock: socket.socket, source: _Source) -> None:
        answer: Answer | None = None
        while source.last is None:
            kind, number, step, length = FRAME.unpack(_exactly(sock, FRAME.size))
            self._heard_at = time.monotonic()
            match kind:
                case Kind.STATE:
                    self._fill(source, number, Step(step), _floats(sock, length))
                case Kind.ANSWER:
                    _, answer = unpack_answer(bytes(_exactly(sock, length)))
                case Kind.GRADIENTS:
                    if answer is None or answer.step != step:
                        raise _Broken(f"gradients of step {step} came without its answer")
                    for chunk in range(number):
                        self._heard_at = time.monotonic()
                        self._update(source, chunk, answer, _floats(sock, 4 * _total(source.chunks[chunk])))
                case Kind.PASSED:
                    self._passed(source, Step(step), number)
                case Kind.END:
                    with self._gate:
                        source.last = Step(step)
                case Kind.TOO_SLOW:
                    raise _Broken("its queue overflowed; the way here is slower than training makes news")
                case _:
                    raise _Broken(f"frame of unknown kind {kind}")

    def _fill(self, source: _Source, number: int, step: Step, values: torch.Tensor) -> None:
        """(Re)placed by what it was at `step`."""
        source.at[number] = Step(-1)
        state, position = values.view(3, -1), 0
        for interval in source.chunks[number]:
            self._holdings.fill(interval, state[:, position : position + len(interval)])
            position += len(interval)
        source.at[number] = step
        with self._gate:
            self._received += _total(source.chunks[number]) * STATE_BYTES
            # A source that starts over sends some of it again.
            self._progress(min(self._received, self._expected), self._expected)

    def _update(self, source: _Source, number: int, answer: Answer, gradients: torch.Tensor) -> None:
        if source.at[number] != answer.step - 1:
            return  # its source starts over, and this chunk will come again
        source.at[number] = Step(-1)
        position, held = 0, self._holdings
        gradients = gradients.to(held.gradient.device)
        for interval in source.chunks[number]:
            for found, at, decays in held.places(interval):
                length = len(found)
                part = gradients[position : position + length]
                position += length
                adamw(self._train, answer, held.state[:, at : at + length], part, ((0, length),) if decays else ())
        source.at[number] = answer.step

    def _passed(self, source: _Source, step: Step, behind: int) -> None:
        with self._gate:
            source.passed, source.behind = step, behind
            is_news = not self._told and all(one.is_caught_up for one in self._sources if not one.is_lost)
            covered = sum(_total(chunk) for one in self._sources if not one.is_lost for chunk in one.chunks)
            is_news = is_news and covered >= sum(len(piece.interval) for piece in self._holdings.pieces)
            self._told = self._told or is_news
        if is_news:
            self._say(JoinerAt(device=self._me, generation=self.generation, step=step))


def _keep_asking(sock: socket.socket) -> None:
    """Reading raises OSError soon after the other machine is heard no more."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE_AFTER_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_EVERY_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)


def _exactly(sock: socket.socket, length: int) -> bytearray:
    data = bytearray(length)
    _into(sock, memoryview(data))
    return data


def _floats(sock: socket.socket, length: int) -> torch.Tensor:
    values = torch.empty(length // 4, dtype=torch.float32)
    _into(sock, bytes_of(values))
    return values


def _into(sock: socket.socket, view: memoryview) -> None:
    while view:
        count = sock.recv_into(view)
        if not count:
            raise _Broken("end of file")
        view = view[count:]


def _total(intervals: list[Interval]) -> int:
    return sum(map(len, intervals))
