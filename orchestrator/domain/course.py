"""Which steps of a generation are saved, and as what: every rank decides alike, because all decide from what all know.

    base ──> entry ──> entry ──> ...        at most LONGEST_JOURNAL of them, each of the step after the one before
     ^          `- not saved, or somebody asks: the next is a base
     `- the first of a generation, every so many steps, the last of a job

It refuses to know who copies and who writes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .checkpoint import LONGEST_JOURNAL, CheckpointKind, Pacing
from .ids import Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """One generation's. last: step of the job. tip: the step that was saved last, depth: entries from its base to it; None
    where nothing goes on from it."""

    pacing: Pacing
    last: Step
    tip: Step | None = None
    depth: int = 0

    def due(self, step: Step, is_asked: bool = False) -> CheckpointKind | None:
        """What is saved of `step`, which has just been made; None: nothing."""
        if not is_asked and not self.pacing.is_due(step, self.last):
            return None
        every = self.pacing.every
        is_base = is_asked or not self.pacing.is_journal or step == self.last or step % every == 0
        goes_on = self.tip is not None and self.tip == step - 1 and self.depth < LONGEST_JOURNAL
        return "base" if is_base or not goes_on else "journal"

    def saved(self, step: Step, kind: CheckpointKind) -> Course:
        return replace(self, tip=step, depth=0 if kind == "base" else self.depth + 1)

    def skipped(self) -> Course:
        return replace(self, tip=None)
