"""The store in memory: both sides of it, with the meaning of the Redis one and none of its durability. For tests.

Reads no clock of its own: `clock` says what time it is for leases and keys. Values are kept as they are; they are frozen.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import dataclass, field

from orchestrator.domain.access import Submitter
from orchestrator.domain.admission import Admission
from orchestrator.domain.attic import Retention, Retired, archived, ended_at
from orchestrator.domain.cluster import Node
from orchestrator.domain.cordon import Cordon
from orchestrator.domain.errors import Conflict, NotFound, StaleTerm, WentBack
from orchestrator.domain.events import Command, HistoryEntry, JobSubmitted, StepRecord
from orchestrator.domain.ids import JobId, Term
from orchestrator.domain.job import JobRecord
from orchestrator.domain.memo import MAX_REIGNS, Reign
from orchestrator.domain.quarantine import Quarantine
from orchestrator.domain.queue import Project, Waiting
from orchestrator.domain.revision import mark_of
from orchestrator.domain.spec import JobSpec
from orchestrator.domain.state import TERMINAL
from orchestrator.ports import Commit, Gap, Loaded, Page, Sort

from .redis_desk import KEY_TTL_S, Item, in_reading_order, job_of, outdated, submission
from .redis_lists import end_place, number_of, read_end_place
from .redis_store import HISTORY_CAP, MAX_RETIRED, STEPS_CAP, in_order, went_back

Entry = HistoryEntry | StepRecord


@dataclass(slots=True)
class _Stream:
    """One job's entries of one kind; trimmed is the id of the newest that was let go."""

    entries: deque[tuple[int, Entry]] = field(default_factory=deque)
    trimmed: int = 0


class MemoryStore:
    """A StateStore and a Desk over the same values."""

    def __init__(self, clock: Callable[[], float], *, history_cap: int = HISTORY_CAP, steps_cap: int = STEPS_CAP) -> None:
        self._clock = clock
        self._caps = {HistoryEntry: history_cap, StepRecord: steps_cap}
        self._term = Term(0)
        self._lease: tuple[str, float] | None = None
        self._jobs: dict[JobId, JobRecord] = {}
        self._taken_up: set[JobId] = set()
        self._bodies: dict[JobId, str] = {}
        self._marks: dict[JobId, str] = {}
        self._revisions: Counter[JobId] = Counter()
        self._asked: dict[JobId, str] = {}
        self._keys: dict[str, tuple[JobId, str, float]] = {}
        self._streams: dict[tuple[JobId, type], _Stream] = {}
        self._last: dict[JobId, int] = {}
        self._nodes: tuple[Node, ...] = ()
        self._quarantine: tuple[Quarantine, ...] = ()
        self._cordons: tuple[Cordon, ...] = ()
        self._admissions: tuple[Admission, ...] = ()
        self._projects: tuple[Project, ...] = ()
        self._queue: tuple[Waiting, ...] = ()
        self._commands: list[tuple[str, Command]] = []
        self._cursor = "0"
        self._commits = self._confirmed = 0
        self._reigns: list[Reign] = []
        self._news = asyncio.Event()

    async def close(self) -> None:
        """Nothing to let go of."""

    # --- StateStore -------------------------------------------------------------------------------------------------------

    async def acquire(self, holder: str, ttl_s: float, *, by: str = "", at: float = 0.0) -> Term | None:
        if self._holder() not in (None, holder):
            return None
        self._term = Term(self._term + 1)
        self._reigns = [*self._reigns, Reign(term=self._term, by=by or holder, commits=self._commits, at=at)][-MAX_REIGNS:]
        self._lease = (holder, self._clock() + ttl_s)
        return self._term

    async def renew(self, holder: str, term: Term, ttl_s: float) -> bool:
        if term != self._term or self._holder() not in (None, holder):
            return False
        self._lease = (holder, self._clock() + ttl_s)
        return True

    async def release(self, holder: str, term: Term) -> None:
        if term == self._term and self._holder() == holder:
            self._lease = None

    async def over(self, jobs: Collection[JobId]) -> frozenset[JobId]:
        taken_up = self._taken_up & self._jobs.keys()
        return frozenset(job for job in jobs if job in taken_up and isinstance(self._jobs[job].state, TERMINAL))

    async def overtake(self, holder: str, term: Term, above: Term, ttl_s: float) -> Term | None:
        if self._term > term or self._holder() not in (None, holder):
            return None
        self._lease = (holder, self._clock() + ttl_s)
        self._term = Term(max(term, above) + 1)
        return self._term

    async def load(self) -> Loaded:
        self._confirmed = self._commits
        jobs = {id: self._jobs[id] for id in self._jobs if id in self._open()}
        return Loaded(
            jobs=jobs,
            cursor=self._cursor,
            commits=self._commits,
            quarantine=self._quarantine,
            cordons=self._cordons,
            admissions=self._admissions,
            projects=self._projects,
            reigns=tuple(self._reigns),
        )

    async def commit(self, term: Term, commit: Commit) -> int:
        if term < self._term:
            raise StaleTerm(f"term {term} has been replaced by {self._term}; stop, another supervisor writes now")
        if term > self._term or (self._commits < self._confirmed and commit.reigns is None):
            raise WentBack(went_back(self._commits, self._confirmed))
        for id in commit.jobs:
            if id in self._taken_up and isinstance(self._jobs[id].state, TERMINAL):
                raise Conflict(f"job {id} is over and may not change; the commit was refused whole")
        self._jobs.update(commit.jobs)
        for id, record in commit.jobs.items():
            if self._marks.get(id) != (mark := mark_of(record)):
                self._marks[id] = mark
                self._revisions[id] += 1
        self._taken_up.update(commit.jobs)
        for entry in in_order(commit):
            self._append(entry)
        if commit.nodes is not None:
            self._nodes = commit.nodes
        if commit.quarantine is not None:
            self._quarantine = commit.quarantine
        if commit.cordons is not None:
            self._cordons = commit.cordons
        if commit.admissions is not None:
            self._admissions = commit.admissions
        if commit.projects is not None:
            self._projects = commit.projects
        if commit.queue is not None:
            self._queue = commit.queue
        if commit.cursor is not None:
            self._cursor = commit.cursor
        if commit.reigns is not None:
            self._reigns = list(commit.reigns[-MAX_REIGNS:])
            self._commits = max(self._commits, commit.reigns[-1].commits)
        self._commits = self._confirmed = self._commits + 1
        self._wake()
        return self._commits

    async def retire(self, term: Term, now: float, retention: Retention) -> Retired:
        if term != self._term:
            raise StaleTerm(f"term {term} has been replaced by {self._term}; stop, another supervisor writes now")
        over = sorted((at, job) for job, record in self._jobs.items() if (at := ended_at(record)) is not None)
        whole = [(at, job) for at, job in over if self._jobs[job].archived_at is None and job in self._taken_up]
        spare = len(whole) - retention.kept_jobs
        old = [job for n, (at, job) in enumerate(whole) if n < spare or at < now - retention.kept_s][:MAX_RETIRED]
        for job in old:
            self._jobs[job] = archived(self._jobs[job], now)
            for kind in self._caps:
                self._streams.pop((job, kind), None)
        gone = [job for at, job in over if at < now - retention.archived_s and self._jobs[job].archived_at is not None]
        for job in gone[:MAX_RETIRED]:
            del self._jobs[job], self._revisions[job]
            for kept in (self._marks, self._bodies, self._asked):
                kept.pop(job, None)
            self._taken_up.discard(job)
        return Retired(archived=tuple(old), forgotten=tuple(gone[:MAX_RETIRED]))

    async def commands(self, after: str, wait_s: float) -> Sequence[tuple[str, Command]]:
        def found() -> Sequence[tuple[str, Command]]:
            return [(id, command) for id, command in self._commands if int(id) > int(after)]

        if not found() and wait_s > 0:
            with contextlib.suppress(TimeoutError):
                # Not wait_for: in Python 3.11 it can swallow a cancellation that comes with the news.
                async with asyncio.timeout(wait_s):
                    await self._news.wait()
        return found()

    # --- Desk -------------------------------------------------------------------------------------------------------------

    async def submit(
        self, job: JobId, spec: JobSpec, at: float, key: str | None, body_hash: str, by: Submitter | None = None
    ) -> tuple[JobId, bool]:
        used = self._keys.get(key) if key else None
        if used and used[2] > self._clock():
            before, its_body = used[:2]
        elif job in self._jobs:
            before, its_body = job, self._bodies.get(job, "")
        else:
            record, command, entry = submission(job, spec, at, by)
            self._jobs[job] = record
            self._bodies[job] = body_hash
            if key:
                self._keys[key] = (job, body_hash, self._clock() + KEY_TTL_S)
            self._append(entry)
            await self.command(command)
            return job, True
        if its_body != body_hash:
            raise Conflict(f"the idempotency key was used for job {before} with another body; use a new key")
        return before, before == job

    async def command(self, command: Command, expected: int | None = None) -> str:
        job = job_of(command)
        if job is not None and expected is not None and self._revisions[job] != expected:
            raise outdated(command, expected, self._revisions[job])
        id = str(len(self._commands) + 1)
        if job is not None and job in self._jobs:
            self._revisions[job] += 1
            if not isinstance(command, JobSubmitted):
                self._asked[job] = id
        self._commands.append((id, command))
        self._wake()
        return id

    async def revision(self, job: JobId) -> int:
        is_asked = int(self._asked.get(job, "0")) > int(self._cursor)
        return self._revisions[job] - is_asked

    async def get(self, job: JobId) -> JobRecord:
        if job not in self._jobs:
            raise NotFound(f"there is no job {job}; list the jobs to see what there is")
        return self._jobs[job]

    async def list(self, limit: int, cursor: str | None, sort: Sort = Sort.NEWEST) -> Page:
        places: list[tuple[float, JobId]] = [(number, id) for number, id in enumerate(self._jobs, start=1)]
        last: tuple[float, JobId] | None = (
            (number_of(cursor), JobId("")) if cursor is not None and not sort.is_of_finished else None
        )
        if sort.is_of_finished:
            ends = ((ended_at(record), id) for id, record in self._jobs.items())
            places = [(at, id) for at, id in ends if at is not None]
            last = None if cursor is None else read_end_place(cursor)
        elif cursor is not None:
            last = (number_of(cursor) + (not sort.is_descending), JobId(""))
        places.sort(reverse=sort.is_descending)
        left = [one for one in places if last is None or (one < last if sort.is_descending else one > last)]
        more = None
        if len(left) > limit > 0:
            at, id = left[limit - 1]
            more = end_place(at, id) if sort.is_of_finished else str(int(at))
        return Page(jobs=tuple(self._jobs[id] for _, id in left[:limit]), next_cursor=more)

    async def count(self) -> int | None:
        return len(self._jobs)

    async def nodes(self) -> tuple[Node, ...]:
        return self._nodes

    async def quarantine(self) -> tuple[Quarantine, ...]:
        return self._quarantine

    async def cordons(self) -> tuple[Cordon, ...]:
        return self._cordons

    async def admissions(self) -> tuple[Admission, ...]:
        return self._admissions

    async def projects(self) -> tuple[Project, ...]:
        return self._projects

    async def queue(self) -> tuple[Waiting, ...]:
        return self._queue

    async def history(self, job: JobId, after: str, limit: int) -> Sequence[tuple[str, HistoryEntry | Gap]]:
        items = self._items(job, HistoryEntry, number_of(after), limit)
        return [(id, value) for id, value in items if not isinstance(value, StepRecord)]

    async def steps(self, job: JobId, after: str, limit: int) -> Sequence[tuple[str, StepRecord]]:
        items = self._items(job, StepRecord, number_of(after), limit)
        return [(id, value) for id, value in items if isinstance(value, StepRecord)]

    async def follow(self, job: JobId, after: str) -> AsyncIterator[Item]:
        reached = number_of(after)
        await self.get(job)
        while True:
            news = self._news
            items = [item for kind in self._caps for item in self._items(job, kind, reached, None)]
            items.sort(key=in_reading_order)
            for id, value in items:
                yield id, value
                reached = int(id)
            if not items:
                await news.wait()

    async def health(self) -> dict[str, str]:
        held = self._holder() is not None
        return {
            "redis": "ok",
            "durability": "the store is in memory: a restart loses every job; use Redis",
            "supervisor": "ok" if held else "no supervisor holds the lease; running jobs go on, nothing new is decided",
        }

    # ----------------------------------------------------------------------------------------------------------------------

    def _holder(self) -> str | None:
        return self._lease[0] if self._lease and self._lease[1] > self._clock() else None

    def _open(self) -> set[JobId]:
        return {id for id in self._taken_up if not isinstance(self._jobs[id].state, TERMINAL)}

    def _append(self, entry: Entry) -> None:
        number = self._last[entry.job] = self._last.get(entry.job, 0) + 1
        stream = self._streams.setdefault((entry.job, type(entry)), _Stream())
        stream.entries.append((number, entry))
        if len(stream.entries) > self._caps[type(entry)]:
            stream.trimmed = stream.entries.popleft()[0]

    def _items(self, job: JobId, kind: type, after: int, limit: int | None) -> Sequence[Item]:
        stream = self._streams.get((job, kind), _Stream())
        kept = [(number, entry) for number, entry in stream.entries if number > after][:limit]
        items: Sequence[Item] = [(str(number), entry) for number, entry in kept]
        if kept and stream.trimmed > after:
            first = kept[0][0]
            return [(str(first - 1), Gap(resumes_at=str(first))), *items]
        return items

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
