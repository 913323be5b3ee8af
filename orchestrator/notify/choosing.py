"""What in a job's history or among nodes people may be told of, which hooks want it, and the words they are sent.

Pure: the same entry gives the same delivery with the same id, however often and by whomever it is looked at.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from orchestrator.domain.admission import Admission, Admittance
from orchestrator.domain.cluster import Node, NodeStatus
from orchestrator.domain.events import HistoryEntry
from orchestrator.domain.hooks import Delivery, Hook, Occasion
from orchestrator.domain.job import JobRecord
from orchestrator.domain.state import JobStatus
from orchestrator.domain.status import RESIZES

MAX_WORDS = 2000
"""Characters of a message; the whole is in the job's events."""
_OF_TYPE: Mapping[str, Occasion] = {
    "submitted": Occasion.JOB_SUBMITTED,
    "queued": Occasion.JOB_QUEUED,
    "running": Occasion.JOB_RUNNING,
    "at_risk": Occasion.JOB_AT_RISK,
    "mirrored": Occasion.JOB_MIRRORED,
    "rolled_back": Occasion.JOB_ROLLED_BACK,
    "straggler": Occasion.JOB_STRAGGLER,
    "checkpoint_failed": Occasion.JOB_CHECKPOINT_FAILED,
    "paused": Occasion.JOB_PAUSED,
}
_OF_END: Mapping[str, Occasion] = {
    JobStatus.SUCCEEDED: Occasion.JOB_SUCCEEDED,
    JobStatus.FAILED: Occasion.JOB_FAILED,
    JobStatus.CANCELLED: Occasion.JOB_CANCELLED,
}
ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """One thing to tell. key: of which there is no other. project, labels: of the job; of the cluster's news, none."""

    occasion: Occasion
    key: str
    at: float
    data: Mapping[str, Any]
    project: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesSeen:
    """As they were looked at last: those not lost, by name and life, and those refused, by name and since when."""

    here: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()


def of_entry(id: str, entry: HistoryEntry, record: JobRecord) -> News | None:
    """id: the entry's place in its job's history. None for what nobody is told of."""
    occasion = _occasion(entry, record)
    if occasion is None:
        return None
    job: dict[str, Any] = {
        "id": record.id,
        "name": record.spec.name,
        "project": record.spec.project,
        "labels": dict(record.spec.labels),
        "user": record.by.name if record.by is not None else None,
    }
    data = {
        "job": job,
        "status": entry.status,
        "generation": entry.generation,
        "step": entry.step,
        "steps": record.spec.train.steps,
        "message": entry.message[:MAX_WORDS],
        "event": id,
    }
    return News(
        occasion=occasion,
        key=f"{record.id}:{id}",
        at=entry.at,
        data=data,
        project=record.spec.project,
        labels=record.spec.labels,
    )


def _occasion(entry: HistoryEntry, record: JobRecord) -> Occasion | None:
    match entry.type:
        case "ended":
            return _OF_END.get(entry.status)
        case "generation_closing":
            return None if entry.data.get("cause") in RESIZES else Occasion.JOB_INTERRUPTED
        case "recovered":
            number = entry.data.get("incident")
            is_resize = any(one.number == number and one.fault.cause in RESIZES for one in record.incidents)
            return None if is_resize else Occasion.JOB_RECOVERED
        case _:
            return _OF_TYPE.get(entry.type)


def of_nodes(
    before: NodesSeen | None, nodes: Iterable[Node], admissions: Iterable[Admission], now: float
) -> tuple[NodesSeen, list[News]]:
    """What has changed since; nothing on the first look, which knows of no change."""
    known, found = tuple(nodes), []
    here = tuple(sorted(_life(one) for one in known if one.status is not NodeStatus.LOST))
    refused = {_refusal(one): one for one in admissions if one.standing is Admittance.REFUSED}
    seen = NodesSeen(here=here, refused=tuple(sorted(refused)))
    if before is None:
        return seen, []
    for node in known:
        # One that has asked to leave is not lost.
        if node.status is NodeStatus.LOST and _life(node) in before.here and not node.leaving:
            said = {"node": node.id, "kind": node.kind, "devices": node.num_devices}
            key = f"lost:{_life(node)}"
            found.append(News(occasion=Occasion.NODE_LOST, key=key, at=now, data={**said, "message": f"{node.id} is lost"}))
    for name in sorted(set(refused) - set(before.refused)):
        one = refused[name]
        message = f"{one.node} is kept out of new plans: {one.why}"[:MAX_WORDS]
        data = {"node": one.node, "message": message}
        found.append(News(occasion=Occasion.NODE_REFUSED, key=f"refused:{name}", at=one.since, data=data))
    return seen, found


def _life(node: Node) -> str:
    return f"{node.id}@{node.life}"


def _refusal(one: Admission) -> str:
    return f"{one.node}@{one.since!r}"


def wants(hook: Hook, news: News) -> bool:
    if hook.occasions and news.occasion not in hook.occasions:
        return False
    if news.project is None:
        return not hook.is_narrowed
    return (not hook.projects or news.project in hook.projects) and hook.labels.items() <= news.labels.items()


def delivery(hook: Hook, news: News, now: float) -> Delivery:
    """As it is to be sent at once."""
    body = {"type": news.occasion.value, "timestamp": datetime.fromtimestamp(news.at, UTC).isoformat(), "data": news.data}
    return Delivery(
        id=f"msg-{hashlib.sha256(f'{hook.id}:{news.occasion}:{news.key}'.encode()).hexdigest()[:24]}",
        hook=hook.id,
        occasion=news.occasion,
        at=now,
        body=json.dumps(body, separators=(",", ":"), ensure_ascii=False, allow_nan=False),
        due_at=now,
    )


def ping(hook: Hook, key: str, now: float) -> Delivery:
    data = {"webhook": hook.id, "name": hook.name, "message": "this is a test: messages of this webhook look like it"}
    return delivery(hook, News(occasion=Occasion.PING, key=key, at=now, data=data), now)
