"""A member of a training generation gives a newcomer its intervals in the background, and never waits for it.

First each chunk as it is between two updates, then, step by step, the reduced gradient of what was given: what a mirror
gets, so the newcomer ends with the same bits. A thread per newcomer sends; the training thread only copies gradients into
a bounded queue. A newcomer too slow for the queue is started over, and after a few times left to the next transfer. It
refuses to know plans, generations' fates and what becomes of what it sends.

    training thread   update under the lock ── applied(answer): gradients of what was given ──> queue
    sender            queue first, then the next chunk, copied under the lock                 ──> socket
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch

from orchestrator.domain.generation import Answer
from orchestrator.domain.ids import Device, Generation, Step
from orchestrator.domain.profile import Interval
from orchestrator.domain.requests import BeginJoin

from .page.layout import pack_answer
from .parallel.memory import bytes_of, dense
from .state.holdings import Holdings
from .state.relayout import MESSAGE, messages, packed

HELLO = struct.Struct("<8s16sqqH")
"""Magic, the job's cookie, the join's generation and attempt, length of what follows: the source's name."""
MAGIC = b"evrjoin1"
FRAME = struct.Struct("<qqqq")
"""Kind, number, step, bytes that follow."""
QUEUE_BYTES = 64 << 20
FEWEST_STEPS, MOST_STEPS = 4, 256
"""Whose gradients the queue holds at least, however large they are, and at most, however small."""
TRIES = 3
CONNECT_S = 5.0
STALL_S = 10.0
"""A newcomer that takes nothing for this long is given up."""
_SLICE = 1 << 16
_NAP_S = 0.02


class Kind(IntEnum):
    STATE = 1
    """number: of the chunk; (3, k) fp32: the chunk as of `step`."""
    ANSWER = 2
    """The vote's answer of `step`, before its gradients."""
    GRADIENTS = 3
    """number: how many chunks, from the first; their gradients of `step`, fp32, end to end."""
    PASSED = 4
    """Everything there is of `step` has been sent; number: steps that wait behind it."""
    END = 5
    """`step` was the last; nothing follows."""
    TOO_SLOW = 6
    """Given up; nothing follows."""


@dataclass(frozen=True, slots=True)
class _Passed:
    answer: Answer
    chunks: int
    gradients: torch.Tensor


class Feeders:
    """One rank's, of all newcomers; rate: bytes per second at most for each, 0 for no limit. Training thread only."""

    def __init__(self, me: Device, rate: float) -> None:
        self._me = me
        self._rate = rate
        self._feeders: list[Feeder] = []
        self.updating = threading.Lock()
        """Held while the holdings change; who copies from them in another thread holds it, too."""
        self.is_stopping = False
        """Every rank was asked to stop for newcomers, and the step that is made is the last."""

    def feed(self, begin: BeginJoin, held: Holdings, cookie: bytes) -> None:
        """Give newcomers what they are to have from here, in the background, until this generation ends."""
        self._feeders = [feeder for feeder in self._feeders if not feeder.is_over]
        for target in sorted({move.target for move in begin.moves if move.source == self._me}):
            feeder = Feeder(
                held=held,
                lock=self.updating,
                me=self._me,
                join=begin.generation,
                attempt=begin.attempt,
                cookie=cookie,
                address=begin.addresses[target],
                intervals=[m.interval for m in begin.moves if (m.source, m.target) == (self._me, target)],
                rate=self._rate,
            )
            self._feeders.append(feeder)
            feeder.start()

    def applied(self, answer: Answer) -> None:
        """A step's update is done; called with `updating` held."""
        for feeder in self._feeders:
            feeder.applied(answer)
            if self.is_stopping:
                feeder.end(answer.step)

    def stop(self) -> None:
        """The generation is over; returns when nothing is read from the holdings any more."""
        for feeder in self._feeders:
            feeder.stop()
        self._feeders.clear()
        self.is_stopping = False


class Feeder:
    """lock: held by whoever updates `held`; rate: bytes per second at most, 0 for no limit."""

    def __init__(
        self,
        *,
        held: Holdings,
        lock: threading.Lock,
        me: Device,
        join: Generation,
        attempt: int,
        cookie: bytes,
        address: str,
        intervals: Sequence[Interval],
        rate: float = 0.0,
        queue_bytes: int = QUEUE_BYTES,
        queue_steps: int = MOST_STEPS,
        chunk: int = MESSAGE,
    ) -> None:
        self._held = held
        self._lock = lock
        self._address = address
        name = str(me).encode()
        self._hello = HELLO.pack(MAGIC, cookie, join, attempt, len(name)) + name
        self._chunks = messages(intervals, chunk)
        self._rate = rate
        step_bytes = 4 * sum(map(len, intervals))
        self._bound = max(queue_bytes, FEWEST_STEPS * step_bytes)
        self._most_steps = queue_steps
        self._moved = threading.Condition()
        # Under the condition:
        self._given = 0
        """Chunks sent or being sent: what gradients are owed for."""
        self._queue: deque[_Passed] = deque()
        self._queued = 0
        self._tries = 1
        self._last: Step | None = None
        self._stopped = False
        self._sock: socket.socket | None = None
        self._thread = threading.Thread(target=self._run, name="feeder", daemon=True)

    def start(self) -> None:
        self._thread.start()

    # --- training thread --------------------------------------------------------------------------------------------------

    def applied(self, answer: Answer) -> None:
        """A step's update is done; called under the lock, while its gradients are still there."""
        with self._moved:
            if self._stopped or not self._given:
                return
            chunks = self._chunks[: self._given]
            gradients = torch.cat([view for chunk in chunks for i in chunk for view in self._held.gradients(i)])
            if self._queued + gradients.nbytes > self._bound or len(self._queue) >= self._most_steps:
                self._start_over()
                return
            self._queue.append(_Passed(answer, self._given, gradients))
            self._queued += gradients.nbytes
            self._moved.notify()

    def end(self, step: Step) -> None:
        """No step follows `step` in this generation."""
        with self._moved:
            self._last = step
            self._moved.notify()

    def stop(self) -> None:
        """Hang up, whatever is under way; returns when nothing is read from the holdings any more."""
        with self._moved:
            self._stopped = True
            sock = self._sock
            self._moved.notify()
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        with self._lock:
            pass

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def _start_over(self) -> None:
        self._queue.clear()
        self._queued = self._given = 0
        self._tries += 1
        self._moved.notify()

    # --- sender -----------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            host, _, port = self._address.rpartition(":")
            with socket.create_connection((host.strip("[]"), int(port)), CONNECT_S) as sock:
                sock.settimeout(STALL_S)
                with self._moved:
                    self._sock = None if self._stopped else sock
                if self._sock is not None:
                    self._send_all(sock)
        with self._moved:
            self._sock, self._stopped = None, True
            self._queue.clear()

    def _send_all(self, sock: socket.socket) -> None:
        send = _paced(sock, self._rate, lambda: self._last is not None)  # when training has ended, nothing is in its way
        send(memoryview(self._hello))
        while True:
            with self._moved:  # never while it sends: the training thread wants it at every step
                self._moved.wait_for(self._has_work)
                is_slow, last = self._tries > TRIES, self._last
                if self._stopped:
                    return
                passed = self._queue.popleft() if self._queue and not is_slow else None
                behind = len(self._queue)
                self._queued -= passed.gradients.nbytes if passed else 0
            if is_slow:
                send(memoryview(FRAME.pack(Kind.TOO_SLOW, 0, 0, 0)))
                return
            if passed is not None:
                self._send_passed(send, passed, behind)
            elif last is not None:
                send(memoryview(FRAME.pack(Kind.END, 0, last, 0)))
                return
            else:
                self._send_chunk(send)

    def _has_work(self) -> bool:
        has_news = self._stopped or self._tries > TRIES or self._queue or self._last is not None
        return bool(has_news) or self._given < len(self._chunks)

    def _send_passed(self, send: Callable[[memoryview], None], passed: _Passed, behind: int) -> None:
        step = passed.answer.step
        answer = pack_answer(Generation(0), passed.answer)
        send(memoryview(FRAME.pack(Kind.ANSWER, 0, step, len(answer)) + answer))
        send(memoryview(FRAME.pack(Kind.GRADIENTS, passed.chunks, step, passed.gradients.nbytes)))
        send(bytes_of(dense(passed.gradients)))
        send(memoryview(FRAME.pack(Kind.PASSED, behind, step, 0)))

    def _send_chunk(self, send: Callable[[memoryview], None]) -> None:
        """The next one as it is now; from the next update on its gradients are queued behind it."""
        with self._lock, self._moved:
            number = self._given
            if self._stopped or self._held.torn or number >= len(self._chunks):
                return
            state = packed((self._held,), self._chunks[number])
            step = self._held.step
            self._given += 1
        send(memoryview(FRAME.pack(Kind.STATE, number, step, state.nbytes)))
        send(bytes_of(dense(state)))


def _paced(sock: socket.socket, rate: float, in_a_hurry: Callable[[], bool]) -> Callable[[memoryview], None]:
    """Sends whole, raising OSError; in slices, so that a rate is kept evenly."""
    due = time.monotonic()

    def send(data: memoryview) -> None:
        nonlocal due
        for start in range(0, len(data), _SLICE if rate else max(1, len(data))):
            piece = data[start : start + _SLICE] if rate else data
            while rate and not in_a_hurry() and (left := due - time.monotonic()) > 0:
                time.sleep(min(left, _NAP_S))
            sock.sendall(piece)
            due = max(due, time.monotonic()) + len(piece) / rate if rate else due

    return send
