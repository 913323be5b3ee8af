"""The store as supervisors see it: one atomic write, fenced by the term. Records are kept encoded, as the real one does."""

from __future__ import annotations

from orchestrator.domain import codec
from orchestrator.domain.cordon import Cordon
from orchestrator.domain.errors import Conflict, StaleTerm
from orchestrator.domain.events import Command
from orchestrator.domain.ids import JobId, Term
from orchestrator.domain.job import TERMINAL, JobRecord
from orchestrator.domain.quarantine import Quarantine
from orchestrator.domain.queue import Project
from orchestrator.ports import Commit

from .checkers import Checker


class SimStore:
    def __init__(self, checker: Checker) -> None:
        self.jobs: dict[JobId, JobRecord] = {}
        self.commands: list[Command] = []
        self.cursor = 0
        self.quarantine: tuple[Quarantine, ...] = ()
        self.cordons: tuple[Cordon, ...] = ()
        self.projects: tuple[Project, ...] = ()
        self.term = Term(0)
        self._checker = checker
        self._encoded: dict[JobId, bytes] = {}

    def acquire(self) -> Term:
        self.term = Term(self.term + 1)
        return self.term

    def load(self) -> tuple[dict[JobId, JobRecord], int]:
        jobs = {job: codec.loads(JobRecord, data) for job, data in self._encoded.items()}
        return {job: record for job, record in jobs.items() if not isinstance(record.state, TERMINAL)}, self.cursor

    def commit(self, term: Term, commit: Commit) -> None:
        """Raises StaleTerm, Conflict."""
        if term != self.term:
            raise StaleTerm(f"term {term} has been replaced by {self.term}")
        for job in commit.jobs:
            if job in self.jobs and isinstance(self.jobs[job].state, TERMINAL):
                raise Conflict(f"{job} is over")
        if commit.quarantine is not None:
            self.quarantine = codec.decode(tuple[Quarantine, ...], codec.encode(commit.quarantine))
        if commit.cordons is not None:
            self.cordons = codec.decode(tuple[Cordon, ...], codec.encode(commit.cordons))
        if commit.projects is not None:
            self.projects = codec.decode(tuple[Project, ...], codec.encode(commit.projects))
        self._checker.committed(self.jobs, commit)
        for job, record in commit.jobs.items():
            self.jobs[job] = record
            self._encoded[job] = codec.dumps(record)
        if commit.cursor is not None:
            self.cursor = int(commit.cursor)
