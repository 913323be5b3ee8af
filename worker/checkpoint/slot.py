"""A slot: one snapshot's place in memory that a rank fills, its host keeps and a saver reads, each in its own process.

    header    16 words: state, number, step, generation, sizes, outcome; then, in words, why it was not written
    answer    of the vote that committed the step, packed as on a page
    table     which interval begins at which column, JSON: written once a layout, not once a snapshot
    state     (3, width) fp32, from a page boundary on; of a journal entry the first row alone is used, for the gradient

    free ──> filling ──> full ──> free     the rank writes the first two changes, its host the last
               `- the rank died: torn, nobody reads it

It owns that layout and the order of writes that keeps a torn snapshot from ever being taken for a whole one. It refuses to
know devices, files and who reacts. A memfd has no name: nothing is left in a file system, whoever dies.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum
from functools import partial

from orchestrator.adapters.index import GRADIENT
from orchestrator.domain.errors import EverstepError
from orchestrator.domain.generation import Answer
from orchestrator.domain.ids import Generation, Step
from orchestrator.domain.profile import Interval

from ..page.layout import MAX_GROUPS, MAX_IDS, pack_answer, unpack_answer
from ..state.pieces import KINDS, Piece

SLOT_VERSION = 3
SLOTS = 2
"""In a tray."""
ITEM_BYTES = 4

_MAGIC = int.from_bytes(b"evertray", "little")
_WHY_AT, _WHY_BYTES = 512, 1024
_ANSWER_AT = mmap.PAGESIZE
_TABLE_AT = _ANSWER_AT + -(-(64 + 8 * (MAX_IDS + MAX_GROUPS)) // mmap.PAGESIZE) * mmap.PAGESIZE


class SlotState(IntEnum):
    FREE = 0
    FILLING = 1
    FULL = 2


class Word(IntEnum):
    MAGIC = 0
    VERSION = 1
    STATE = 2
    NUMBER = 3
    """Of this slot's snapshots, how many have been begun."""
    STEP = 4
    GENERATION = 5
    ANSWER_BYTES = 6
    """0 where no answer is known."""
    TABLE_BYTES = 7
    STATE_AT = 8
    WIDTH = 9
    BEATS = 10
    """Moves while whoever writes what is full gets on with it."""
    IS_ENTRY = 11
    """It is the gradient that led to the step, not the state after it."""
    STALL_US = 12
    """Microseconds for which training waited."""
    WRITTEN = 13
    """Bytes of it that whoever writes has dealt with, of"""
    TO_WRITE = 14
    """all that is in it."""


def create_slot() -> int:
    """A new slot's memfd, free and with room for its header alone. The caller closes it; mappings outlive it."""
    fd = os.memfd_create("everstep-slot", os.MFD_CLOEXEC)
    os.ftruncate(fd, mmap.PAGESIZE)
    os.pwrite(fd, struct.pack("<qq", _MAGIC, SLOT_VERSION), 0)
    return fd


class Slot:
    """A slot's header in this process's memory, for either side; `fd` stays the caller's."""

    def __init__(self, fd: int) -> None:
        """Raises EverstepError for a slot of another version."""
        self._header = mmap.mmap(fd, mmap.PAGESIZE)
        self.words = memoryview(self._header).cast("q")
        found = self.words[Word.MAGIC], self.words[Word.VERSION]
        if found != (_MAGIC, SLOT_VERSION):
            self.close()
            raise EverstepError(f"a slot has header {found}, version {SLOT_VERSION} is read here; use one release")

    @property
    def state(self) -> SlotState:
        return SlotState(self.words[Word.STATE])

    @property
    def step(self) -> Step:
        return Step(self.words[Word.STEP])

    @property
    def generation(self) -> Generation:
        return Generation(self.words[Word.GENERATION])

    @property
    def number(self) -> int:
        return self.words[Word.NUMBER]

    @property
    def is_entry(self) -> bool:
        return bool(self.words[Word.IS_ENTRY])

    @property
    def stall_s(self) -> float:
        return self.words[Word.STALL_US] / 1e6

    @property
    def beats(self) -> int:
        return self.words[Word.BEATS]

    @property
    def written(self) -> tuple[int, int]:
        """Bytes of the snapshot that have been dealt with, and of all."""
        return self.words[Word.WRITTEN], self.words[Word.TO_WRITE]

    @property
    def why(self) -> str:
        """Why the last snapshot was not written; empty where it was."""
        return self._header[_WHY_AT : _WHY_AT + _WHY_BYTES].split(b"\0", 1)[0].decode(errors="replace")

    def beat(self) -> None:
        self.words[Word.BEATS] += 1

    def free(self, why: str = "") -> None:
        """What was full has been written, or cannot be and that is why: the rank may fill it again."""
        self._header[_WHY_AT : _WHY_AT + _WHY_BYTES] = why.encode()[: _WHY_BYTES - 1].ljust(_WHY_BYTES, b"\0")
        self.words[Word.STATE] = SlotState.FREE  # last: who sees it free reads a whole reason

    def close(self) -> None:
        self.words.release()
        self._header.close()


class Filler(Slot):
    """The rank's side: all of a slot in memory. memory: (3, width) fp32 as bytes, once it is laid out."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd)
        self._fd = fd
        self._table = b""
        self._whole: mmap.mmap | None = None

    def is_laid_out_for(self, table: bytes, width: int) -> bool:
        return self._whole is not None and self._table == table and self.words[Word.WIDTH] == width

    def lay_out(self, table: bytes, width: int) -> memoryview:
        """Its state, as bytes, for a share of the state that `table` describes. Only while it is free.

        Whoever uses the state that this returned before must have let go of it.
        """
        state_at = -(-(_TABLE_AT + len(table)) // mmap.PAGESIZE) * mmap.PAGESIZE
        num_bytes = len(KINDS) * width * ITEM_BYTES
        self._whole = None
        os.ftruncate(self._fd, state_at + num_bytes)  # what is cut off goes back to the system
        whole = mmap.mmap(self._fd, state_at + num_bytes)
        whole[_TABLE_AT : _TABLE_AT + len(table)] = table
        words = self.words
        words[Word.TABLE_BYTES], words[Word.STATE_AT], words[Word.WIDTH] = len(table), state_at, width
        self._table, self._whole = table, whole
        return memoryview(whole)[state_at:]

    def begin(self, step: Step, generation: Generation, answer: Answer | None, *, is_entry: bool = False) -> None:
        """Until `finish` nobody reads it."""
        assert self._whole is not None
        words = self.words
        words[Word.STATE] = SlotState.FILLING
        packed = pack_answer(generation, answer) if answer is not None else b""
        self._whole[_ANSWER_AT : _ANSWER_AT + len(packed)] = packed
        words[Word.ANSWER_BYTES] = len(packed)
        words[Word.STEP], words[Word.GENERATION], words[Word.IS_ENTRY] = step, generation, int(is_entry)
        rows = len(GRADIENT) if is_entry else len(KINDS)
        words[Word.WRITTEN], words[Word.TO_WRITE] = 0, rows * words[Word.WIDTH] * ITEM_BYTES
        words[Word.NUMBER] += 1

    def finish(self, stall_s: float = 0.0) -> None:
        self.words[Word.STALL_US] = round(stall_s * 1e6)
        self.words[Word.STATE] = SlotState.FULL  # last: what a reader finds is whole

    def drop(self) -> None:
        """What was begun is not going to be whole."""
        self.words[Word.STATE] = SlotState.FREE


@dataclass(frozen=True, slots=True, kw_only=True)
class Filled:
    """What a full slot says. state: (len(kinds), width) fp32 as bytes, in memory that stays mapped for as long as it is
    used."""

    step: Step
    generation: Generation
    answer: Answer | None
    pieces: tuple[Piece, ...]
    kinds: tuple[str, ...]
    width: int
    state: memoryview
    tell: Callable[[int], None]
    """Takes how many bytes of it have been dealt with."""


def read_slot(fd: int) -> Filled:
    """A full slot's content. Raises EverstepError where it holds no snapshot, ValueError where its sizes are no sizes."""
    size = os.fstat(fd).st_size
    whole = mmap.mmap(fd, size)
    words = memoryview(whole)[: mmap.PAGESIZE].cast("q")
    if words[Word.MAGIC] != _MAGIC or words[Word.VERSION] != SLOT_VERSION or words[Word.STATE] != SlotState.FULL:
        raise EverstepError("a slot that was to be written holds no snapshot; the next one is tried")
    state_at, width = words[Word.STATE_AT], words[Word.WIDTH]
    kinds = GRADIENT if words[Word.IS_ENTRY] else KINDS
    num_bytes = len(kinds) * width * ITEM_BYTES
    packed = whole[_ANSWER_AT : _ANSWER_AT + words[Word.ANSWER_BYTES]]
    return Filled(
        step=Step(words[Word.STEP]),
        generation=Generation(words[Word.GENERATION]),
        answer=unpack_answer(packed)[1] if packed else None,
        pieces=_pieces(whole[_TABLE_AT : _TABLE_AT + words[Word.TABLE_BYTES]]),
        kinds=kinds,
        width=width,
        state=memoryview(whole)[state_at : state_at + num_bytes],
        tell=partial(words.__setitem__, int(Word.WRITTEN)),
    )


def table_of(pieces: Iterable[Piece]) -> bytes:
    rows = [[piece.interval.line, piece.interval.start, piece.interval.stop, piece.offset] for piece in pieces]
    return json.dumps(rows, separators=(",", ":")).encode()


def _pieces(table: bytes) -> tuple[Piece, ...]:
    return tuple(Piece(Interval(line, start, stop), offset) for line, start, stop, offset in json.loads(table))
