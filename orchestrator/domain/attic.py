"""How long finished jobs are kept, and what is left of one that was put into the archive."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .ids import JobId
from .job import JobRecord
from .state import Cancelled, Failed, Succeeded

DAY_S = 86400.0
KEPT_INCIDENTS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Of finished jobs. One is whole for kept_s after its end, while it is among the newest kept_jobs; then its record
    alone is left, short, until archived_s after its end; then nothing. Checkpoints are their owner's and stay."""

    kept_s: float = 7 * DAY_S
    kept_jobs: int = 10_000
    archived_s: float = 365 * DAY_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Retired:
    """archived: their history, steps and logs go now. forgotten: their records have gone too."""

    archived: tuple[JobId, ...] = ()
    forgotten: tuple[JobId, ...] = ()


def ended_at(record: JobRecord) -> float | None:
    """Wall clock; None of a job that is not over."""
    return record.state.at if isinstance(record.state, Succeeded | Failed | Cancelled) else None


def archived(record: JobRecord, now: float) -> JobRecord:
    """What the archive keeps: what was asked, how it ended, and where its newest checkpoint is."""
    state = replace(record.state, log_tail=()) if isinstance(record.state, Failed) else record.state
    return JobRecord(
        id=record.id,
        spec=record.spec,
        state=state,
        created_at=record.created_at,
        by=record.by,
        size=record.size,
        turn=record.turn,
        generation=record.generation,
        committed=record.committed,
        last_answer=record.last_answer,
        evaluation=record.evaluation,
        checkpoint=record.checkpoint,
        incidents=tuple(replace(one, options=(), stack=()) for one in record.incidents[-KEPT_INCIDENTS:]),
        started_at=record.started_at,
        paused_s=record.paused_s,
        archived_at=now,
    )
