"""Which steps of a simulated generation are saved, and as what: by the same course that real ranks follow.

It refuses to know when a step has passed and how what is saved gets to a disk.
"""

from __future__ import annotations

from dataclasses import replace

from orchestrator.domain.checkpoint import CheckpointKind, Pacing
from orchestrator.domain.course import Course
from orchestrator.domain.ids import Step
from orchestrator.domain.origin import FromMemory
from orchestrator.domain.requests import FormGeneration
from orchestrator.domain.spec import JobSpec

from .place import Place

NO_ROOM = 0.02
"""How often a rank has no room for a snapshot that is due."""


class Saving:
    def __init__(self, place: Place, spec: JobSpec, form: FormGeneration) -> None:
        self._place = place
        self._is_from_memory = isinstance(form.restore, FromMemory)
        self._course = Course(pacing=form.pacing or Pacing.asked_for(spec.checkpoint), last=Step(spec.train.steps))
        self._saved_as: dict[Step, CheckpointKind | None] = {}
        """What is saved of a step, once it has passed; None where that was due and a rank had no room."""
        self.asked_for: set[Step] = set()
        """Steps that a rank was asked to have saved."""

    def take_pacing(self, pacing: Pacing) -> None:
        self._course = replace(self._course, pacing=pacing)

    def catch_up(self, step: Step) -> None:
        """The generation before may not have lived to write all of the step that this one begins with."""
        course = self._course
        is_next_a_base = course.pacing.is_journal and step < course.last
        if self._is_from_memory and not is_next_a_base and course.due(step) is not None:
            self._saved_as[step] = "base"

    def decide(self, step: Step) -> None:
        """Once, for all: what is saved of a step that has passed, or that a rank has no room for it."""
        kind = self._course.due(step, step in self.asked_for)
        if kind is None:
            return
        if step != self._course.last and self._place.rng.random() < NO_ROOM:
            self._saved_as[step], self._course = None, self._course.skipped()
        else:
            self._saved_as[step], self._course = kind, self._course.saved(step, kind)

    def kind_of(self, step: Step) -> CheckpointKind | None:
        return self._saved_as.get(step)

    def saves(self, step: Step) -> bool:
        return self._saved_as.get(step) is not None

    def is_base(self, step: Step) -> bool:
        return self._saved_as.get(step) == "base"

    def is_skipped(self, step: Step) -> bool:
        return step in self._saved_as and self._saved_as[step] is None
