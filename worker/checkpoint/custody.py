"""What a host holds of a rank's tray: its memory, from before the rank is forked until nothing in it is left to write.

A rank's death changes nothing about what is full. It owns the descriptors and which slots have been found; it refuses to
know ranks, files and who writes.
"""

from __future__ import annotations

import os

from orchestrator.domain.ids import Device

from .slot import SLOTS, Slot, SlotState, create_slot


class Custody:
    """device: whose state it is."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.fds: tuple[int, ...] = tuple(create_slot() for _ in range(SLOTS))
        """To fork the rank with and to write from; they stay this one's."""
        self._slots = tuple(Slot(fd) for fd in self.fds)
        self._found: set[int] = set()
        self._is_left = False
        self._is_closed = False

    def find(self) -> list[int]:
        """Slots that have become full since the last time, oldest first; each is found once, until it is settled."""
        if self._is_closed:
            return []
        full = [n for n, slot in enumerate(self._slots) if slot.state is SlotState.FULL and n not in self._found]
        self._found.update(full)
        return sorted(full, key=lambda number: (self._slots[number].generation, self._slots[number].step))

    def slot(self, number: int) -> Slot:
        return self._slots[number]

    def settle(self, number: int, why: str = "") -> None:
        """It has been written, or cannot be and that is why: the rank may fill it again."""
        self._slots[number].free(why)
        self._found.discard(number)
        self._close_if_over()

    def leave(self) -> None:
        """Its rank is gone: what is found is kept until it is settled. What is not full is torn and nobody's."""
        self._is_left = True
        self._close_if_over()

    def _close_if_over(self) -> None:
        if not self._is_left or self._found or self._is_closed:
            return
        self._is_closed = True
        for slot in self._slots:
            slot.close()
        for fd in self.fds:
            os.close(fd)
