"""The store went back under a supervisor that knows better: what it has forgotten is written again, all in one commit.

It owns what such a commit holds. Streams keep their gap: entries that were forgotten are known to nobody here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from orchestrator.domain.events import HistoryEntry
from orchestrator.domain.ids import JobId
from orchestrator.domain.job import JobRecord
from orchestrator.domain.memo import Reign
from orchestrator.domain.state import TERMINAL
from orchestrator.domain.status import status_of
from orchestrator.ports import Commit

from .kernel import State


def whole(
    state: State,
    ended: Mapping[JobId, JobRecord],
    commit: Commit,
    cursor: str,
    reigns: tuple[Reign, ...],
    now: float,
    why: str,
) -> Commit:
    """All that is known, with what was to be written.

    ended: jobs that are not over for the store, as they ended. cursor: commands up to this one have been taken into
    account. reigns: those that led here, the one that writes last.
    """
    jobs = {**state.jobs, **ended, **commit.jobs}
    open_ones = [record for record in jobs.values() if not isinstance(record.state, TERMINAL)]
    return replace(
        commit,
        jobs=jobs,
        history=(*commit.history, *(_told(record, now, why) for record in open_ones)),
        nodes=state.nodes if commit.nodes is None else commit.nodes,
        quarantine=tuple(state.quarantine.values()),
        cordons=tuple(state.cordons.values()),
        admissions=tuple(state.admissions.values()),
        projects=tuple(state.projects.values()),
        queue=state.queue if commit.queue is None else commit.queue,
        reigns=reigns,
        cursor=commit.cursor or cursor or None,
    )


def _told(record: JobRecord, now: float, why: str) -> HistoryEntry:
    return HistoryEntry(
        job=record.id,
        at=now,
        type="store_went_back",
        message=f"what it had forgotten of this job's state was written again, of its history and curve it is lost: {why}",
        status=status_of(record.state),
        generation=record.generation,
        step=record.committed,
    )
