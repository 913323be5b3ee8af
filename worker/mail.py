"""Messages between a host and its ranks: frames on a socket pair that neither side ever waits for.

It owns framing, encoding and the order of messages; it refuses to know what they mean. What a rank says is plain JSON or
packed numbers, because user code runs in ranks; what a host says is pickled, because ranks trust their host and a plan with
thousands of moves must be read in a millisecond, not in ten.

    frame: length of the rest (uint32), kind (one byte), body
"""

from __future__ import annotations

import os
import pickle
import socket
import struct
import threading
from dataclasses import dataclass
from typing import TypeAlias, cast

from orchestrator.domain import codec
from orchestrator.domain.errors import EverstepError
from orchestrator.domain.generation import Answer
from orchestrator.domain.host_events import (
    FaultCarriedOut,
    JoinerAt,
    JoinFailed,
    RankFinished,
    RankReady,
    RankReported,
    ShardNotSaved,
)
from orchestrator.domain.ids import Generation, Step
from orchestrator.domain.plan import Plan
from orchestrator.domain.requests import (
    BeginJoin,
    CloseGeneration,
    EndJoin,
    FormGeneration,
    InjectFault,
    SaveSoon,
    SetPacing,
    StopAfter,
)

from .page.layout import pack_answer, unpack_answer

BROKEN = 70
"""Exit code of a rank that failed below the training program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StandBy:
    """Be ready for a place in this plan."""

    plan: Plan


Between: TypeAlias = BeginJoin | StopAfter | SaveSoon | SetPacing | EndJoin
"""What ranks take into account between two steps, and each knows whether it is meant."""
ToRank: TypeAlias = FormGeneration | CloseGeneration | Between | InjectFault | StandBy

_ORDER, _SAID, _PASSED = b"O", b"S", b"P"
_LENGTH = struct.Struct("<I")
_WHEN = struct.Struct("<dd")
_READ_BYTES = 1 << 18
_BACKLOG_BYTES = 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Passed:
    """A vote was seen to pass; said before anything is updated, and read when the host next looks: it wakes nobody."""

    generation: Generation
    answer: Answer
    at: float
    """Wall clock, s."""
    computed_s: float = 0.0
    """By this rank for a micro-batch; 0.0 where that says nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Raised:
    """The training program raised, or left through sys.exit; the rank ends right after this."""

    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HandedOver:
    """A snapshot lies whole in this rank's tray."""

    generation: Generation
    step: Step


@dataclass(frozen=True, slots=True, kw_only=True)
class StandsBy:
    """It is built as far as it can be without a role."""


Said: TypeAlias = (
    RankReported
    | RankReady
    | RankFinished
    | HandedOver
    | ShardNotSaved
    | JoinerAt
    | JoinFailed
    | FaultCarriedOut
    | StandsBy
    | Raised
)
FromRank: TypeAlias = Said | Passed


def order_frame(order: ToRank) -> bytes:
    """A host's message; made once, posted to many ranks."""
    return _frame(_ORDER, pickle.dumps(order, protocol=pickle.HIGHEST_PROTOCOL))


def said_frame(said: Said) -> bytes:
    return _frame(_SAID, codec.dumps(said))


def passed_frame(passed: Passed) -> bytes:
    return _frame(_PASSED, _WHEN.pack(passed.at, passed.computed_s) + pack_answer(passed.generation, passed.answer))


def read_order(kind: bytes, body: bytes) -> ToRank:
    if kind != _ORDER:
        raise EverstepError(f"a host sent a frame of kind {kind!r}, a rank reads {_ORDER!r}; use one release on both sides")
    return cast(ToRank, pickle.loads(body))


def read_said(kind: bytes, body: bytes) -> FromRank:
    if kind == _PASSED:
        at, computed_s = _WHEN.unpack_from(body)
        generation, answer = unpack_answer(body[_WHEN.size :])
        return Passed(generation=generation, answer=answer, at=at, computed_s=computed_s)
    if kind != _SAID:
        raise EverstepError(f"a rank sent a frame of kind {kind!r}; {_SAID!r} and {_PASSED!r} are read here")
    return cast(FromRank, codec.loads(cast(type[Said], Said), body))


class Channel:
    """One end. Any thread may post; one thread receives. A peer that reads nothing delays nobody: frames queue up here.

    bell: an eventfd that this end rings for what cannot wait, where the other listens to it instead of the socket; what was
    posted quietly is read with that, or whenever the other looks.
    """

    def __init__(self, sock: socket.socket, bell: int = -1) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._bell = bell
        self._lock = threading.Lock()
        self._backlog = bytearray()
        self._read = bytearray()
        self._broken = False

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def is_backed_up(self) -> bool:
        """Whether frames wait for the peer; call flush() when the socket can be written."""
        return bool(self._backlog) and not self._broken

    def post(self, frame: bytes, *, droppable: bool = False, quietly: bool = False) -> None:
        """Send, or queue behind what is queued. A droppable frame is dropped where the backlog has reached its bound."""
        with self._lock:
            if self._broken or (droppable and len(self._backlog) > _BACKLOG_BYTES):
                return
            self._backlog += frame
            self._push()
            if self._bell >= 0 and not quietly:
                os.eventfd_write(self._bell, 1)

    def flush(self) -> None:
        with self._lock:
            waited = bool(self._backlog)
            self._push()
            if waited and self._bell >= 0:  # what rang for it may have been heard before it was there to be read
                os.eventfd_write(self._bell, 1)

    def receive(self) -> tuple[list[tuple[bytes, bytes]], bool]:
        """(kind, body) of every whole frame that has arrived, and whether more can come."""
        is_open = True
        while True:
            try:
                data = self._sock.recv(_READ_BYTES)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                is_open = False
                break
            self._read += data
        return self._whole_frames(), is_open

    def close(self) -> None:
        with self._lock:
            self._broken = True
            self._sock.close()

    def _push(self) -> None:
        while self._backlog and not self._broken:
            try:
                sent = self._sock.send(self._backlog)
            except BlockingIOError:
                return
            except OSError:
                self._broken = True  # the reader of this socket learns of it too, and decides
                return
            del self._backlog[:sent]

    def _whole_frames(self) -> list[tuple[bytes, bytes]]:
        frames, at = [], 0
        while len(self._read) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._read, at)
            start = at + _LENGTH.size
            if len(self._read) - start < length:
                break
            frames.append((bytes(self._read[start : start + 1]), bytes(self._read[start + 1 : start + length])))
            at = start + length
        del self._read[:at]
        return frames


def _frame(kind: bytes, body: bytes) -> bytes:
    return _LENGTH.pack(len(body) + 1) + kind + body
