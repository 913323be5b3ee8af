"""Where a rank is in its step, as told to whoever watches: the shared-memory page in a real rank, nobody in a test."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from orchestrator.domain.copying import Copied
from orchestrator.domain.generation import Answer, Disagrees
from orchestrator.domain.ids import Generation, Rank, Step
from orchestrator.domain.sight import Phase as Phase


class Exchanged(NamedTuple):
    """One side of a connection: whole messages sent and received, and what of it is waited for."""

    peer: Rank
    sent: int
    received: int
    awaits: bool
    unsent: bool


class Progress(Protocol):
    def phase(self, phase: Phase, generation: Generation, step: Step) -> None: ...

    def micro_batch(self, number: int) -> None: ...

    def enter(self, group: str) -> None:
        """A collective or transfer on `group` begins to wait."""
        ...

    def leave(self) -> None: ...

    def behind(self, is_behind: bool) -> None:
        """This rank waits for its own device, which has yet to come to what it was given last; or no longer does."""
        ...

    def quiet(self, since_s: float, exchanged: Iterable[Exchanged]) -> None:
        """A wait lasts, and nothing has moved in it for since_s: what has passed over each connection, what is awaited."""
        ...

    def copying(self, what: Copied, done: int, total: int) -> None:
        """State comes into this rank's memory, bytes so far and of all; 0 and 0 when all is there. Any thread."""
        ...

    def voted(self, step: Step) -> None:
        """Called before the vote's first message leaves."""
        ...

    def computed(self, seconds: float) -> None:
        """Called before `passed`: how long this rank has computed for a micro-batch; 0.0 where that says nothing."""
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

    def behind(self, is_behind: bool) -> None:
        self._to.behind(is_behind)

    def quiet(self, since_s: float, exchanged: Iterable[Exchanged]) -> None:
        self._to.quiet(since_s, exchanged)

    def copying(self, what: Copied, done: int, total: int) -> None:
        self._to.copying(what, done, total)

    def voted(self, step: Step) -> None:
        self._to.voted(step)

    def computed(self, seconds: float) -> None:
        self._to.computed(seconds)

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

    def behind(self, is_behind: bool) -> None: ...

    def quiet(self, since_s: float, exchanged: Iterable[Exchanged]) -> None: ...

    def copying(self, what: Copied, done: int, total: int) -> None: ...

    def voted(self, step: Step) -> None: ...

    def computed(self, seconds: float) -> None: ...

    def passed(self, answer: Answer) -> None: ...

    def disagrees(self, finding: Disagrees) -> None: ...
