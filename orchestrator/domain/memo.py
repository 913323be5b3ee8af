"""What hosts keep of their job for a store that forgets: its record as it was committed, and by whom.

A host is told a record before it is asked anything that follows from it. So the newest memo of a job's hosts is one after
which none of them was asked for anything.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from . import codec
from .ids import Generation, JobId, NodeId, Term
from .job import JobRecord

MAX_REIGNS = 20
"""Supervisors that a store remembers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reign:
    """A supervisor's time: by is its name alone, commits what the store had had when it began. at: wall clock."""

    term: Term
    by: str
    commits: int
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Memo:
    """A job as it was recorded. reigns: those that led to it, the one it was made in last; commits: its number."""

    reigns: tuple[Reign, ...]
    commits: int
    record: JobRecord

    @property
    def mark(self) -> tuple[float, int, str]:
        """Names it, and orders memos by when they were made: terms may have been given twice by a store that forgot."""
        return self.reigns[-1].at, self.commits, self.reigns[-1].by


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What one host says to a supervisor that begins.

    term: the highest it has heard; heard: the highest generation; at_work: the one its ranks are to train, 0 for none.
    """

    job: JobId
    node: NodeId
    term: Term
    heard: Generation = Generation(0)
    at_work: Generation = Generation(0)
    memo: Memo | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Remembered:
    """The same, as a host has it: what it keeps it need not understand. memo: encoded, "" for none."""

    term: Term
    heard: Generation = Generation(0)
    at_work: Generation = Generation(0)
    memo: str = ""

    def of(self, job: JobId, node: NodeId) -> Kept:
        """What another version wrote and nobody here can read is as good as nothing."""
        memo = None
        if self.memo:
            with suppress(codec.Undecodable):
                memo = codec.loads(Memo, self.memo.encode())
        return Kept(job=job, node=node, term=self.term, heard=self.heard, at_work=self.at_work, memo=memo)


def is_forgotten(memo: Memo, reigns: Iterable[Reign]) -> bool:
    """Whether the memo's commit is none of those that led to the last of these reigns, or of that one."""
    reign, by = memo.reigns[-1], {one.by: one for one in reigns}
    if reign.by not in by:
        return True
    return any(one.at > reign.at and one.commits < memo.commits for one in by.values())
