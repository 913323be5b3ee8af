"""Where everything is on a rank's progress page: a memfd that the rank writes and its host reads, also after its death.

It owns the layout of the shared memory, and nothing of what is written or read when. A memfd has no name, so nothing can be
left behind in /dev/shm.

    words (8 bytes each)      0 magic, 1 version, 2.. one counter or instant each (see Word)
    bytes GROUP_AT..          name of the group that is waited on, NUL padded
    bytes LIFELINE_AT..       the mutex that the rank holds while it lives; see worker/lifeline.py
    bytes TRAFFIC_AT..        a table of connections, written in long waits only, under a number that is odd meanwhile
    bytes SLOTS_AT..          two answer slots, used in turn: length, crc32, packed answer
"""

from __future__ import annotations

import mmap
import os
import struct
from enum import IntEnum
from math import isnan, nan
from typing import Literal

from orchestrator.domain.copying import Copied
from orchestrator.domain.errors import EverstepError
from orchestrator.domain.generation import Answer, Evaluation
from orchestrator.domain.ids import Generation, Step
from orchestrator.domain.spec import MAX_MICRO_BATCHES

PAGE_VERSION = 8
MAX_IDS = MAX_MICRO_BATCHES
"""Micro-batch ids whose losses fit on a page."""
MAX_GROUPS = 4096
"""Parameter groups whose maxima fit on a page."""

MAX_PEERS = 512
"""Connections in the table of traffic; those that are waited for come first."""

_MAGIC = int.from_bytes(b"everstep", "little")
GROUP_AT, GROUP_BYTES = 24 * 8, 256
LIFELINE_AT, LIFELINE_BYTES = GROUP_AT + GROUP_BYTES, 64
TRAFFIC_AT = LIFELINE_AT + LIFELINE_BYTES
TABLE = struct.Struct("<qqqqq")  # number of writes, collective, quiet since (ns), written at (ns), number of rows
ROW = struct.Struct("<qqqq")  # peer, messages sent, messages received, 1 awaits | 2 unsent
_HEAD = struct.Struct("<qqdqqqd")  # generation, step, norm, number of losses, of maxima; step and loss of an evaluation
_NONE = -1
SLOTS_AT = TRAFFIC_AT + TABLE.size + ROW.size * MAX_PEERS
SLOT_BYTES = 16 + _HEAD.size + 8 * (MAX_IDS + MAX_GROUPS)
_PAGE_BYTES = -(-(SLOTS_AT + 2 * SLOT_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE


class Word(IntEnum):
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
    COPIED = 15
    """Of a copy into this rank's memory, bytes that have arrived,"""
    TO_COPY = 16
    """and all that will; 0 where nothing is copied."""
    COPY = 17
    """Which one it is: its place in COPIES."""
    BEHIND = 18
    """It waits for its own device."""
    DISAGREES_WITH = 20
    """Rank + 1 and what about, packed; 0 for nobody."""
    DISAGREES_IN = 21
    FAULT = 23


COPIES: tuple[Copied, ...] = ("restoring", "receiving")
ABOUT: tuple[Literal["state", "gradient", "memory"], ...] = ("state", "gradient", "memory")

# Plain integers: an enum member costs a look-up at every collective.
GENERATION, PHASE, STEP, MICRO_BATCH = (int(word) for word in (Word.GENERATION, Word.PHASE, Word.STEP, Word.MICRO_BATCH))
COLLECTIVE, IN_WAIT, PROGRESSED_NS, WAITING_NS, PASSED_IN = (
    int(word) for word in (Word.COLLECTIVE, Word.IN_WAIT, Word.PROGRESSED_NS, Word.WAITING_NS, Word.PASSED_IN)
)
TO_COPY, BEHIND = int(Word.TO_COPY), int(Word.BEHIND)


def create_page() -> int:
    """A new page's memfd, all zero but for its header. The caller closes it; mappings outlive it."""
    fd = os.memfd_create("everstep-progress", os.MFD_CLOEXEC)
    os.ftruncate(fd, _PAGE_BYTES)
    os.pwrite(fd, struct.pack("<qq", _MAGIC, PAGE_VERSION), 0)
    return fd


def pack_answer(generation: Generation, answer: Answer) -> bytes:
    numbers = (*answer.losses, *answer.maxima)
    seen = answer.evaluation
    evaluated = (seen.step, nan if seen.loss is None else seen.loss) if seen is not None else (_NONE, nan)
    head = _HEAD.pack(generation, answer.step, answer.norm, len(answer.losses), len(answer.maxima), *evaluated)
    return head + struct.pack(f"<{len(numbers)}d", *numbers)


def unpack_answer(data: bytes) -> tuple[Generation, Answer]:
    generation, step, norm, ids, groups, evaluated, loss = _HEAD.unpack_from(data)
    numbers = struct.unpack_from(f"<{ids + groups}d", data, _HEAD.size)
    seen = None if evaluated == _NONE else Evaluation(step=Step(evaluated), loss=None if isnan(loss) else loss)
    answer = Answer(step=Step(step), norm=norm, losses=numbers[:ids], maxima=numbers[ids:], evaluation=seen)
    return Generation(generation), answer


class Mapped:
    """A page in this process's memory, for either side."""

    def __init__(self, fd: int) -> None:
        """Maps the page; `fd` stays the caller's. Raises EverstepError for a page of another version."""
        self._memory = mmap.mmap(fd, _PAGE_BYTES)
        self._words = memoryview(self._memory).cast("q")
        found = self._words[Word.MAGIC], self._words[Word.VERSION]
        if found != (_MAGIC, PAGE_VERSION):
            self.close()
            raise EverstepError(f"progress page has header {found}, version {PAGE_VERSION} is read here; use one release")

    def close(self) -> None:
        self._words.release()
        self._memory.close()
