"""How long a job may stay as it is: a pure function of its record, so that a new supervisor restarts every deadline.

A key names what is waited for; the loop starts a timer when a key appears and forgets it when the key goes. What the
cluster waits for are instants of the wall clock (`instants`): people gave them, and a new supervisor keeps them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from orchestrator.domain.admission import Admission, Admittance
from orchestrator.domain.cordon import Cordon
from orchestrator.domain.ids import Device, Generation, NodeId
from orchestrator.domain.job import JobRecord
from orchestrator.domain.state import Closing, Join, Probing, Queued, Reforming, Running, Starting, Stopping
from orchestrator.recovery import admission
from orchestrator.recovery.breaker import rest_s

PROBE_S = 120.0
OPEN_S = 180.0
"""A host that starts: imports, data, warm-up; on a loaded machine this takes tens of seconds."""
PREPARE_S = 30.0
SILENT_SEAT_S = 2.0
"""For a seat on a node that does not answer, while everybody else stands still."""
SAVE_AGAIN_S, MAX_SAVE_AGAIN_S = 5.0, 300.0
"""For a checkpoint that was asked for and could not be made, doubled each time."""
BAR_S, MAX_BAR_S = 10.0, 600.0
"""For a node that was given up because of its links, doubled each time: a link is not mended by forming anew over it."""
STUCK_S = 60.0
"""For devices that nobody has, before another job that lacks some too may have those of a broken one."""
UNSAVED_S = 60.0
"""Before a job is put aside for another again that could not be saved when it was to be."""
JOIN_S = 1800.0
"""Newcomers receive their state meanwhile; a source or a link that stalls is noticed long before, by its ends."""
MAX_JOINS = 3
"""In a row that may fail before the plan is left alone until the cluster changes, or for JOIN_AGAIN_S."""
JOIN_AGAIN_S = 60.0
STOP_AFTER_S = 10.0
"""Beyond five steps, in which a generation stops by itself."""
FORM_S = 60.0
"""Connecting, restoring and the first step's warm-up: since state was last seen to arrive, where that lasts."""
REPORT_MARGIN_S = 1.5
"""Beyond leave_s, after which a host kills a rank that has not left and reports it as exited."""
PATIENCE_S = 30.0
"""After that, for silent hosts that may hold the only copy of something: waiting is cheaper than training it again."""
RETRY_S = 10.0
"""Before a host is asked for again on a node where one ended or could not be started."""
STOP_S = 20.0
LOOK_S = 0.7
"""For every host to say what its ranks do, once one of them says that a rank stands still."""
ISOLATION_MARGIN_S = 60.0
"""Beyond max_isolation_s, after which hosts that nobody can reach have ended their ranks by themselves."""
ASK_AGAIN_S = 10.0
"""A node that was to be taken away and is still there: the provider may not have heard."""


def deadlines(record: JobRecord) -> Mapping[str, float]:
    """key -> seconds the job may wait for it."""
    looking, found = record.looking, {**_of_state(record), **_bars(record)}
    if looking is None:
        return found
    key = f"look:{looking.generation}:{looking.number}"
    return {**found, **({f"{key}:later": looking.after_s} if looking.after_s else {key: LOOK_S})}


def instants(
    cordons: Mapping[NodeId, Cordon],
    jobs: Iterable[JobRecord],
    now: float,
    admissions: Mapping[NodeId, Admission] | None = None,
) -> Mapping[str, float]:
    """key -> seconds until the cluster is to be looked at again; nothing that has passed already."""
    found = _of_admissions(admissions or {}, now)
    for node, one in cordons.items():
        if not one.removes:
            continue
        if one.deadline is not None:
            found[f"goes:{node}:{one.deadline}"] = one.deadline - now
        if one.removed_at:
            found[f"gone:{node}:{one.removed_at}"] = one.removed_at + ASK_AGAIN_S - now
    for record in jobs:
        found |= {key: at - now for key, at in due(record).items()}
    return {key: seconds for key, seconds in found.items() if seconds > 0}


def _of_admissions(admissions: Mapping[NodeId, Admission], now: float) -> dict[str, float]:
    found = {}
    for node, one in admissions.items():
        if not one.is_here:
            continue
        if one.standing is Admittance.REFUSED:
            found[f"parole:{node}:{one.since}"] = one.since + admission.parole_s(one) - now
        elif one.asked_at is not None:
            found[f"waited:{node}:{one.number}"] = one.asked_at + admission.CHECK_S - now
            found[f"check:{node}:{one.number}"] = one.asked_at + admission.ASK_AGAIN_S - now
    return found


def due(record: JobRecord) -> dict[str, float]:
    """key -> wall clock of the deadlines that its owner gave it, those that are running."""
    spec, turn, found = record.spec, record.turn, {}
    if spec.start_by_s and record.started_at is None:
        found[f"begin:{record.id}"] = record.created_at + spec.start_by_s
    if spec.max_runtime_s and turn.held_since is not None:
        found[f"end:{record.id}:{turn.held_since}"] = turn.held_since + spec.max_runtime_s - turn.held_s
    return found


def _of_state(record: JobRecord) -> Mapping[str, float]:
    state = record.state
    match state:
        case Probing():
            return {"probe": PROBE_S}
        case Queued():
            return _retry(record, record.generation)
        case Starting(forming=forming):
            if forming.formed:
                return {f"form:{forming.generation}{_moved(record)}": _form_s(record)}
            return {f"open:{forming.generation}": OPEN_S}
        case Running(generation=generation, plan=plan):
            found = _retry(record, generation)
            if record.save_rests:
                found[f"save_again:{record.save_failures}"] = save_again_s(record.save_failures)
            if record.unreachable >= set(plan.nodes):
                found.update(_isolated(record, generation))
            if record.turn.unsaved_until:
                found[f"unsaved:{record.turn.unsaved_until:.3f}"] = UNSAVED_S
            if any(not spare.is_ready or node in record.unreachable for node, spare in record.spares.items()):
                found[f"spare:{generation}"] = OPEN_S
            if record.join is not None:
                found.update(_join(record, record.join))
            elif record.target is not None:
                found[f"grow:{generation}"] = OPEN_S
            elif record.joins_failed >= MAX_JOINS:
                found[f"join_again:{record.joins_failed}"] = JOIN_AGAIN_S
            return found
        case Reforming(closing=closing, forming=next_one):
            found = _retry(record, closing.generation) if next_one is None else {}
            if next_one is None and state.waiting and closing.settlement is not None and not state.is_stuck:
                found[f"stuck:{closing.generation}"] = STUCK_S
            if closing.settlement is None:
                if state.is_patient:
                    found[f"patience:{closing.generation}"] = PATIENCE_S
                elif has_left(record, closing, state.lost):
                    found[f"settle:{closing.generation}"] = record.spec.recovery.killed_after_s + REPORT_MARGIN_S
                else:
                    found.update(_isolated(record, closing.generation))
            elif next_one and next_one.formed:
                found[f"form:{next_one.generation}{_moved(record)}"] = _form_s(record)
            elif next_one:
                if silent := silent_seats(record):
                    found[f"silent:{next_one.generation}:{'+'.join(sorted(silent))}"] = SILENT_SEAT_S
                if rest := rest_s(record.failures) if not state.is_rested else 0.0:
                    found[f"rest:{next_one.generation}"] = rest
                cold = any(node not in record.warm for node in next_one.plan.nodes)
                found[f"prepare:{next_one.generation}"] = OPEN_S if cold else PREPARE_S
            return found
        case Stopping():
            return {"stop": STOP_S}
        case _:
            return {}


def _form_s(record: JobRecord) -> float:
    """What a job gives its ranks before they count as hung, it gives them while they are built, too."""
    return FORM_S + record.spec.recovery.hang_s


def _moved(record: JobRecord) -> str:
    """Of a key: another one whenever more of the state has arrived somewhere, so that the time begins again."""
    done = sum(one.done_bytes for copies in record.copies.values() for one in copies if one.what != "saving")
    return f":{done}" if done else ""


def save_again_s(failures: int) -> float:
    """After so many failures of one request."""
    return min(MAX_SAVE_AGAIN_S, SAVE_AGAIN_S * 2.0 ** (failures - 1))


def silent_seats(record: JobRecord) -> frozenset[NodeId]:
    """Nodes that do not answer and are to have a seat prepared, whose ranks nobody waits for a report of."""
    state = record.state
    if not isinstance(state, Reforming) or state.forming is None or state.forming.formed:
        return frozenset()
    here = {*state.forming.addresses, *(set(state.closing.reports) - state.lost)}
    wanted = {device.node for device in state.forming.plan.devices if device not in here}
    return frozenset(wanted & record.unreachable - {device.node for device in state.closing.awaited})


def _bars(record: JobRecord) -> dict[str, float]:
    times = record.bad_ends
    return {f"bar:{node}:{times[node]}": min(MAX_BAR_S, BAR_S * 2 ** (times[node] - 1)) for node in sorted(record.barred)}


def _join(record: JobRecord, join: Join) -> dict[str, float]:
    if join.stopping:
        return {f"join_stop:{join.generation}": STOP_AFTER_S + 5 * (record.typical_step_s or 0.0)}
    return {f"join_copy:{join.generation}": JOIN_S} if join.begun else {f"join_prepare:{join.generation}": PREPARE_S}


def has_left(record: JobRecord, closing: Closing, lost: frozenset[Device]) -> bool:
    """Whether a rank of the closing generation is known to have left it: from then on no later step of it can pass.

    What newcomers and idle donors say is no evidence: they have no vote in it.
    """
    plan = record.plans.get(closing.generation)
    return any(plan is None or device in plan.seat_of for device in (*closing.reports, *lost))


def _retry(record: JobRecord, generation: Generation) -> dict[str, float]:
    return {f"retry:{generation}": RETRY_S} if record.avoided - record.hosts else {}


def _isolated(record: JobRecord, generation: Generation) -> dict[str, float]:
    allowed = record.spec.recovery.max_isolation_s
    return {f"isolated:{generation}": allowed + ISOLATION_MARGIN_S} if allowed else {}
