"""The host's side of a rank's progress page, of a living rank or of a dead one.

It owns reading what may be written meanwhile: a torn answer or table is read again, never passed on. It refuses to know who
reacts to what it shows.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from orchestrator.domain.copying import Copied
from orchestrator.domain.faults import POINTS
from orchestrator.domain.generation import Answer, Disagrees, RankReport
from orchestrator.domain.ids import Device, Generation, Rank, Step
from orchestrator.domain.sight import Traffic

from ..progress import Phase
from .layout import (
    ABOUT,
    BEHIND,
    COLLECTIVE,
    COPIES,
    GENERATION,
    GROUP_AT,
    GROUP_BYTES,
    IN_WAIT,
    MAX_PEERS,
    PASSED_IN,
    PHASE,
    PROGRESSED_NS,
    ROW,
    SLOT_BYTES,
    SLOTS_AT,
    STEP,
    TABLE,
    TRAFFIC_AT,
    WAITING_NS,
    Mapped,
    Word,
    unpack_answer,
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
    is_behind: bool
    """It waits for its own device, and so sleeps while that works."""
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


class PageReader(Mapped):
    """The host's side, of a living rank or of a dead one."""

    def glance(self) -> Glance:
        words = self._words
        generation = words[GENERATION]
        _, collective, quiet_ns, told_ns, _ = TABLE.unpack_from(self._memory, TRAFFIC_AT)
        is_told = words[IN_WAIT] and collective == words[COLLECTIVE]
        return Glance(
            generation=Generation(generation),
            phase=Phase(words[PHASE]),
            step=Step(words[STEP]),
            collective=words[COLLECTIVE],
            in_wait=bool(words[IN_WAIT]),
            progressed_at=words[PROGRESSED_NS] / 1e9,
            waiting_since=words[WAITING_NS] / 1e9,
            told_at=told_ns / 1e9 if is_told else 0.0,
            quiet_since=quiet_ns / 1e9 if is_told else 0.0,
            is_behind=bool(words[BEHIND]),
            has_passed=words[PASSED_IN] == generation,
        )

    def look(self) -> Sight:
        words = self._words
        answer = self.answer()
        return Sight(
            pid=words[Word.PID],
            generation=Generation(words[Word.GENERATION]),
            phase=Phase(words[Word.PHASE]),
            step=Step(words[Word.STEP]),
            micro_batch=words[Word.MICRO_BATCH],
            collective=words[Word.COLLECTIVE],
            group=self._memory[GROUP_AT : GROUP_AT + GROUP_BYTES].rstrip(b"\0").decode(errors="replace"),
            in_wait=bool(words[Word.IN_WAIT]),
            voted=Step(words[Word.VOTED]),
            passed=answer[1].step if answer else Step(0),
            progressed_at=words[Word.PROGRESSED_NS] / 1e9,
            waiting_since=words[Word.WAITING_NS] / 1e9,
            traffic=self._traffic(),
        )

    def _traffic(self) -> dict[Rank, Traffic]:
        for _ in range(3):
            writes, collective, _, _, count = TABLE.unpack_from(self._memory, TRAFFIC_AT)
            if not self._words[IN_WAIT] or collective != self._words[COLLECTIVE]:
                break
            at = TRAFFIC_AT + TABLE.size
            rows = ROW.iter_unpack(self._memory[at : at + ROW.size * max(0, min(count, MAX_PEERS))])
            found = {
                Rank(peer): Traffic(sent=sent, received=received, awaits=bool(bits & 1), unsent=bool(bits & 2))
                for peer, sent, received, bits in rows
            }
            if not writes & 1 and self._words[TRAFFIC_AT // 8] == writes:
                return found
        return {}

    def copying(self) -> tuple[Copied, int, int] | None:
        """What is being copied into its memory, bytes done and of all; None where nothing is."""
        done, total = self._words[Word.COPIED], self._words[Word.TO_COPY]
        return (COPIES[self._words[Word.COPY]], done, total) if total else None

    def fault(self) -> str:
        """The fault point this rank was killed at, and of which step; empty where it was not."""
        number = self._words[Word.FAULT]
        return f"{POINTS[number - 1]} of step {self._words[Word.STEP]}" if 0 < number <= len(POINTS) else ""

    def answer(self) -> tuple[Generation, Answer] | None:
        """The last vote seen to pass and its generation; None before the first."""
        for _ in range(3):
            number = self._words[Word.ANSWERS]
            if not number:
                return None
            at = SLOTS_AT + (number & 1) * SLOT_BYTES
            length, checksum = struct.unpack_from("<qq", self._memory, at)
            body = self._memory[at + 16 : at + 16 + max(0, min(length, SLOT_BYTES - 16))]
            if zlib.crc32(body) == checksum:
                return unpack_answer(body)
            # A living rank lapped this reader (two votes passed meanwhile); a dead one's slot is always whole.
        return None

    def report(self, device: Device, generation: Generation, cause: str) -> RankReport:
        """What a dead rank of `generation` would have said: what it had of earlier generations is settled already."""
        answer = self.answer()
        voted_here = self._words[Word.VOTED_IN] == generation
        return RankReport(
            device=device,
            generation=generation,
            voted=Step(self._words[Word.VOTED] if voted_here else 0),
            answer=answer[1] if answer and answer[0] == generation else None,
            answered_in=generation,
            held=None,
            cause=cause,
            found=self._disagreement(generation),
        )

    def _disagreement(self, generation: Generation) -> Disagrees | None:
        packed = self._words[Word.DISAGREES_WITH]
        if not packed or self._words[Word.DISAGREES_IN] != generation:
            return None
        return Disagrees(rank=Rank((packed >> 8) - 1), about=ABOUT[packed & 0xFF])


def members_in(group: str) -> tuple[Rank, ...]:
    """Of a group called name[0,2,...], as meshes call theirs; none of any other, nor of one whose name was cut."""
    _, _, inside = group.partition("[")
    numbers = inside.removesuffix("]").split(",")
    if not inside.endswith("]") or not all(number.isdecimal() for number in numbers):
        return ()
    return tuple(Rank(int(number)) for number in numbers)
