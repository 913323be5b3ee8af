"""What a simulated host has to tell: numbered, kept until it is recorded, with passed steps gathered for a moment."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from orchestrator.domain.generation import Answer
from orchestrator.domain.host_events import Envelope, HostEvent, StepsPassed
from orchestrator.domain.ids import Device, Generation, Step


class SimOutbox:
    """wake: called whenever there is something new."""

    def __init__(self) -> None:
        self.wake: Callable[[], None] = lambda: None
        self._events: deque[Envelope] = deque()
        self._last_number = 0
        self._passed: dict[Generation, list[tuple[Answer, float]]] = {}
        self._seen: dict[Generation, Step] = {}
        self._paces: dict[tuple[Generation, Device], float] = {}

    @property
    def has_steps(self) -> bool:
        """Some have passed that are not told yet."""
        return bool(self._passed)

    def say(self, event: HostEvent) -> None:
        """After the steps that passed before it."""
        self.flush()
        self._append(event)

    def is_new(self, generation: Generation, answer: Answer) -> bool:
        """Several ranks see the same step pass."""
        if answer.step <= self._seen.get(generation, 0):
            return False
        self._seen[generation] = answer.step
        return True

    def add_passed(self, generation: Generation, answer: Answer, at: float) -> None:
        self._passed.setdefault(generation, []).append((answer, at))

    def note_pace(self, generation: Generation, device: Device, pace_s: float) -> None:
        self._paces[generation, device] = pace_s

    def flush(self) -> None:
        passed, self._passed = self._passed, {}
        paces, self._paces = (self._paces, {}) if passed else ({}, self._paces)
        for generation, answers in passed.items():
            self._append(
                StepsPassed(
                    generation=generation,
                    answers=tuple(answer for answer, _ in answers),
                    at=tuple(at for _, at in answers),
                    paces={device: pace_s for (of, device), pace_s in paces.items() if of == generation},
                )
            )

    def fetch(self, after: int, acked: int) -> tuple[Envelope, ...]:
        """Those numbered above `after`; those up to `acked` are forgotten."""
        while self._events and self._events[0].number <= acked:
            self._events.popleft()
        return tuple(envelope for envelope in self._events if envelope.number > after)

    def _append(self, event: HostEvent) -> None:
        self._last_number += 1
        self._events.append(Envelope(number=self._last_number, event=event))
        self.wake()
