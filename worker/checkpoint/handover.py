"""What a training loop asks of whoever takes its snapshots; and the one that takes none.

It refuses to know where snapshots go: a rank hands them to its host through a tray.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from orchestrator.domain.errors import EverstepError
from orchestrator.domain.generation import Answer
from orchestrator.domain.ids import Generation, Step

from ..state.holdings import Holdings


class NotSaved(EverstepError):
    """The final checkpoint cannot be written."""


class Snapshots(Protocol):
    """Used by the training thread, between two steps."""

    def lay_out(self, held: Holdings) -> None:
        """Be ready for snapshots of this share of the state, outside of any step."""
        ...

    def is_ready(self, held: Holdings, every: int) -> bool:
        """Whether a snapshot could be taken now without waiting; once true it stays true until one is taken.

        every: steps from one to the next, as things are.
        """
        ...

    def take(self, held: Holdings, generation: Generation, answer: Answer | None, *, is_entry: bool = False) -> None:
        """Copy what is owned right after `held.step`, which `answer` committed. Only when it is ready.

        is_entry: not the state, but the gradient that led to it.
        """
        ...

    def copied(self, *, entry: bool = False) -> None:
        """Returns when the snapshot taken last needs `held` no more: before the state changes, or is dropped.

        entry: only if it is of a gradient, which is about to change.
        """
        ...

    def skip(self, step: Step, generation: Generation, why: str) -> None:
        """Say that there is no snapshot of this step."""
        ...

    def take_last(self, held: Holdings, generation: Generation, answer: Answer | None, moved: Callable[[], None]) -> None:
        """The snapshot after which no other follows: returns when it has been written.

        moved: called now and then while whoever writes gets on with it. Raises NotSaved, and Aborted when the generation
        is closed first.
        """
        ...


class NoSnapshots:
    """For whoever trains without checkpoints."""

    def lay_out(self, held: Holdings) -> None:
        return

    def is_ready(self, held: Holdings, every: int) -> bool:
        return False

    def take(self, held: Holdings, generation: Generation, answer: Answer | None, *, is_entry: bool = False) -> None:
        raise AssertionError("nobody takes snapshots here; set checkpoint.every to 0")

    def copied(self, *, entry: bool = False) -> None:
        return

    def skip(self, step: Step, generation: Generation, why: str) -> None:
        return

    def take_last(self, held: Holdings, generation: Generation, answer: Answer | None, moved: Callable[[], None]) -> None:
        self.take(held, generation, answer)
