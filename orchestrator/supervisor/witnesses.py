"""Hosts as witnesses of what was recorded: told with all that is asked of them, and asked when a supervisor begins.

It owns who has said what and the memos that hosts are given. Whether the store has forgotten anything is recalling.py's to
judge, and what follows from that the loop's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import TypeAlias

import structlog

from orchestrator.domain import codec
from orchestrator.domain.errors import EverstepError
from orchestrator.domain.ids import EffectId, JobId, NodeId, Term
from orchestrator.domain.job import JobRecord
from orchestrator.domain.memo import Kept, Memo, Reign, is_forgotten
from orchestrator.domain.requests import CloseHost
from orchestrator.domain.state import TERMINAL
from orchestrator.ports import Cluster, HostGone, HostUnreachable

ASKED_S = 1.0
"""In which hosts that can be reached have said what they remember, when a supervisor begins."""

log = structlog.get_logger()
Key: TypeAlias = tuple[JobId, NodeId]


class Witnesses:
    """reigns: those that led to what the supervisor knows, its own last; commits: that the store has confirmed to it."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.reigns: tuple[Reign, ...] = ()
        self.commits = 0
        self._recorded: dict[JobId, JobRecord] = {}
        """Each open job as it was committed last."""
        self._memos: dict[JobId, tuple[JobRecord, tuple[Reign, ...], str]] = {}
        """Of which record, in which reign, and encoded."""
        self._said: dict[Key, tuple[float, int, str] | None] = {}
        """What each host remembered when it was asked last."""

    async def ask(self, named: Iterable[Key]) -> tuple[list[Kept], frozenset[Key], bool]:
        """What all that answer in a moment remember, which have ended, and whether that is all there are.

        named: hosts that records know of, besides those that the cluster does.
        """
        keys, is_complete = set(named), True
        try:
            async with asyncio.timeout(ASKED_S):
                keys |= set(await self._cluster.hosts())
        except (TimeoutError, OSError, EverstepError) as error:
            log.warning("hosts_unknown", error=str(error))
            is_complete = False
        asked = {key: asyncio.create_task(self._cluster.ask(*key)) for key in sorted(keys)}
        if asked:
            await asyncio.wait(asked.values(), timeout=ASKED_S)
        kept, gone = [], set()
        for key, answer in asked.items():
            if not answer.done():
                answer.cancel()
                is_complete = False
            elif (why := answer.exception()) is None:
                kept.append(answer.result())
            elif isinstance(why, HostGone):
                gone.add(key)
            else:
                log.warning("host_not_asked", job=key[0], node=key[1], error=str(why))
                is_complete = False
        self._said = {(one.job, one.node): one.memo.mark if one.memo else None for one in kept}
        return kept, frozenset(gone), is_complete

    async def end(self, job: JobId, node: NodeId, term: Term) -> None:
        """A host that serves what came to nothing."""
        log.warning("host_ended", job=job, node=node, why="it obeyed a supervisor of which the store knows nothing")
        try:
            await self._cluster.call(job, node, term, EffectId(f"{job}:stray:{term}"), CloseHost())
        except (HostGone, HostUnreachable, EverstepError) as error:
            log.warning("host_not_ended", job=job, node=node, error=str(error))

    def record(self, jobs: Mapping[JobId, JobRecord], commits: int) -> None:
        """They are committed, with that commit."""
        self.commits = commits
        self._recorded |= jobs
        for job, record in jobs.items():
            if isinstance(record.state, TERMINAL):
                del self._recorded[job]
                self._memos.pop(job, None)

    def memo(self, job: JobId) -> str:
        """For a host of the job to keep; "" where nothing is recorded of it."""
        record = self._recorded.get(job)
        if record is None:
            return ""
        known = self._memos.get(job)
        if known is None or known[0] is not record or known[1] is not self.reigns:
            memo = Memo(reigns=self.reigns, commits=self.commits, record=record)
            known = self._memos[job] = record, self.reigns, codec.dumps(memo).decode()
        return known[2]

    def has_met(self, job: JobId, node: NodeId) -> bool:
        """Whether the host was asked, and what it said is part of what the supervisor goes on from."""
        return (job, node) in self._said

    def knows(self, kept: Kept) -> bool:
        memo = kept.memo
        if memo is None or not is_forgotten(memo, self.reigns):
            return True
        return self._said.get((kept.job, kept.node)) == memo.mark
