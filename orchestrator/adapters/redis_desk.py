"""The API's side of the store on Redis: submissions and commands in, records and streams out.

History and steps of a job are two streams with one numbering, so that one id says where a reader stands in both.
"""

from __future__ import annotations

import json
import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from typing import Any

from orchestrator.domain import codec
from orchestrator.domain.access import Submitter
from orchestrator.domain.admission import Admission
from orchestrator.domain.cluster import Node
from orchestrator.domain.cordon import Cordon
from orchestrator.domain.errors import Conflict, EverstepError, NotFound, Outdated, Unavailable
from orchestrator.domain.events import Command, HistoryEntry, JobSubmitted, StepRecord
from orchestrator.domain.ids import JobId
from orchestrator.domain.job import JobRecord
from orchestrator.domain.quarantine import Quarantine
from orchestrator.domain.queue import Project, Waiting
from orchestrator.domain.spec import JobSpec
from orchestrator.domain.state import JobStatus, Probing
from orchestrator.ports import Gap, Page, Sort

from . import redis_keys as keys
from . import redis_lists
from . import redis_scripts as scripts
from .redis_clients import BLOCK_S, RedisAddress, RedisClients, status, text, unavailable
from .redis_lists import number_of
from .redis_store import (
    HISTORY_CAP,
    decode_admissions,
    decode_cordons,
    decode_projects,
    decode_quarantine,
    decode_queue,
)
from .redis_tail import Tails

KEY_TTL_S = 24 * 3600
MAX_COMMANDS = 10_000
"""Waiting for a supervisor; beyond it, submissions and commands are refused."""
MAX_DECODED = 2000
"""Records kept as values."""
BATCH = 500
"""Entries read from a stream at a time."""
Item = tuple[str, HistoryEntry | StepRecord | Gap]


class RedisDesk:
    def __init__(self, address: RedisAddress, *, timeout_s: float = 2.0, history_cap: int = HISTORY_CAP) -> None:
        self._clients = RedisClients(address, timeout_s)
        self._history_cap = history_cap
        self._tails = Tails[HistoryEntry | StepRecord | Gap](self._read_both, self._wait_for_more, self._end_of)
        self._decoded: OrderedDict[JobId, tuple[bytes | str, JobRecord]] = OrderedDict()

    async def close(self) -> None:
        await self._clients.close()

    # --- in ---------------------------------------------------------------------------------------------------------------

    async def submit(
        self, job: JobId, spec: JobSpec, at: float, key: str | None, body_hash: str, by: Submitter | None = None
    ) -> tuple[JobId, bool]:
        record, command, entry = submission(job, spec, at, by)
        answer = await self._clients.write(
            scripts.SUBMIT,
            *(job, codec.dumps(record), codec.dumps(command), codec.dumps(entry)),
            *(key or "", body_hash, KEY_TTL_S, self._history_cap, MAX_COMMANDS),
        )
        outcome, id = status(answer)
        if outcome == "CONFLICT":
            if id == job:
                raise Conflict(f"job {id} is another one; use a new id")
            raise Conflict(f"the idempotency key was used for job {id} with another body; use a new key")
        _check_full(outcome)
        return JobId(id), id == job

    async def command(self, command: Command, expected: int | None = None) -> str:
        answer = await self._clients.write(
            scripts.COMMAND,
            *(secrets.token_hex(16), codec.dumps(command), MAX_COMMANDS),
            *(job_of(command) or "", "" if expected is None else expected),
        )
        outcome, id = status(answer)
        if outcome == "OUTDATED":
            raise outdated(command, expected, int(id))
        _check_full(outcome)
        return id

    async def revision(self, job: JobId) -> int:
        with unavailable(self._clients.address):
            found: Any = await self._clients.reads.hmget(keys.ids(job), ["revision", "asked"])
            revision, asked = int(found[0] or 0), text(found[1] or b"0")
            # Looked at after what was asked: what is known to be answered by then shows in a record that is read next.
            done = text(await self._clients.reads.get(keys.CURSOR) or b"0") if revision else asked
        return revision - 1 if _place(asked) > _place(done) else revision

    # --- out --------------------------------------------------------------------------------------------------------------

    async def get(self, job: JobId) -> JobRecord:
        data = None
        if ":" not in job:  # else it may be what is kept beside a job, and no record
            with unavailable(self._clients.address):
                data = await self._clients.reads.get(keys.job(job))
        if data is None:
            raise NotFound(f"there is no job {job}; list the jobs to see what there is")
        return self._decode(job, data)

    async def list(self, limit: int, cursor: str | None, sort: Sort = Sort.NEWEST) -> Page:
        """cursor: the place of the last job of the page before, so that new jobs shift nothing."""
        with unavailable(self._clients.address):
            ids, more = await redis_lists.page(self._clients.reads, limit, cursor, sort)
            records: Any = await self._clients.reads.mget([keys.job(id) for id in ids]) if ids else []
        jobs = tuple(self._decode(id, data) for id, data in zip(ids, records, strict=True) if data)
        return Page(jobs=jobs, next_cursor=more)

    async def count(self) -> int | None:
        with unavailable(self._clients.address):
            return int(await self._clients.reads.zcard(keys.JOBS))

    def _decode(self, job: JobId, data: bytes | str) -> JobRecord:
        """Most of what is asked for again has not changed, and comparing it costs a hundredth of decoding it."""
        known = self._decoded.get(job)
        if known is None or known[0] != data:
            known = data, codec.loads(JobRecord, data)
            self._decoded[job] = known
        self._decoded.move_to_end(job)
        if len(self._decoded) > MAX_DECODED:
            self._decoded.popitem(last=False)
        return known[1]

    async def nodes(self) -> tuple[Node, ...]:
        with unavailable(self._clients.address):
            data = await self._clients.reads.get(keys.NODES)
        return tuple(codec.decode(tuple[Node, ...], json.loads(data))) if data else ()

    async def quarantine(self) -> tuple[Quarantine, ...]:
        with unavailable(self._clients.address):
            return decode_quarantine(await self._clients.reads.get(keys.QUARANTINE))

    async def cordons(self) -> tuple[Cordon, ...]:
        with unavailable(self._clients.address):
            return decode_cordons(await self._clients.reads.get(keys.CORDONS))

    async def admissions(self) -> tuple[Admission, ...]:
        with unavailable(self._clients.address):
            return decode_admissions(await self._clients.reads.get(keys.ADMISSIONS))

    async def projects(self) -> tuple[Project, ...]:
        with unavailable(self._clients.address):
            return decode_projects(await self._clients.reads.get(keys.PROJECTS))

    async def queue(self) -> tuple[Waiting, ...]:
        with unavailable(self._clients.address):
            return decode_queue(await self._clients.reads.get(keys.QUEUE))

    async def history(self, job: JobId, after: str, limit: int) -> Sequence[tuple[str, HistoryEntry | Gap]]:
        after_number = number_of(after)
        with unavailable(self._clients.address):
            found = await self._clients.reads.xrange(keys.stream(job, keys.HISTORY), f"({after_number}-0", "+", count=limit)
        return [(id, value) for id, value in _items(found, HistoryEntry, after_number) if not isinstance(value, StepRecord)]

    async def steps(self, job: JobId, after: str, limit: int) -> Sequence[tuple[str, StepRecord]]:
        after_number = number_of(after)
        with unavailable(self._clients.address):
            found = await self._clients.reads.xrange(keys.stream(job, keys.STEPS), f"({after_number}-0", "+", count=limit)
        return [(id, value) for id, value in _items(found, StepRecord, after_number) if isinstance(value, StepRecord)]

    async def follow(self, job: JobId, after: str) -> AsyncIterator[Item]:
        reached = number_of(after)
        await self.get(job)
        async with self._tails.of(job) as tail:
            while True:
                items = tail.after(reached)
                if items is None:
                    items = await self._read_both(job, reached)
                for id, value in items:
                    yield id, value
                    reached = int(id)
                if not items:
                    await tail.news(reached)

    async def _wait_for_more(self, job: JobId, reached: int) -> None:
        """Only the wake-up is taken from here: a blocked read answers for the stream that spoke first and would step over
        the other's entries of the same commit. "$" for an id would lose what came meanwhile."""
        names = [keys.stream(job, kind) for kind in (keys.HISTORY, keys.STEPS)]
        with unavailable(self._clients.address):
            block_ms = int(BLOCK_S * 1000)
            await self._clients.waits.xread(dict.fromkeys(names, f"{reached}-0"), count=1, block=block_ms)

    async def _end_of(self, job: JobId) -> int:
        with unavailable(self._clients.address):
            found: Any = await self._clients.reads.hget(keys.ids(job), "last")
        return int(found or 0)

    async def _read_both(self, job: JobId, after: int) -> Sequence[Item]:
        """The next entries of both streams in order; where one was cut at BATCH, no later ones of the other."""
        kinds: tuple[tuple[str, type], ...] = ((keys.HISTORY, HistoryEntry), (keys.STEPS, StepRecord))
        with unavailable(self._clients.address):
            async with self._clients.reads.pipeline(transaction=True) as pipeline:
                for kind, _ in kinds:
                    pipeline.xrange(keys.stream(job, kind), f"({after}-0", "+", count=BATCH)
                both = await pipeline.execute()
        full = [number_of(text(found[-1][0])) for found in both if len(found) == BATCH]
        items = [item for (_, wanted), found in zip(kinds, both, strict=True) for item in _items(found, wanted, after)]
        items.sort(key=in_reading_order)
        return [item for item in items if not full or int(item[0]) <= min(full)]

    # --- health -----------------------------------------------------------------------------------------------------------

    async def health(self) -> dict[str, str]:
        try:
            with unavailable(self._clients.address):
                return {
                    "redis": await self._writes_and_reads(),
                    "durability": await self._durability(),
                    "supervisor": await self._supervisor(),
                }
        except EverstepError as error:
            return {"redis": str(error)}

    async def _writes_and_reads(self) -> str:
        value = secrets.token_hex(8)
        await self._clients.writes.set(keys.PROBE, value)
        read = await self._clients.reads.get(keys.PROBE)
        # Another API process may have written between the two.
        return "ok" if read else "a value just written could not be read back; is this a cache with eviction?"

    async def _durability(self) -> str:
        reads: Any = self._clients.reads
        configured = [*(await reads.config_get("append*")).items(), *(await reads.config_get("maxmemory-policy")).items()]
        settings = {text(name): text(value) for name, value in configured}
        info = await self._clients.reads.info()
        if settings.get("appendonly") != "yes":
            return "appendonly is off: a restart loses every job; set appendonly yes"
        if settings.get("appendfsync") != "always":
            return f"appendfsync is {settings.get('appendfsync')}: a power cut loses acknowledged jobs; set it to always"
        if info.get("aof_last_write_status", "ok") != "ok":
            return "Redis cannot write its append-only file; look at its disk"
        if settings.get("maxmemory-policy", "noeviction") != "noeviction" and info.get("maxmemory", 0):
            return f"maxmemory-policy is {settings['maxmemory-policy']}: records may be evicted; set noeviction"
        if info.get("role") != "master" or info.get("connected_slaves", 0):
            return "Redis fails over to a replica that may lack the newest writes; use a server without replicas"
        return "ok"

    async def _supervisor(self) -> str:
        holder = await self._clients.reads.get(keys.LEASE)
        return "ok" if holder else "no supervisor holds the lease; running jobs go on, nothing new is decided"


def submission(
    job: JobId, spec: JobSpec, at: float, by: Submitter | None = None
) -> tuple[JobRecord, JobSubmitted, HistoryEntry]:
    """What one submission writes."""
    record = JobRecord(id=job, spec=spec, state=Probing(), created_at=at, by=by)
    asked = f"; asked by {by.name}" if by is not None else ""
    entry = HistoryEntry(
        job=job,
        at=at,
        type="submitted",
        message=f"submitted as {spec.name}{asked}",
        status=JobStatus.PENDING.value,
        data={"by": by.name} if by is not None else {},
    )
    return record, JobSubmitted(job=job, spec=spec, at=at, by=by), entry


def _place(id: str) -> tuple[int, int]:
    """In a stream."""
    milliseconds, _, number = id.partition("-")
    return int(milliseconds), int(number or 0)


def job_of(command: Command) -> JobId | None:
    """Whom it is about; None where it is about the cluster, or a fault of something else than a job."""
    found: JobId | None = getattr(command, "job", None)
    return found


def outdated(command: Command, expected: int | None, revision: int) -> Outdated:
    return Outdated(
        f"{job_of(command)} is at revision {revision} and this was asked for revision {expected}: it has changed or "
        "somebody has asked something of it since; look at it again, then ask again"
    )


def in_reading_order(item: Item) -> tuple[int, bool]:
    """A gap comes after the entry whose id it borrows, so that a reader can resume from either."""
    return int(item[0]), isinstance(item[1], Gap)


def _items(found: Any, wanted: type, after: int) -> list[Item]:
    """Entries as values; where the stream was trimmed beyond `after`, a gap comes first."""
    items: list[Item] = []
    for place, (id, fields) in enumerate(found):
        number = number_of(text(id))
        if place == 0 and int(fields[keys.PREVIOUS.encode()]) > after:
            # The gap's own id is one a reader can resume from.
            items.append((str(number - 1), Gap(resumes_at=str(number))))
        items.append((str(number), codec.loads(wanted, fields[keys.ENTRY.encode()])))
    return items


def _check_full(outcome: str) -> None:
    if outcome == "FULL":
        raise Unavailable(f"{MAX_COMMANDS} commands wait for a supervisor; see that one runs, then try again")
