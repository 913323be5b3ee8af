"""What the kernel has taken in since the last commit: it goes to the store as one write, with the news it came from.

Knows when that is due at the latest; whether it must be sooner (because something is to be done) is the loop's to say.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Protocol

from orchestrator.domain.admission import Admission
from orchestrator.domain.cluster import Node
from orchestrator.domain.cordon import Cordon
from orchestrator.domain.events import HistoryEntry, Input, StepRecord
from orchestrator.domain.ids import JobId
from orchestrator.domain.job import JobRecord
from orchestrator.domain.quarantine import Quarantine
from orchestrator.domain.queue import Project, Waiting
from orchestrator.ports import Commit

from .kernel import Stepped

LAZY_S = 0.1
"""How long what leads to nothing may wait for company before it is committed."""


class Line(Protocol):
    def acknowledge(self, number: int) -> None:
        """Events up to this number are recorded and will not be asked for again."""
        ...


@dataclass(slots=True)
class News:
    """An input, and who is to be told once it is recorded: a host's line by number, or the command stream by cursor."""

    one: Input
    line: Line | None = None
    number: int = 0
    cursor: str | None = None


@dataclass(slots=True)
class Unsaved:
    due: float = inf
    """On the monotonic clock."""
    news: list[News] = field(default_factory=list)
    _jobs: dict[JobId, JobRecord] = field(default_factory=dict)
    _history: list[HistoryEntry] = field(default_factory=list)
    _steps: list[StepRecord] = field(default_factory=list)
    _nodes: tuple[Node, ...] | None = None
    _quarantine: tuple[Quarantine, ...] | None = None
    _cordons: tuple[Cordon, ...] | None = None
    _admissions: tuple[Admission, ...] | None = None
    _projects: tuple[Project, ...] | None = None
    _queue: tuple[Waiting, ...] | None = None

    def add(self, stepped: Stepped, news: list[News], now: float) -> None:
        self.news += news
        self._jobs.update(stepped.changed)
        self._history += stepped.history
        self._steps += stepped.steps
        if stepped.nodes_changed:
            self._nodes = stepped.state.nodes
        if stepped.quarantine_changed:
            self._quarantine = tuple(stepped.state.quarantine.values())
        if stepped.cordons_changed:
            self._cordons = tuple(stepped.state.cordons.values())
        if stepped.admissions_changed:
            self._admissions = tuple(stepped.state.admissions.values())
        if stepped.projects_changed:
            self._projects = tuple(stepped.state.projects.values())
        if stepped.queue_changed:
            self._queue = stepped.state.queue
        if self.due == inf and (self.news or not self.commit().is_empty):
            self.due = now + LAZY_S

    def acknowledge(self) -> None:
        """It is recorded."""
        for one in self.news:
            if one.line:
                one.line.acknowledge(one.number)

    def commit(self) -> Commit:
        return Commit(
            jobs=dict(self._jobs),
            history=tuple(self._history),
            steps=tuple(self._steps),
            nodes=self._nodes,
            quarantine=self._quarantine,
            cordons=self._cordons,
            admissions=self._admissions,
            projects=self._projects,
            queue=self._queue,
            cursor=next((one.cursor for one in reversed(self.news) if one.cursor), None),
        )
