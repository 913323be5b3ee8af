"""The rank's side of its progress page.

It owns the order of writes that keeps a torn answer from ever being read as whole, also where the rank dies between two of
them. It refuses to know who reacts to what the page shows.
"""

from __future__ import annotations

import os
import struct
import time
import zlib
from collections.abc import Iterable

from orchestrator.domain.copying import Copied
from orchestrator.domain.errors import EverstepError
from orchestrator.domain.faults import POINTS
from orchestrator.domain.generation import Answer, Disagrees
from orchestrator.domain.ids import Generation, Step

from ..progress import Exchanged, Phase
from .layout import (
    ABOUT,
    BEHIND,
    COLLECTIVE,
    COPIES,
    GENERATION,
    GROUP_AT,
    GROUP_BYTES,
    IN_WAIT,
    MAX_GROUPS,
    MAX_IDS,
    MAX_PEERS,
    MICRO_BATCH,
    PASSED_IN,
    PHASE,
    PROGRESSED_NS,
    ROW,
    SLOT_BYTES,
    SLOTS_AT,
    STEP,
    TABLE,
    TO_COPY,
    TRAFFIC_AT,
    WAITING_NS,
    Mapped,
    Word,
    pack_answer,
)


class PageWriter(Mapped):
    """The rank's side; implements Progress."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd)
        self._names: dict[str, bytes] = {}
        self._words[Word.PID] = os.getpid()

    @property
    def generation(self) -> Generation:
        return Generation(self._words[GENERATION])

    @property
    def step(self) -> Step:
        return Step(self._words[STEP])

    def fault(self, point: str) -> None:
        """The rank is about to be killed at a fault point: its host will say so."""
        self._words[Word.FAULT] = 1 + POINTS.index(point)

    def phase(self, phase: Phase, generation: Generation, step: Step) -> None:
        words = self._words
        words[GENERATION] = generation
        words[STEP] = step
        words[PHASE] = phase
        words[IN_WAIT] = words[BEHIND] = 0
        words[TO_COPY] = 0  # whatever cut it short
        words[PROGRESSED_NS] = time.monotonic_ns()

    def micro_batch(self, number: int) -> None:
        self._words[MICRO_BATCH] = number
        self._words[PROGRESSED_NS] = time.monotonic_ns()

    def enter(self, group: str) -> None:
        words = self._words
        self._memory[GROUP_AT : GROUP_AT + GROUP_BYTES] = self._names.get(group) or self._name(group)
        words[COLLECTIVE] += 1
        words[WAITING_NS] = time.monotonic_ns()
        words[IN_WAIT] = 1

    def leave(self) -> None:
        self._words[IN_WAIT] = 0
        self._words[PROGRESSED_NS] = time.monotonic_ns()

    def behind(self, is_behind: bool) -> None:
        self._words[BEHIND] = is_behind

    def quiet(self, since_s: float, exchanged: Iterable[Exchanged]) -> None:
        rows = sorted(exchanged, key=lambda row: not (row.awaits or row.unsent))[:MAX_PEERS]
        table = b"".join(ROW.pack(row.peer, row.sent, row.received, row.awaits | row.unsent << 1) for row in rows)
        writes = self._words[TRAFFIC_AT // 8]
        self._words[TRAFFIC_AT // 8] = writes + 1
        now = time.monotonic_ns()
        since = now - int(since_s * 1e9)
        TABLE.pack_into(self._memory, TRAFFIC_AT, writes + 1, self._words[COLLECTIVE], since, now, len(rows))
        at = TRAFFIC_AT + TABLE.size
        self._memory[at : at + len(table)] = table
        self._words[TRAFFIC_AT // 8] = writes + 2

    def voted(self, step: Step) -> None:
        self._words[Word.VOTED] = step
        self._words[Word.VOTED_IN] = self._words[GENERATION]

    def computed(self, seconds: float) -> None:
        """Who is told of votes that pass is told with them; here nobody looks for it."""

    def passed(self, answer: Answer) -> None:
        if len(answer.losses) > MAX_IDS:
            raise EverstepError(f"step has {len(answer.losses)} micro-batches, {MAX_IDS} fit; use larger micro-batches")
        if len(answer.maxima) > MAX_GROUPS:
            raise EverstepError(f"step has {len(answer.maxima)} maxima, {MAX_GROUPS} fit; set train.exact to false")
        number = self._words[Word.ANSWERS] + 1
        body = pack_answer(self.generation, answer)
        at = SLOTS_AT + (number & 1) * SLOT_BYTES
        struct.pack_into("<qq", self._memory, at, len(body), zlib.crc32(body))
        self._memory[at + 16 : at + 16 + len(body)] = body
        # Last: until this word names it the other slot's answer is the one that counts, so a death above tears nothing.
        self._words[Word.ANSWERS] = number
        self._words[PASSED_IN] = self._words[GENERATION]

    def disagrees(self, finding: Disagrees) -> None:
        self._words[Word.DISAGREES_IN] = self._words[GENERATION]
        self._words[Word.DISAGREES_WITH] = (finding.rank + 1) << 8 | ABOUT.index(finding.about)

    def copying(self, what: Copied, done: int, total: int) -> None:
        words = self._words
        words[Word.COPY], words[Word.COPIED], words[TO_COPY] = COPIES.index(what), done, total
        words[PROGRESSED_NS] = time.monotonic_ns()

    def _name(self, group: str) -> bytes:
        name = self._names[group] = group.encode()[:GROUP_BYTES].ljust(GROUP_BYTES, b"\0")
        return name
