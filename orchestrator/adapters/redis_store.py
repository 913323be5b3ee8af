"""The supervisor's side of the store on Redis: the lease, and commits that happen exactly once and whole.

Values cross as JSON of the domain's codec. It knows nothing of what a record means beyond whether its state is terminal.
"""

from __future__ import annotations

import asyncio
import hashlib
import heapq
import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, cast

from orchestrator.domain import codec
from orchestrator.domain.admission import Admission
from orchestrator.domain.attic import Retention, Retired, archived, ended_at
from orchestrator.domain.cordon import Cordon
from orchestrator.domain.errors import Conflict, StaleTerm, Unavailable, WentBack
from orchestrator.domain.events import Command, HistoryEntry, StepRecord
from orchestrator.domain.ids import JobId, Term
from orchestrator.domain.job import JobRecord
from orchestrator.domain.memo import MAX_REIGNS, Reign
from orchestrator.domain.quarantine import Quarantine
from orchestrator.domain.queue import Project, Waiting
from orchestrator.domain.revision import mark_of
from orchestrator.ports import Commit, Loaded

from . import redis_keys as keys
from . import redis_scripts as scripts
from .redis_clients import BLOCK_S, Argument, RedisAddress, RedisClients, status, text, unavailable

HISTORY_CAP = 10_000
STEPS_CAP = 100_000
"""Entries kept per job, about: Redis drops whole nodes of a stream, never fewer than these."""
MAX_COMMANDS_READ = 100
MAX_RETIRED = 100
"""Jobs that are archived, and forgotten, at a time."""


class RedisStore:
    def __init__(
        self, address: RedisAddress, *, timeout_s: float = 2.0, history_cap: int = HISTORY_CAP, steps_cap: int = STEPS_CAP
    ) -> None:
        self._clients = RedisClients(address, timeout_s)
        self._caps = {keys.HISTORY: history_cap, keys.STEPS: steps_cap}
        self._lock = asyncio.Lock()
        self._term = Term(0)
        self._sequence = 0
        self._attempted = b""
        """Digest of a commit whose outcome is not known."""
        self._confirmed = 0
        """Commits that the store was known to have had."""

    async def close(self) -> None:
        await self._clients.close()

    # --- lease ------------------------------------------------------------------------------------------------------------

    async def acquire(self, holder: str, ttl_s: float, *, by: str = "", at: float = 0.0) -> Term | None:
        ttl_ms = int(ttl_s * 1000)
        term = await self._clients.write(scripts.ACQUIRE, holder, ttl_ms, by or holder, repr(at), MAX_REIGNS)
        return Term(term) if term else None

    async def renew(self, holder: str, term: Term, ttl_s: float) -> bool:
        return bool(await self._clients.write(scripts.RENEW, holder, term, int(ttl_s * 1000)))

    async def release(self, holder: str, term: Term) -> None:
        await self._clients.write(scripts.RELEASE, holder, term)

    async def over(self, jobs: Collection[JobId]) -> frozenset[JobId]:
        asked = tuple(jobs)
        found = await self._clients.run(self._clients.reads, scripts.OVER, *asked) if asked else ()
        return frozenset(job for job, is_over in zip(asked, found, strict=True) if is_over)

    async def overtake(self, holder: str, term: Term, above: Term, ttl_s: float) -> Term | None:
        async with self._lock:
            found = await self._clients.write(scripts.OVERTAKE, holder, term, above, int(ttl_s * 1000))
        return Term(found) if found else None

    # --- state ------------------------------------------------------------------------------------------------------------

    async def load(self) -> Loaded:
        """Jobs that a supervisor has taken up and that are not over; one nobody has yet comes by its command.

        After a commit that ended Unavailable, take a new term first: that fences the old write if it is still on its way.
        """
        cursor, commits, records, reigns, *kept = await self._clients.run(self._clients.reads, scripts.LOAD)
        quarantine, cordons, projects, admissions = kept
        jobs = [_record(data) for data in records if data]
        jobs.sort(key=lambda record: (record.created_at, record.id))
        self._confirmed = int(commits)
        return Loaded(
            jobs={record.id: record for record in jobs},
            cursor=text(cursor),
            commits=self._confirmed,
            quarantine=decode_quarantine(quarantine),
            cordons=decode_cordons(cordons),
            admissions=decode_admissions(admissions),
            projects=decode_projects(projects),
            reigns=tuple(_read_reign(text(one)) for one in reigns),
        )

    async def commit(self, term: Term, commit: Commit) -> int:
        arguments = list(self._arguments(commit))
        async with self._lock:
            sequence = self._sequence_of(term, arguments)
            answer = await self._clients.write(scripts.COMMIT, term, sequence, self._confirmed, *arguments)
            self._attempted = b""
            outcome, detail = status(answer)
            if outcome == "OK":
                self._confirmed = int(detail)
                return self._confirmed
        if outcome == "STALE":
            raise StaleTerm(f"term {term} has been replaced by {detail}; stop, another supervisor writes now")
        if outcome == "BEHIND":
            raise WentBack(went_back(detail, self._confirmed))
        raise Conflict(f"job {detail} is over and may not change; the commit was refused whole")

    async def retire(self, term: Term, now: float, retention: Retention) -> Retired:
        asked = (repr(now - retention.kept_s), retention.kept_jobs, repr(now - retention.archived_s), MAX_RETIRED)
        old, records, gone = await self._clients.run(self._clients.reads, scripts.OLD, *asked)
        short = [archived(_record(data), now) for data in records]
        if not short and not gone:
            return Retired()
        whole = [argument for record in short for argument in (record.id, codec.dumps(record))]
        answer = await self._clients.write(scripts.RETIRE, term, len(short), *whole, len(gone), *gone)
        outcome, detail = status(answer)
        if outcome == "STALE":
            raise StaleTerm(f"term {term} has been replaced by {detail}; stop, another supervisor writes now")
        return Retired(archived=tuple(JobId(text(id)) for id in old), forgotten=tuple(JobId(text(id)) for id in gone))

    async def commands(self, after: str, wait_s: float) -> Sequence[tuple[str, Command]]:
        with unavailable(self._clients.address):
            client, block_ms = self._clients.reads, None
            if wait_s > 0:
                client, block_ms = self._clients.waits, max(1, int(min(wait_s, BLOCK_S) * 1000))
            found: Any = await client.xread({keys.COMMANDS: after}, count=MAX_COMMANDS_READ, block=block_ms)
        return [(text(id), _command(fields[keys.ENTRY.encode()])) for _, entries in found for id, fields in entries]

    # --- exactly once -----------------------------------------------------------------------------------------------------

    def _sequence_of(self, term: Term, arguments: Sequence[Argument]) -> int:
        """The same number for the same commit until its outcome is known, else the next one of this term."""
        digest = hashlib.sha256(b"\0".join(_bytes(argument) for argument in arguments)).digest()
        if term != self._term:
            self._term, self._sequence, self._attempted = term, 0, b""
        if digest != self._attempted:
            self._sequence += 1
            self._attempted = digest
        return self._sequence

    def _arguments(self, commit: Commit) -> Iterator[Argument]:
        yield b"" if commit.nodes is None else codec.dumps(commit.nodes)
        yield commit.cursor or ""
        yield len(commit.jobs)
        for id, record in commit.jobs.items():
            at = ended_at(record)
            yield from (id, "" if at is None else repr(at), mark_of(record), codec.dumps(record))
        entries = in_order(commit)
        yield len(entries)
        for entry in entries:
            kind = keys.HISTORY if isinstance(entry, HistoryEntry) else keys.STEPS
            yield from (entry.job, kind, self._caps[kind], codec.dumps(entry))
        yield b"" if commit.quarantine is None else codec.dumps(commit.quarantine)
        yield b"" if commit.cordons is None else codec.dumps(commit.cordons)
        yield b"" if commit.projects is None else codec.dumps(commit.projects)
        yield b"" if commit.queue is None else codec.dumps(commit.queue)
        yield b"" if commit.admissions is None else codec.dumps(commit.admissions)
        reigns = commit.reigns[-MAX_REIGNS:] if commit.reigns else ()
        yield reigns[-1].commits if reigns else ""
        yield "\n".join(f"{one.term} {one.commits} {one.at!r} {one.by}" for one in reigns)


def went_back(commits: int | str, confirmed: int) -> str:
    return f"the store knows of {commits} commits and had confirmed {confirmed}: it went back; write again what is known"


def in_order(commit: Commit) -> list[HistoryEntry | StepRecord]:
    """History and steps of one commit as readers get them: each in its own order, merged by time."""
    entries: tuple[Iterable[HistoryEntry | StepRecord], ...] = (commit.steps, commit.history)
    return list(heapq.merge(*entries, key=lambda entry: entry.at))


def decode_quarantine(data: bytes | str | None) -> tuple[Quarantine, ...]:
    return tuple(codec.decode(tuple[Quarantine, ...], json.loads(data))) if data else ()


def decode_cordons(data: bytes | str | None) -> tuple[Cordon, ...]:
    return tuple(codec.decode(tuple[Cordon, ...], json.loads(data))) if data else ()


def decode_projects(data: bytes | str | None) -> tuple[Project, ...]:
    return tuple(codec.decode(tuple[Project, ...], json.loads(data))) if data else ()


def decode_queue(data: bytes | str | None) -> tuple[Waiting, ...]:
    return tuple(codec.decode(tuple[Waiting, ...], json.loads(data))) if data else ()


def decode_admissions(data: bytes | str | None) -> tuple[Admission, ...]:
    return tuple(codec.decode(tuple[Admission, ...], json.loads(data))) if data else ()


def _read_reign(line: str) -> Reign:
    term, commits, at, by = line.split(" ", 3)
    return Reign(term=Term(int(term)), by=by, commits=int(commits), at=float(at))


def _command(data: bytes) -> Command:
    command: Command = codec.loads(cast(Any, Command), data)
    return command


def _record(data: bytes) -> JobRecord:
    try:
        return codec.loads(JobRecord, data)
    except codec.Undecodable as error:
        raise Unavailable(f"a job's record cannot be read ({error}); use the version that wrote it") from error


def _bytes(argument: Argument) -> bytes:
    return argument if isinstance(argument, bytes) else str(argument).encode()
