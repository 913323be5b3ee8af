"""Where a rank is in its step, as told to whoever watches: the shared-memory page in a real rank, nobody in a test."""

from __future__ import annotations

from enum import IntEnum
from typing import Protocol

from orchestrator.domain.generation import Answer, Disagrees
from orchestrator.domain.ids import Generation, Step


class Phase(IntEnum):
    IDLE = 0
    FORM = 1
    RESTORE = 2
    COMPUTE = 3
    REDUCE = 4
    VOTE = 5
    UPDATE = 6
    GATHER = 7
    SAVE = 8


class Progress(Protocol):
    def phase(self, phase: Phase, generation: Generation, step: Step) -> None: ...

    def micro_batch(self, number: int) -> None: ...

    def enter(self, group: str) -> None:
        """A collective or transfer on `group` begins to wait."""
        ...

    def leave(self) -> None: ...

    def voted(self, step: Step) -> None:
        """Called before the vote's first message leaves."""
        ...

    def passed(self, answer: Answer) -> None:
        """Called as soon as the vote is known to have passed, before anything is updated."""
        ...

    def disagrees(self, finding: Disagrees) -> None:
        """Called before this rank leaves because of it: the evidence must outlive it."""
        ...


class Relay:
    """Passes on what it is told until it is muted: a thread that was replaced must not be heard any more."""

    def __init__(self, to: Progress) -> None:
        self._to = to

    def mute(self) -> None:
        self._to = Unwatched()

    def phase(self, phase: Phase, generation: Generation, step: Step) -> None:
        self._to.phase(phase, generation, step)

    def micro_batch(self, number: int) -> None:
        self._to.micro_batch(number)

    def enter(self, group: str) -> None:
        self._to.enter(group)

    def leave(self) -> None:
        self._to.leave()

    def voted(self, step: Step) -> None:
        self._to.voted(step)

    def passed(self, answer: Answer) -> None:
        self._to.passed(answer)

    def disagrees(self, finding: Disagrees) -> None:
        self._to.disagrees(finding)


class Unwatched:
    """Tells nobody."""

    def phase(self, phase: Phase, generation: Generation, step: Step) -> None: ...

    def micro_batch(self, number: int) -> None: ...

    def enter(self, group: str) -> None: ...

    def leave(self) -> None: ...

    def voted(self, step: Step) -> None: ...

    def passed(self, answer: Answer) -> None: ...

    def disagrees(self, finding: Disagrees) -> None: ...
