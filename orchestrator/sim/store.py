"""The store as supervisors see it: one atomic write, fenced by the term. What is loaded was encoded, as in the real one."""

from __future__ import annotations

from collections.abc import Collection

from orchestrator.domain import codec
from orchestrator.domain.admission import Admission
from orchestrator.domain.cordon import Cordon
from orchestrator.domain.errors import StaleTerm, WentBack
from orchestrator.domain.events import Command, JobSubmitted
from orchestrator.domain.ids import JobId, Term
from orchestrator.domain.job import JobRecord
from orchestrator.domain.memo import MAX_REIGNS, Reign
from orchestrator.domain.quarantine import Quarantine
from orchestrator.domain.queue import Project
from orchestrator.domain.state import TERMINAL
from orchestrator.ports import Commit

from .checkers import Checker, Copied
from .promises import Promises


class SimStore:
    def __init__(self, checker: Checker, promises: Promises) -> None:
        self.jobs: dict[JobId, JobRecord] = {}
        self.commands: list[Command | None] = []
        """None: one that was lost with the store before anybody had read it."""
        self.cursor = 0
        self.quarantine: tuple[Quarantine, ...] = ()
        self.cordons: tuple[Cordon, ...] = ()
        self.admissions: tuple[Admission, ...] = ()
        self.projects: tuple[Project, ...] = ()
        self.term = Term(0)
        self.commits = 0
        self.reigns: tuple[Reign, ...] = ()
        """Supervisors, the newest last."""
        self.is_behind = False
        """It has gone back, and nobody has written again what it has forgotten."""
        self.open = 0
        """Jobs that have not ended."""
        self._supervisors = 0
        self._last: Commit | None = None
        self._checker = checker
        self._promises = promises

    def acquire(self, at: float) -> tuple[Reign, ...]:
        """Reigns, the new one last."""
        self.term = Term(self.term + 1)
        self.reigns = (*self.reigns, self.reign(self.commits, at))[-MAX_REIGNS:]
        return self.reigns

    def overtake(self, term: Term, above: Term) -> bool:
        """Whether whoever has this term has a higher one now; not where another has."""
        if self.term > term:
            return False
        self.term = Term(max(term, above) + 1)
        return True

    def reign(self, commits: int, at: float) -> Reign:
        """One that begins now."""
        self._supervisors += 1
        return Reign(term=self.term, by=f"supervisor{self._supervisors}", commits=commits, at=at)

    def copied(self) -> Copied:
        return Copied(
            jobs=dict(self.jobs),
            num_commands=len(self.commands),
            cursor=self.cursor,
            term=self.term,
            commits=self.commits,
            last=self._last,
            quarantine=self.quarantine,
            cordons=self.cordons,
            admissions=self.admissions,
            projects=self.projects,
            rolled_back=dict(self._checker.rolled_back),
            reigns=self.reigns,
        )

    def over(self, jobs: Collection[JobId]) -> frozenset[JobId]:
        """Of these, the jobs that have ended here."""
        return frozenset(job for job in jobs if job in self.jobs and isinstance(self.jobs[job].state, TERMINAL))

    def restore(self, copied: Copied) -> tuple[JobSubmitted, ...]:
        """It is what it was; submissions that are lost."""
        self.jobs, self.cursor, self.term, self.commits = dict(copied.jobs), copied.cursor, copied.term, copied.commits
        self.quarantine, self.cordons, self.reigns = copied.quarantine, copied.cordons, copied.reigns
        self.admissions, self.projects = copied.admissions, copied.projects
        since = self.commands[copied.num_commands :]
        self.commands[copied.num_commands :] = [None] * len(since)
        self.open = sum(not isinstance(record.state, TERMINAL) for record in self.jobs.values())
        self._last = copied.last
        self.is_behind = True
        self._checker.went_back(copied)
        self._promises.went_back(copied.term)
        return tuple(one for one in since if isinstance(one, JobSubmitted))

    def load(self) -> tuple[dict[JobId, JobRecord], int]:
        live = {job: record for job, record in self.jobs.items() if not isinstance(record.state, TERMINAL)}
        return {job: codec.loads(JobRecord, codec.dumps(record)) for job, record in live.items()}, self.cursor

    def commit(self, term: Term, commit: Commit, confirmed: int) -> bool:
        """Whether it was written now: what is repeated because its answer was lost is there already.

        confirmed: commits of which the supervisor knows. Raises StaleTerm, WentBack.
        """
        if term < self.term:
            raise StaleTerm(f"term {term} has been replaced by {self.term}")
        if term > self.term or (self.commits < confirmed and commit.reigns is None):
            raise WentBack(f"the store knows of {self.commits} commits and had confirmed {confirmed}")
        if commit is self._last:
            return False
        self._last = commit
        if commit.reigns is not None:
            self.reigns = commit.reigns[-MAX_REIGNS:]
            self.commits = max(self.commits, commit.reigns[-1].commits)
        self.commits += 1
        self.is_behind = False
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
