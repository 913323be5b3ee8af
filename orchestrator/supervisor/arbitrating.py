"""The jobs of one kernel step as the arbiter sees them, and its answer, which is worked out anew only when they changed.

One supervisor holds the lease of all jobs, and what it decides is committed under its term or not at all: so the snapshot
is never stale. What a job does with its share is yielding.py's and wanting.py's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter, is_

from orchestrator.domain.cluster import Node, NodeStatus
from orchestrator.domain.ids import Device, JobId, NodeId
from orchestrator.domain.job import JobRecord
from orchestrator.domain.queue import Project, Waiting, WaitReason
from orchestrator.domain.state import TERMINAL, Paused, Probing, Queued, Reforming, Running, Starting, Stopping
from orchestrator.jobs.arbitration import NOBODY, Allotment, Arbitration, Claim, Snapshot, Wait, arbitrate
from orchestrator.jobs.picking import Need

MAX_WAITING = 1000
"""Jobs of the queue that readers are shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arbitrated:
    """An answer and what it was given to. claims: by the record each was made from. about: see arbitrated."""

    snapshot: Snapshot
    answer: Arbitration
    claims: Mapping[JobId, tuple[JobRecord, Claim | None]] = field(default_factory=dict)
    about: tuple[object, ...] = ()

    def allotment(self, job: JobId) -> Allotment | None:
        return self.answer.allotments.get(job)


def arbitrated(
    before: Arbitrated | None,
    records: Iterable[JobRecord],
    nodes: tuple[Node, ...],
    closed: frozenset[NodeId],
    left: frozenset[NodeId],
    out: frozenset[Device],
    quotas: Mapping[str, Project],
) -> Arbitrated:
    """closed: nodes that nothing new is placed on; left: those jobs are to leave; out: devices that no plan may use."""
    known = before.claims if before else {}
    claims: dict[JobId, tuple[JobRecord, Claim | None]] = {}
    for record in records:
        old = known.get(record.id)
        claims[record.id] = (record, old[1] if old is not None and _claims_the_same(old[0], record) else claim_of(record))
    about = (nodes, closed, left, out, quotas)
    if before is not None and before.about == about and _are_same(before.claims, claims):
        return Arbitrated(snapshot=before.snapshot, answer=before.answer, claims=claims, about=about)
    up = [node for node in nodes if node.status is NodeStatus.UP]
    snapshot = Snapshot(
        devices=_devices((node for node in up if node.id not in closed), out),
        closed=_devices((node for node in up if node.id in closed - left), out),
        claims=tuple(claim for _, claim in claims.values() if claim is not None),
        quotas={name: one.max_devices for name, one in quotas.items() if one.max_devices is not None},
    )
    if before is not None and before.snapshot == snapshot:
        return Arbitrated(snapshot=before.snapshot, answer=before.answer, claims=claims, about=about)
    return Arbitrated(snapshot=snapshot, answer=arbitrate(snapshot), claims=claims, about=about)


CLAIMED_FROM = (
    *("state", "turn", "pids", "target", "spares", "spec", "size", "pause", "hosts", "avoided", "barred", "profile"),
    *("plans", "incidents", "join", "planning", "considered", "created_at", "id"),
)
"""Of a record, all that claim_of looks at: a committed step changes none of it."""
_read = attrgetter(*CLAIMED_FROM)


def _claims_the_same(old: JobRecord, new: JobRecord) -> bool:
    return old is new or all(map(is_, _read(old), _read(new)))


def _are_same(
    old: Mapping[JobId, tuple[JobRecord, Claim | None]], new: Mapping[JobId, tuple[JobRecord, Claim | None]]
) -> bool:
    if len(old) != len(new):
        return False
    return all(a == b and one[1] is other[1] for (a, one), (b, other) in zip(old.items(), new.items(), strict=True))


def _devices(nodes: Iterable[Node], out: frozenset[Device]) -> dict[Device, str]:
    """With their kinds."""
    return {device: node.kind for node in nodes for device in node.devices() if device not in out}


def claimed(record: JobRecord) -> frozenset[Device]:
    """Devices a job holds or is about to."""
    state = record.state
    found = set(record.pids)
    if isinstance(state, Running):
        found |= set(state.plan.devices)
    if isinstance(state, Starting | Reforming) and state.forming:
        found |= set(state.forming.plan.devices)
    if record.target:
        found |= set(record.target.devices)
    for spare in record.spares.values():
        found |= set(spare.devices)
    return frozenset(found)


def claim_of(record: JobRecord) -> Claim | None:
    """None of a job that neither has nor wants anything."""
    state, turn = record.state, record.turn
    if isinstance(state, (Probing, Paused, *TERMINAL)) or (isinstance(state, Queued) and record.profile is None):
        return None
    holds = claimed(record)
    parallel = record.sized_spec.parallel
    tp = parallel.tp or 1
    claim = Claim(
        job=record.id,
        priority=record.priority,
        submitted_at=record.created_at,
        project=record.spec.project,
        need=Need(
            least=max(parallel.min_devices, tp * (parallel.pp or 1) * (parallel.dp or 1)),
            tp=tp,
            one_kind=record.spec.train.exact is True,
        ),
        limit=record.wanted_size.limit,
        floor=turn.floor,
        holds=holds,
        leaving=holds & turn.yields,
        present=record.hosts - record.avoided,
        shuns=record.avoided | record.barred,
        infeasible=turn.infeasible,
    )
    goes = record.pause is not None and bool(record.pause.preempted)
    match state:
        case Stopping():
            return replace(claim, leaving=holds, ends=True)
        case Queued():
            return replace(claim, wants=record.pause is None, grows=True)
        case Starting(forming=forming):
            core = frozenset(forming.plan.devices)
            return replace(claim, core=core, grows=True, declined=_declined(record, core))
        case Running(plan=plan):
            core = frozenset(plan.devices)
            if goes:
                return replace(claim, core=core, leaving=holds)
            wanted = record.pause is None
            if record.target is None and turn.yields & core and len(core - turn.yields) < turn.floor:
                claim = replace(claim, leaving=NOBODY)  # it has found no plan on what would be left
            return replace(
                claim, core=core, grows=wanted, gives=wanted and _is_calm(record), declined=_declined(record, core)
            )
        case Reforming(closing=closing, forming=forming):
            broken = record.plans.get(closing.generation)
            if forming is None and broken is not None:  # what it is made whole from again, whoever else would have it
                claim = replace(claim, holds=holds | frozenset(broken.devices))
            if goes and (forming is not None or not state.waiting):
                return replace(claim, leaving=claim.holds)
            # One that is to be put aside and does not fit what is left of it is made whole first: it cannot be saved
            # otherwise. What did not fit on the cluster as it was may fit once a node has come: that is asked again then.
            waits = forming is None
            stuck = waits and state.is_stuck
            return replace(
                claim,
                wants=waits,
                grows=not goes,
                is_stuck=stuck,
                infeasible=turn.infeasible if stuck else "",
                judged=turn.judged if stuck else NOBODY,
            )
    raise AssertionError(state)


def standing(record: JobRecord, allotment: Allotment | None, nodes_seen: bool) -> Wait | None:
    """Why a job has no devices; None where it has, or wants none."""
    state, turn = record.state, record.turn
    if isinstance(state, Probing):
        return Wait(reason=WaitReason.PROBING, message="its program is being described, before any device is held")
    if not isinstance(state, Queued):
        return None
    if not nodes_seen:
        return Wait(reason=WaitReason.NO_CLUSTER, message="the cluster has not been seen yet")
    if allotment is None:
        return Wait(reason=WaitReason.PLANNING, message="a plan is being chosen")
    if allotment.wait is not None:
        again = "was put aside for a job of higher priority and " if turn.is_preempted else ""
        return replace(allotment.wait, message=f"{again}{allotment.wait.message}")
    return Wait(reason=WaitReason.PLANNING, message="a plan is being chosen")


def queue_of(
    records: Iterable[JobRecord], arbitration: Arbitrated | None, taken: Callable[[JobId], frozenset[Device]]
) -> tuple[Waiting, ...]:
    """The queue as readers see it. taken: what others hold, to a job."""
    found: list[Waiting] = []
    waiting = [record for record in records if isinstance(record.state, Probing | Queued)]
    for record in sorted(waiting, key=lambda one: (-one.priority, one.created_at, one.id))[:MAX_WAITING]:
        allotment = arbitration.allotment(record.id) if arbitration else None
        wait = standing(record, allotment, arbitration is not None)
        assert wait is not None
        if allotment and not allotment.wait and (lacks := allotment.minimum & taken(record.id)):
            wait = Wait(
                reason=WaitReason.MAKING_ROOM,
                message=f"has its turn; others are leaving {len(lacks)} of the {len(allotment.minimum)} devices for it",
            )
        claim = arbitration.claims[record.id][1] if arbitration and record.id in arbitration.claims else None
        found.append(
            Waiting(
                job=record.id,
                position=len(found) + 1,
                reason=wait.reason,
                message=wait.message,
                priority=record.priority,
                project=record.spec.project,
                least=claim.need.num_devices if claim else max(1, record.spec.parallel.min_devices),
                since=record.created_at,
            )
        )
    return tuple(found)


def _is_calm(record: JobRecord) -> bool:
    """Nothing is under way that giving something up would get in the way of."""
    last = record.incidents[-1] if record.incidents else None
    stops = record.join is not None and record.join.stopping
    return (last is None or last.pause_s is not None) and not stops and not record.turn.unsaved_until


def _declined(record: JobRecord, core: frozenset[Device]) -> frozenset[Device]:
    return NOBODY if record.planning else record.considered - core
