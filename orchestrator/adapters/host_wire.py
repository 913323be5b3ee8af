"""What crosses between the supervisor's process and a host's: the codec's bytes, with the protocol's version in front.

Exceptions do not cross: a reply says what was refused, so that neither side unpickles the other's.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeVar

from orchestrator.domain import codec
from orchestrator.domain.errors import EverstepError, StaleTerm
from orchestrator.domain.host_events import Envelope
from orchestrator.domain.ids import EffectId, Term
from orchestrator.domain.memo import Remembered
from orchestrator.domain.requests import PROTOCOL_VERSION, HostMessage

READABLE = (PROTOCOL_VERSION,)
"""Versions understood here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    term: Term
    effect: EffectId
    request: HostMessage
    memo: str = ""
    version: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class Poll:
    term: Term
    after: int
    acked: int
    wait_s: float
    memo: str = ""
    asks: bool = False
    """What the host remembers is wanted, and nothing else."""
    version: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """stale and refused: what was raised, in words."""

    envelopes: tuple[Envelope, ...] = ()
    stale: str | None = None
    refused: str | None = None
    kept: Remembered | None = None
    version: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a host listens for as long as it lives: whoever connects is sent `greeting`, and may ask after `secret`."""

    address: str
    port: int
    greeting: str
    secret: str
    pid: int


FRAME = struct.Struct("<IQB")
"""Length of what follows, the question's number, which its answer carries too, and the kind."""


class Kind(IntEnum):
    BEAT = 0
    """Nothing; it is the other kernel that acknowledges it."""
    HANDLE = 1
    """A Call."""
    POLL = 2
    ANSWER = 3
    """A Reply."""


BEAT = FRAME.pack(0, 0, Kind.BEAT)
QUIET_BYTES = 12 * FRAME.size + 1
"""A host's process is not woken for less: beats are for its kernel, and a dozen of them may pile up."""
PADDING = BEAT * (1 + QUIET_BYTES // FRAME.size)
"""After each question, so that whatever of it has not been read yet is enough to be woken for."""


M = TypeVar("M", Call, Poll, Reply)


def read(wanted: type[M], data: bytes) -> M:
    """Raises EverstepError where the other side speaks a version that is not understood here."""
    message = codec.loads(wanted, data)
    if message.version not in READABLE:
        raise EverstepError(f"protocol {message.version} is not understood, only {READABLE}; run one version everywhere")
    return message


def raise_for(reply: Reply) -> None:
    if reply.stale is not None:
        raise StaleTerm(reply.stale)
    if reply.refused is not None:
        raise EverstepError(f"the host refused: {reply.refused}")
