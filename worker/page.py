"""One rank's progress page: a memfd that the rank writes and its host reads, also after the rank is dead.

It owns the layout of the shared memory and the order of writes that keeps a torn answer from ever being read as whole.
It refuses to know who reacts to what it shows. A memfd has no name, so nothing can be left behind in /dev/shm.

    words (8 bytes each)      0 magic, 1 version, 2.. one counter or instant each (see _Word)
    bytes GROUP_AT..          name of the group that is waited on, NUL padded
    bytes TRAFFIC_AT..        a table of connections, written in long waits only, under a number that is odd meanwhile
    bytes SLOTS_AT..          two answer slots, used in turn: length, crc32, packed answer
"""

from __future__ import annotations

import mmap
import os
import struct
import time
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal

from orchestrator.domain.errors import EverstepError
from orchestrator.domain.faults import POINTS
from orchestrator.domain.generation import Answer, Disagrees, RankReport
from orchestrator.domain.ids import Device, Generation, Rank, Step
from orchestrator.domain.sight import Traffic

from .progress import Exchanged, Phase

PAGE_VERSION = 3
MAX_IDS = 1024
"""Micro-batch ids whose losses fit on a page."""
MAX_GROUPS = 4096
"""Parameter groups whose maxima fit on a page."""

_MAGIC = int.from_bytes(b"everstep", "little")
MAX_PEERS = 512
"""Connections in the table of traffic; those that are waited for come first."""

_GROUP_AT, _GROUP_BYTES = 24 * 8, 256
_TRAFFIC_AT = _GROUP_AT + _GROUP_BYTES
_TABLE = struct.Struct("<qqqqq")  # number of writes, collective, quiet since (ns), written at (ns), number of rows
_ROW = struct.Struct("<qqqq")  # peer, messages sent, messages received, 1 awaits | 2 unsent
_HEAD = struct.Struct("<qqdqq")  # generation, step, norm, number of losses, of maxima
_SLOTS_AT = _TRAFFIC_AT + _TABLE.size + _ROW.size * MAX_PEERS
_SLOT_BYTES = 16 + _HEAD.size + 8 * (MAX_IDS + MAX_GROUPS)
_PAGE_BYTES = -(-(_SLOTS_AT + 2 * _SLOT_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE


class _Word(IntEnum):
    MAGIC = 0
    VERSION = 1
    PID = 2
    GENERATION = 3
    PHASE = 4
    STEP = 5
    MICRO_BATCH = 6
    COLLECTIVE = 7
    IN_WAIT = 8
    VOTED = 9
    VOTED_IN = 10
    ANSWERS = 11
    PROGRESSED_NS = 12
    WAITING_NS = 13
    PASSED_IN = 14
    DISAGREES_WITH = 20
    """Rank + 1 and what about, packed; 0 for nobody."""
    DISAGREES_IN = 21
    FAULT = 23


_ABOUT: tuple[Literal["state", "gradient", "memory"], ...] = ("state", "gradient", "memory")

# Plain integers: an enum member costs a look-up at every collective.
_GENERATION, _PHASE, _STEP, _MICRO_BATCH = (
    int(word) for word in (_Word.GENERATION, _Word.PHASE, _Word.STEP, _Word.MICRO_BATCH)
)
_COLLECTIVE, _IN_WAIT, _PROGRESSED_NS, _WAITING_NS, _PASSED_IN = (
    int(word) for word in (_Word.COLLECTIVE, _Word.IN_WAIT, _Word.PROGRESSED_NS, _Word.WAITING_NS, _Word.PASSED_IN)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Glance:
    """Of a page, what changes with progress; cheap enough to take ten times a second. Instants as in Sight."""

    generation: Generation
    phase: Phase
    step: Step
    collective: int
    in_wait: bool
    progressed_at: float
    waiting_since: float
    told_at: float
    """When its wait last said whom it is for; 0.0 where it has not."""
    quiet_since: float
    """Since when no message has moved in that wait, as it said."""
    has_passed: bool
    """A vote of this generation has been seen to pass, so its first step is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """A page at one instant. Instants are seconds of the machine's monotonic clock; 0.0 where nothing happened yet."""

    pid: int
    generation: Generation
    phase: Phase
    step: Step
    micro_batch: int
    collective: int
    group: str
    """The group it waits on, or waited on last."""
    in_wait: bool
    voted: Step
    passed: Step
    progressed_at: float
    waiting_since: float
    traffic: Mapping[Rank, Traffic] = field(default_factory=dict)
    """Of the wait it is in, once nothing has moved for a while; empty otherwise."""


def create_page() -> int:
    """A new page's memfd, all zero but for its header. The caller closes it; mappings outlive it."""
    fd = os.memfd_create("everstep-progress", os.MFD_CLOEXEC)
    os.ftruncate(fd, _PAGE_BYTES)
    os.pwrite(fd, struct.pack("<qq", _MAGIC, PAGE_VERSION), 0)
    return fd


def members_in(group: str) -> tuple[Rank, ...]:
    """Of a group called name[0,2,...], as meshes call theirs; none of any other, nor of one whose name was cut."""
    _, _, inside = group.partition("[")
    numbers = inside.removesuffix("]").split(",")
    if not inside.endswith("]") or not all(number.isdecimal() for number in numbers):
        return ()
    return tuple(Rank(int(number)) for number in numbers)


def pack_answer(generation: Generation, answer: Answer) -> bytes:
    numbers = (*answer.losses, *answer.maxima)
    head = _HEAD.pack(generation, answer.step, answer.norm, len(answer.losses), len(answer.maxima))
    return head + struct.pack(f"<{len(numbers)}d", *numbers)


def unpack_answer(data: bytes) -> tuple[Generation, Answer]:
    generation, step, norm, ids, groups = _HEAD.unpack_from(data)
    numbers = struct.unpack_from(f"<{ids + groups}d", data, _HEAD.size)
    return Generation(generation), Answer(step=Step(step), norm=norm, losses=numbers[:ids], maxima=numbers[ids:])


class _Mapped:
    def __init__(self, fd: int) -> None:
        """Maps the page; `fd` stays the caller's. Raises EverstepError for a page of another version."""
        self._memory = mmap.mmap(fd, _PAGE_BYTES)
        self._words = memoryview(self._memory).cast("q")
        found = self._words[_Word.MAGIC], self._words[_Word.VERSION]
        if found != (_MAGIC, PAGE_VERSION):
            self.close()
            raise EverstepError(f"progress page has header {found}, version {PAGE_VERSION} is read here; use one release")

    def close(self) -> None:
        self._words.release()
        self._memory.close()


class PageWriter(_Mapped):
    """The rank's side; implements Progress."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd)
        self._names: dict[str, bytes] = {}
        self._words[_Word.PID] = os.getpid()

    @property
    def generation(self) -> Generation:
        return Generation(self._words[_GENERATION])

    @property
    def step(self) -> Step:
        return Step(self._words[_STEP])

    def fault(self, point: str) -> None:
        """The rank is about to be killed at a fault point: its host will say so."""
        self._words[_Word.FAULT] = 1 + POINTS.index(point)

    def phase(self, phase: Phase, generation: Generation, step: Step) -> None:
        words = self._words
        words[_GENERATION] = generation
        words[_STEP] = step
        words[_PHASE] = phase
        words[_IN_WAIT] = 0
        words[_PROGRESSED_NS] = time.monotonic_ns()

    def micro_batch(self, number: int) -> None:
        self._words[_MICRO_BATCH] = number
        self._words[_PROGRESSED_NS] = time.monotonic_ns()

    def enter(self, group: str) -> None:
        words = self._words
        self._memory[_GROUP_AT : _GROUP_AT + _GROUP_BYTES] = self._names.get(group) or self._name(group)
        words[_COLLECTIVE] += 1
        words[_WAITING_NS] = time.monotonic_ns()
        words[_IN_WAIT] = 1

    def leave(self) -> None:
        self._words[_IN_WAIT] = 0
        self._words[_PROGRESSED_NS] = time.monotonic_ns()

    def quiet(self, since_s: float, exchanged: Iterable[Exchanged]) -> None:
        rows = sorted(exchanged, key=lambda row: not (row.awaits or row.unsent))[:MAX_PEERS]
        table = b"".join(_ROW.pack(row.peer, row.sent, row.received, row.awaits | row.unsent << 1) for row in rows)
        writes = self._words[_TRAFFIC_AT // 8]
        self._words[_TRAFFIC_AT // 8] = writes + 1
        now = time.monotonic_ns()
        since = now - int(since_s * 1e9)
        _TABLE.pack_into(self._memory, _TRAFFIC_AT, writes + 1, self._words[_COLLECTIVE], since, now, len(rows))
        at = _TRAFFIC_AT + _TABLE.size
        self._memory[at : at + len(table)] = table
        self._words[_TRAFFIC_AT // 8] = writes + 2

    def voted(self, step: Step) -> None:
        self._words[_Word.VOTED] = step
        self._words[_Word.VOTED_IN] = self._words[_GENERATION]

    def passed(self, answer: Answer) -> None:
        if len(answer.losses) > MAX_IDS:
            raise EverstepError(f"step has {len(answer.losses)} micro-batches, {MAX_IDS} fit; use larger micro-batches")
        if len(answer.maxima) > MAX_GROUPS:
            raise EverstepError(f"step has {len(answer.maxima)} maxima, {MAX_GROUPS} fit; set train.exact to false")
        number = self._words[_Word.ANSWERS] + 1
        body = pack_answer(self.generation, answer)
        at = _SLOTS_AT + (number & 1) * _SLOT_BYTES
        struct.pack_into("<qq", self._memory, at, len(body), zlib.crc32(body))
        self._memory[at + 16 : at + 16 + len(body)] = body
        # Last: until this word names it the other slot's answer is the one that counts, so a death above tears nothing.
        self._words[_Word.ANSWERS] = number
        self._words[_PASSED_IN] = self._words[_GENERATION]

    def disagrees(self, finding: Disagrees) -> None:
        self._words[_Word.DISAGREES_IN] = self._words[_GENERATION]
        self._words[_Word.DISAGREES_WITH] = (finding.rank + 1) << 8 | _ABOUT.index(finding.about)

    def _name(self, group: str) -> bytes:
        name = self._names[group] = group.encode()[:_GROUP_BYTES].ljust(_GROUP_BYTES, b"\0")
        return name


class PageReader(_Mapped):
    """The host's side, of a living rank or of a dead one."""

    def glance(self) -> Glance:
        words = self._words
        generation = words[_GENERATION]
        _, collective, quiet_ns, told_ns, _ = _TABLE.unpack_from(self._memory, _TRAFFIC_AT)
        is_told = words[_IN_WAIT] and collective == words[_COLLECTIVE]
        return Glance(
            generation=Generation(generation),
            phase=Phase(words[_PHASE]),
            step=Step(words[_STEP]),
            collective=words[_COLLECTIVE],
            in_wait=bool(words[_IN_WAIT]),
            progressed_at=words[_PROGRESSED_NS] / 1e9,
            waiting_since=words[_WAITING_NS] / 1e9,
            told_at=told_ns / 1e9 if is_told else 0.0,
            quiet_since=quiet_ns / 1e9 if is_told else 0.0,
            has_passed=words[_PASSED_IN] == generation,
        )

    def look(self) -> Sight:
        words = self._words
        answer = self.answer()
        return Sight(
            pid=words[_Word.PID],
            generation=Generation(words[_Word.GENERATION]),
            phase=Phase(words[_Word.PHASE]),
            step=Step(words[_Word.STEP]),
            micro_batch=words[_Word.MICRO_BATCH],
            collective=words[_Word.COLLECTIVE],
            group=self._memory[_GROUP_AT : _GROUP_AT + _GROUP_BYTES].rstrip(b"\0").decode(errors="replace"),
            in_wait=bool(words[_Word.IN_WAIT]),
            voted=Step(words[_Word.VOTED]),
            passed=answer[1].step if answer else Step(0),
            progressed_at=words[_Word.PROGRESSED_NS] / 1e9,
            waiting_since=words[_Word.WAITING_NS] / 1e9,
            traffic=self._traffic(),
        )

    def _traffic(self) -> dict[Rank, Traffic]:
        for _ in range(3):
            writes, collective, _, _, count = _TABLE.unpack_from(self._memory, _TRAFFIC_AT)
            if not self._words[_IN_WAIT] or collective != self._words[_COLLECTIVE]:
                break
            at = _TRAFFIC_AT + _TABLE.size
            rows = _ROW.iter_unpack(self._memory[at : at + _ROW.size * max(0, min(count, MAX_PEERS))])
            found = {
                Rank(peer): Traffic(sent=sent, received=received, awaits=bool(bits & 1), unsent=bool(bits & 2))
                for peer, sent, received, bits in rows
            }
            if not writes & 1 and self._words[_TRAFFIC_AT // 8] == writes:
                return found
        return {}

    def fault(self) -> str:
        """The fault point this rank was killed at, and of which step; empty where it was not."""
        number = self._words[_Word.FAULT]
        return f"{POINTS[number - 1]} of step {self._words[_Word.STEP]}" if 0 < number <= len(POINTS) else ""

    def answer(self) -> tuple[Generation, Answer] | None:
        """The last vote seen to pass and its generation; None before the first."""
        for _ in range(3):
            number = self._words[_Word.ANSWERS]
            if not number:
                return None
            at = _SLOTS_AT + (number & 1) * _SLOT_BYTES
            length, checksum = struct.unpack_from("<qq", self._memory, at)
            body = self._memory[at + 16 : at + 16 + max(0, min(length, _SLOT_BYTES - 16))]
            if zlib.crc32(body) == checksum:
                return unpack_answer(body)
            # A living rank lapped this reader (two votes passed meanwhile); a dead one's slot is always whole.
        return None

    def report(self, device: Device, generation: Generation, cause: str) -> RankReport:
        """What a dead rank of `generation` would have said: what it had of earlier generations is settled already."""
        answer = self.answer()
        voted_here = self._words[_Word.VOTED_IN] == generation
        return RankReport(
            device=device,
            generation=generation,
            voted=Step(self._words[_Word.VOTED] if voted_here else 0),
            answer=answer[1] if answer and answer[0] == generation else None,
            held=None,
            cause=cause,
            found=self._disagreement(generation),
        )

    def _disagreement(self, generation: Generation) -> Disagrees | None:
        packed = self._words[_Word.DISAGREES_WITH]
        if not packed or self._words[_Word.DISAGREES_IN] != generation:
            return None
        return Disagrees(rank=Rank((packed >> 8) - 1), about=_ABOUT[packed & 0xFF])
