"""The store as supervisors see it: one atomic write, fenced by the term. What is loaded was encoded, as in the real one."""

from __future__ import annotations

from orchestrator.domain import codec
from orchestrator.domain.admission import Admission
from orchestrator.domain.cordon import Cordon
from orchestrator.domain.errors import StaleTerm
from orchestrator.domain.events import Command
from orchestrator.domain.ids import JobId, Term
from orchestrator.domain.job import JobRecord
from orchestrator.domain.quarantine import Quarantine
from orchestrator.domain.queue import Project
from orchestrator.domain.state import TERMINAL
from orchestrator.ports import Commit

from .checkers import Checker
from .promises import Promises


class SimStore:
    def __init__(self, checker: Checker, promises: Promises) -> None:
        self.jobs: dict[JobId, JobRecord] = {}
        self.commands: list[Command] = []
        self.cursor = 0
        self.quarantine: tuple[Quarantine, ...] = ()
        self.cordons: tuple[Cordon, ...] = ()
        self.admissions: tuple[Admission, ...] = ()
        self.projects: tuple[Project, ...] = ()
        self.term = Term(0)
        self.open = 0
        """Jobs that have not ended."""
        self._last: Commit | None = None
        self._checker = checker
        self._promises = promises

    def acquire(self) -> Term:
        self.term = Term(self.term + 1)
        return self.term

    def load(self) -> tuple[dict[JobId, JobRecord], int]:
        live = {job: record for job, record in self.jobs.items() if not isinstance(record.state, TERMINAL)}
        return {job: codec.loads(JobRecord, codec.dumps(record)) for job, record in live.items()}, self.cursor

    def commit(self, term: Term, commit: Commit) -> bool:
        """Whether it was written now: what is repeated because its answer was lost is there already. Raises StaleTerm."""
        if term != self.term:
            raise StaleTerm(f"term {term} has been replaced by {self.term}")
        if commit is self._last:
            return False
        self._last = commit
        self._promises.committed(term, self.jobs, commit)
        if commit.quarantine is not None:
            self.quarantine = codec.decode(tuple[Quarantine, ...], codec.encode(commit.quarantine))
        if commit.cordons is not None:
            self.cordons = codec.decode(tuple[Cordon, ...], codec.encode(commit.cordons))
        if commit.admissions is not None:
            self.admissions = codec.decode(tuple[Admission, ...], codec.encode(commit.admissions))
        if commit.projects is not None:
            self.projects = codec.decode(tuple[Project, ...], codec.encode(commit.projects))
        self._checker.committed(self.jobs, commit)
        for job, record in commit.jobs.items():
            self.jobs[job] = record
        self.open = sum(not isinstance(record.state, TERMINAL) for record in self.jobs.values())
        if commit.cursor is not None:
            self.cursor = int(commit.cursor)
        return True
