"""A rank's tray: two slots of memory that its host keeps, into one of which state or gradient is copied after a step.

The copy goes on beside the next step's forward and backward, and training waits for what is left of it before it changes
what is copied: for that and for nothing else. Who writes is another process, and a snapshot for which there is no room is
not taken. The first slot's memory is touched beforehand, in a thread of the lowest priority; the second's once the first
has been full for three quarters of the time to the next snapshot. It refuses to know files, and where what is full goes.

    lay out ──> touch ──> take: begin to copy ──> copied: say so ──> ... host: written, free again
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence

import torch

from orchestrator.domain.generation import Answer
from orchestrator.domain.host_events import ShardNotSaved
from orchestrator.domain.ids import Device, Generation, Step

from ..faultpoints import faultpoint
from ..mail import HandedOver
from ..parallel.device import Copying, let_go, make_ready
from ..parallel.group import Aborted
from ..state.holdings import Holdings
from ..state.pieces import KINDS
from .handover import NotSaved
from .slot import Filler, SlotState, table_of

_LOOK_S = 0.002


class Tray:
    """Implements Snapshots. fds: the slots' memfds, which become its own.

    say: to the host; is_closed: whether a generation has been.
    """

    def __init__(
        self,
        fds: Sequence[int],
        me: Device,
        device: torch.device,
        say: Callable[[HandedOver | ShardNotSaved], None],
        is_closed: Callable[[Generation], bool],
    ) -> None:
        self._places = tuple(_Place(fd, device) for fd in fds)
        self._me = me
        self._device = device
        self._say = say
        self._is_closed = is_closed
        self._table = b""
        self._laid_out: object = None
        self._under_way: tuple[_Place, Copying] | None = None
        self._stall_s = 0.0

    def lay_out(self, held: Holdings) -> None:
        if self._laid_out is not held.owned_pieces:
            self._table, self._laid_out = table_of(held.owned_pieces), held.owned_pieces
        for place in self._places:
            if place.slot.state is SlotState.FREE:
                place.lay_out(self._table, held.owned)
        self._places[0].touch()

    def is_ready(self, held: Holdings, every: int) -> bool:
        first, *others = self._places
        is_slow = first.slot.state is SlotState.FULL and 4 * (held.step + 1 - first.slot.step) >= 3 * every
        if every and is_slow:  # without an interval there is no next snapshot to make room for
            for place in others:
                place.touch()
        return self._free(held) is not None

    def take(self, held: Holdings, generation: Generation, answer: Answer | None, *, is_entry: bool = False) -> None:
        place = self._free(held)
        assert place is not None, "it was ready"
        faultpoint("before_snapshot")
        begun = time.perf_counter()
        copying = Copying(self._device)
        place.slot.begin(held.step, generation, answer, is_entry=is_entry)
        rows = (held.gradient,) if is_entry else tuple(held.state)
        try:
            for number, (row, kept) in enumerate(zip(rows, place.state[: len(rows)], strict=True)):
                copying.add(row[: held.owned], kept)
                if not number:
                    faultpoint("in_snapshot")
            copying.go_on()
        except BaseException:
            copying.wait()
            place.slot.drop()
            raise
        self._under_way = place, copying
        self._stall_s = time.perf_counter() - begun
        if not copying.is_beside:
            self.copied()

    def copied(self, *, entry: bool = False) -> None:
        if self._under_way is None or (entry and not self._under_way[0].slot.is_entry):
            return
        (place, copying), self._under_way = self._under_way, None
        begun = time.perf_counter()
        try:
            copying.wait()
        except BaseException:
            place.slot.drop()
            raise
        place.slot.finish(self._stall_s + time.perf_counter() - begun)
        # From here on the host finds it, whether or not anybody tells.
        faultpoint("after_snapshot")
        self._say(HandedOver(generation=place.slot.generation, step=place.slot.step))

    def skip(self, step: Step, generation: Generation, why: str) -> None:
        self._say(ShardNotSaved(device=self._me, generation=generation, step=step, message=why))

    def take_last(self, held: Holdings, generation: Generation, answer: Answer | None, moved: Callable[[], None]) -> None:
        while (place := self._free(held)) is None:
            self._wait(generation, moved)
        self.take(held, generation, answer)
        self.copied()
        while place.slot.state is SlotState.FULL:
            self._wait(generation, moved)
        if why := place.slot.why:
            raise NotSaved(f"the final state could not be written: {why}; free the disk and submit the job again")

    @property
    def is_touching(self) -> bool:
        """Memory is still being touched: until it has been, a copy is slower."""
        return any(place.is_touching for place in self._places)

    def flush(self) -> None:
        """Returns when everything that is full has been written, or could not be."""
        while any(place.slot.state is SlotState.FULL for place in self._places):
            time.sleep(_LOOK_S)

    def close(self) -> None:
        """Let go of its memory; what is full stays full."""
        self.copied()
        for place in self._places:
            place.close()

    def _free(self, held: Holdings) -> _Place | None:
        """The first slot that is, laid out for `held`: the first one's memory has been touched."""
        for place in self._places:
            if place.slot.state is SlotState.FREE:
                if self._laid_out is not held.owned_pieces:
                    self._table, self._laid_out = table_of(held.owned_pieces), held.owned_pieces
                place.lay_out(self._table, held.owned)
                return place
        return None

    def _wait(self, generation: Generation, moved: Callable[[], None]) -> None:
        before = [place.slot.beats for place in self._places]
        time.sleep(_LOOK_S)
        if self._is_closed(generation):
            raise Aborted("the generation was closed before its last snapshot had been written")
        if before != [place.slot.beats for place in self._places]:
            moved()


class _Place:
    """A slot, its state as a tensor, and the thread that touches it."""

    def __init__(self, fd: int, device: torch.device) -> None:
        self.slot = Filler(fd)
        self.state = torch.empty(len(KINDS), 0)
        self._fd = fd
        self._device = device
        self._toucher: threading.Thread | None = None
        self._is_touched = self._is_pinned = False
        self._stop = False

    def lay_out(self, table: bytes, width: int) -> None:
        if self.slot.is_laid_out_for(table, width):
            return
        self._let_go()
        memory = self.slot.lay_out(table, width)
        if width:
            self.state = torch.frombuffer(memory, dtype=torch.float32).view(len(KINDS), width)

    @property
    def is_touching(self) -> bool:
        return self._toucher is not None and self._toucher.is_alive()

    def touch(self) -> None:
        """Have its memory there before it is needed, without anybody waiting for that."""
        if self._is_touched or not self.state.numel():
            return
        self._is_touched, self._stop = True, False
        self._toucher = threading.Thread(target=self._touch, args=(self.state,), name="tray", daemon=True)
        self._toucher.start()

    def close(self) -> None:
        self._let_go()
        self.slot.close()
        os.close(self._fd)

    def _touch(self, state: torch.Tensor) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)  # of this thread alone
        self._is_pinned = make_ready(state, self._device, lambda: self._stop)

    def _let_go(self) -> None:
        if self._toucher is not None:
            self._stop = True
            self._toucher.join()
            self._toucher = None
        if self._is_pinned:
            let_go(self.state)
        self.state, self._is_touched, self._is_pinned = torch.empty(len(KINDS), 0), False, False
