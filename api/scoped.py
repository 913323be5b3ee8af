"""The desk as one caller sees it: jobs of other projects do not exist.

This is the one place where an object is held against a caller's projects; routes know nothing of it. It refuses to know
roles, which are the routes' (access.py).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from orchestrator.domain.access import Principal, Submitter
from orchestrator.domain.admission import Admission
from orchestrator.domain.cluster import Node
from orchestrator.domain.cordon import Cordon
from orchestrator.domain.errors import NotFound
from orchestrator.domain.events import Command, HistoryEntry, StepRecord
from orchestrator.domain.ids import JobId
from orchestrator.domain.job import JobRecord
from orchestrator.domain.quarantine import Quarantine
from orchestrator.domain.queue import Project, Waiting
from orchestrator.domain.spec import JobSpec
from orchestrator.ports import Desk, Gap, Page, Sort

from .problems import Problem


class ScopedDesk:
    """A Desk. A job of another project is answered in the very words of one that never was."""

    def __init__(self, desk: Desk, principal: Principal) -> None:
        self._desk = desk
        self._principal = principal

    async def submit(
        self, job: JobId, spec: JobSpec, at: float, key: str | None, body_hash: str, by: Submitter | None = None
    ) -> tuple[JobId, bool]:
        if not self._principal.reaches(spec.project):
            allowed = ", ".join(self._principal.projects)
            raise Problem(
                403, "forbidden", f"project is {spec.project!r}, this token submits to {allowed}; name one of those"
            )
        return await self._desk.submit(job, spec, at, key, body_hash, by)

    async def command(self, command: Command, expected: int | None = None) -> str:
        job = getattr(command, "job", None)
        if job is None:
            raise Problem(403, "forbidden", "this is about the whole cluster; use a token for all projects")
        await self.get(job)
        return await self._desk.command(command, expected)

    async def revision(self, job: JobId) -> int:
        return await self._desk.revision(job)

    async def get(self, job: JobId) -> JobRecord:
        record = await self._desk.get(job)
        if not self._principal.reaches(record.spec.project):
            raise NotFound(f"there is no job {job}; list the jobs to see what there is")
        return record

    async def list(self, limit: int, cursor: str | None, sort: Sort = Sort.NEWEST) -> Page:
        """May be short, or empty, and still have a next cursor."""
        page = await self._desk.list(limit, cursor, sort)
        mine = tuple(record for record in page.jobs if self._principal.reaches(record.spec.project))
        return Page(jobs=mine, next_cursor=page.next_cursor)

    async def count(self) -> None:
        return None

    async def nodes(self) -> tuple[Node, ...]:
        return await self._desk.nodes()

    async def quarantine(self) -> tuple[Quarantine, ...]:
        return await self._desk.quarantine()

    async def cordons(self) -> tuple[Cordon, ...]:
        return await self._desk.cordons()

    async def admissions(self) -> tuple[Admission, ...]:
        return await self._desk.admissions()

    async def projects(self) -> tuple[Project, ...]:
        return tuple(one for one in await self._desk.projects() if self._principal.reaches(one.name))

    async def queue(self) -> tuple[Waiting, ...]:
        """Places in the queue are those among all jobs."""
        return tuple(one for one in await self._desk.queue() if self._principal.reaches(one.project))

    async def history(self, job: JobId, after: str, limit: int) -> Sequence[tuple[str, HistoryEntry | Gap]]:
        await self.get(job)
        return await self._desk.history(job, after, limit)

    async def follow(self, job: JobId, after: str) -> AsyncIterator[tuple[str, HistoryEntry | StepRecord | Gap]]:
        await self.get(job)
        async for item in self._desk.follow(job, after):
            yield item

    async def steps(self, job: JobId, after: str, limit: int) -> Sequence[tuple[str, StepRecord]]:
        await self.get(job)
        return await self._desk.steps(job, after, limit)

    async def health(self) -> dict[str, str]:
        return await self._desk.health()
