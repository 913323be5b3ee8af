"""From the control plane's records to the shapes the API answers: pure functions, one per shape."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict
from datetime import UTC, datetime

from orchestrator.domain.admission import Admission
from orchestrator.domain.checkpoint import CheckpointRef
from orchestrator.domain.cluster import Node
from orchestrator.domain.codec import KIND, decode, encode
from orchestrator.domain.copying import Copying
from orchestrator.domain.cordon import Cordon
from orchestrator.domain.events import HistoryEntry, StepRecord
from orchestrator.domain.faults import Injected
from orchestrator.domain.generation import Evaluation
from orchestrator.domain.ids import Device, Generation, NodeId
from orchestrator.domain.incident import Incident
from orchestrator.domain.job import JobRecord
from orchestrator.domain.kinds import DeviceKind, Kinds
from orchestrator.domain.plan import Plan
from orchestrator.domain.quarantine import Quarantine
from orchestrator.domain.queue import Project, Waiting, WaitReason
from orchestrator.domain.rows import corrected, words
from orchestrator.domain.state import Cancelled, Failed, Probing, Queued, Reforming, Running, Starting, Succeeded
from orchestrator.domain.status import RESIZES, aside_of, reason_of, status_of
from orchestrator.ports import Gap

from . import views
from .job_files import job_file

PLANNING, INFEASIBLE = WaitReason.PLANNING, WaitReason.INFEASIBLE


def summary(record: JobRecord, waiting: Waiting | None = None) -> views.JobSummary:
    """waiting: its place in the queue, where it has one."""
    return views.JobSummary(**_summary(record, waiting))  # type: ignore[arg-type]


def is_open(record: JobRecord) -> bool:
    return not isinstance(record.state, Succeeded | Failed | Cancelled)


def waiting(one: Waiting) -> views.WaitingView:
    return views.WaitingView(
        job=one.job,
        position=one.position,
        reason=one.reason.value,
        message=one.message,
        priority=one.priority,
        project=one.project,
        least=one.least,
        since=instant(one.since),
    )


def project(one: Project, sizes: Mapping[str, int], waits: Mapping[str, int]) -> views.ProjectView:
    """sizes, waits: devices held and jobs waiting, by project."""
    name = one.name
    return views.ProjectView(
        name=name, max_devices=one.max_devices, num_devices=sizes.get(name, 0), num_waiting=waits.get(name, 0)
    )


def job(
    record: JobRecord, revision: int, now: float, waiting: Waiting | None = None, mfu: float | None = None
) -> views.JobView:
    plan = current_plan(record)
    return views.JobView(
        **_summary(record, waiting),  # type: ignore[arg-type]
        revision=revision,
        tokens_per_step=tokens_per_step(record),
        typical_step_s=record.typical_step_s,
        mfu=mfu,
        num_params=record.profile.num_params if record.profile else None,
        size=views.SizeView(**asdict(record.wanted_size)),
        plan=_plan(*plan, record.pids) if plan else None,
        incidents=tuple(_incident(item) for item in record.incidents),
        spares=tuple(
            views.SpareView(node=node, devices=tuple(map(str, spare.devices)), is_ready=spare.is_ready)
            for node, spare in sorted(record.spares.items())
        ),
        at_risk=record.at_risk,
        false_alarms=record.false_alarms,
        copies=tuple(_copy(one) for _, copies in sorted(record.copies.items()) for one in copies),
        checkpoint=next(iter(checkpoints(record)), None),
        failure=_failure(record),
        attempts=_attempts(record),
        goodput=goodput(record, now),
        evaluation=evaluation(record.evaluation) if record.evaluation is not None else None,
        spec=job_file(record.spec),
    )


def fault(one: Injected) -> views.FaultView:
    asked = encode(one.asked)
    return views.FaultView(
        id=one.id,
        kind=one.asked.fault,
        at=one.asked.at,
        seed=one.asked.seed,
        asked={name: value for name, value in asked.items() if value not in (None, "", 0) and name not in (KIND, "id")},
        asked_at=instant(one.asked_at),
        devices=tuple(map(str, one.devices)),
        node=one.node,
        carried_out_at=instant(one.carried_out_at) if one.carried_out_at is not None else None,
        step=one.step,
        message=one.message,
        incident=one.incident,
        detected_as=one.cause,
        seen=one.seen,
        detected_s=one.detected_s,
        pause_s=one.pause_s,
        rolled_back=one.rolled_back,
        verdict=one.verdict,
        why=one.why,
    )


def submitted(record: JobRecord) -> views.SubmittedView:
    url = f"/api/v1/jobs/{record.id}"
    return views.SubmittedView(
        id=record.id, name=record.spec.name, created_at=instant(record.created_at), url=url, events_url=f"{url}/events"
    )


def event(id: str, entry: HistoryEntry) -> views.EventView:
    return views.EventView(
        id=id,
        type=entry.type,
        at=instant(entry.at),
        message=entry.message,
        status=entry.status,
        generation=entry.generation,
        step=entry.step,
        data=dict(encode(dict(entry.data))),
    )


def evaluation(found: Evaluation) -> views.EvaluationView:
    return views.EvaluationView(step=found.step, loss=found.loss)


def step(id: str, record: StepRecord) -> views.StepView:
    return views.StepView(
        id=id,
        step=record.answer.step,
        loss=_finite(record.answer.loss),
        norm=_finite(record.answer.norm),
        eval_loss=record.answer.evaluation.loss if record.answer.evaluation is not None else None,
        tokens=record.tokens,
        seconds=record.seconds,
        busy={str(device): spent for device, spent in record.busy.items()},
        generation=record.generation,
        at=instant(record.at),
    )


def gap(id: str, item: Gap) -> views.GapView:
    return views.GapView(id=id, resumes_at=item.resumes_at)


def nodes(
    items: Iterable[Node],
    quarantine: Collection[Quarantine],
    cordons: Collection[Cordon],
    admissions: Collection[Admission],
    configured: Iterable[DeviceKind] = (),
) -> list[views.NodeView]:
    """configured: kinds of device besides those that everybody knows."""
    items = tuple(items)
    rows = corrected(configured, {item.id: item.kind for item in items}, admissions)
    said = {row.name: words(row) for row in rows}
    return [node(item, quarantine, cordons, admissions, said.get(item.kind, "")) for item in items]


def node(
    item: Node,
    quarantine: Iterable[Quarantine] = (),
    cordons: Iterable[Cordon] = (),
    admissions: Iterable[Admission] = (),
    counts_as: str = "",
) -> views.NodeView:
    """quarantine, cordons, admissions: of the whole cluster. counts_as: of its kind, where benchmarks corrected that."""
    admission = next((one for one in admissions if one.node == item.id), None)
    cordon = next((one for one in cordons if one.node == item.id), None)
    return views.NodeView(
        id=item.id,
        kind=item.kind,
        num_devices=item.num_devices,
        status=item.status.value,
        address=item.address,
        labels=dict(item.labels),
        quarantine=tuple(_quarantine(one) for one in quarantine if one.device.node == item.id),
        admission=admission.standing.value if admission else "unchecked",
        admission_reason=admission.why if admission else "",
        checked="; ".join(filter(None, (admission.said if admission else "", counts_as))),
        scheduling=_scheduling(cordon),
        removed=cordon is not None and cordon.removes,
        deadline=instant(cordon.deadline) if cordon and cordon.deadline is not None else None,
    )


def _scheduling(cordon: Cordon | None) -> str:
    if cordon is None:
        return "open"
    if not cordon.drains:
        return "cordoned"
    return "drained" if cordon.is_empty else "draining"


def _quarantine(one: Quarantine) -> views.QuarantineView:
    return views.QuarantineView(
        device=str(one.device),
        standing=one.standing.value,
        reason=one.reason,
        since=instant(one.since),
        strikes=one.strikes,
        job=one.job,
        said=one.said,
    )


def instant(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def tokens_per_step(record: JobRecord) -> int:
    train = record.spec.train
    return train.micro_batches * train.micro_batch_size * train.sequence


def current_plan(record: JobRecord) -> tuple[Generation, Plan] | None:
    """The plan that is running, or being formed, or was the last to run."""
    match record.state:
        case Running(generation=generation, plan=plan):
            return generation, plan
        case Starting(forming=forming):
            return forming.generation, forming.plan
        case Reforming(forming=forming) if forming is not None:
            return forming.generation, forming.plan
        case _:
            newest = max(record.plans, default=None)
            return (newest, record.plans[newest]) if newest is not None else None


def mfu(record: JobRecord, kinds: Mapping[NodeId, str], table: Kinds) -> float | None:
    """Of the published bf16 rate of the plan's devices, 6 operations per parameter and token: attention's are left out.

    None while it does not step, and where a device's kind is in no table. kinds: of nodes.
    """
    plan, rate = current_plan(record), tokens_per_s(record)
    if rate is None or record.profile is None or plan is None:
        return None
    known = [table.get(kinds.get(device.node, "")) for device in plan[1].devices]
    peak = sum(kind.bf16_tflops * 1e12 for kind in known if kind is not None)
    return 6 * record.profile.num_params * rate / peak if None not in known and peak else None


def tokens_per_s(record: JobRecord) -> float | None:
    """Of its typical step. Of a job that is not stepping the last rate is history, not a rate."""
    is_stepping = isinstance(record.state, Running) and record.typical_step_s
    return tokens_per_step(record) / record.typical_step_s if is_stepping and record.typical_step_s else None


def _summary(record: JobRecord, line: Waiting | None) -> dict[str, object]:
    plan = current_plan(record)
    finished = record.state.at if isinstance(record.state, Succeeded | Failed | Cancelled) else None
    return {
        "id": record.id,
        "name": record.spec.name,
        "status": status_of(record.state).value,
        "reason": _reason(record, line),
        "priority": record.priority,
        "project": record.spec.project,
        "user": record.by.name if record.by is not None else None,
        "next_action_at": _next_action_at(record),
        "archived_at": instant(record.archived_at) if record.archived_at is not None else None,
        "waiting": waiting(line) if line is not None and isinstance(record.state, Probing | Queued) else None,
        "generation": record.generation,
        "step": record.committed,
        "steps": record.spec.train.steps,
        "loss": _finite(record.last_answer.loss) if record.last_answer and record.last_answer.losses else None,
        "tokens_per_s": tokens_per_s(record),
        "recoveries": sum(item.fault.cause not in RESIZES for item in record.incidents),
        "plan_summary": plan[1].describe() if plan else None,
        "labels": dict(record.spec.labels),
        "created_at": instant(record.created_at),
        "started_at": instant(record.started_at) if record.started_at is not None else None,
        "finished_at": instant(finished) if finished is not None else None,
    }


def _next_action_at(record: JobRecord) -> datetime | None:
    """The sooner of its deadlines that can pass."""
    spec, turn = record.spec, record.turn
    if not is_open(record):
        return None
    begins_by = record.created_at + spec.start_by_s if spec.start_by_s and record.started_at is None else None
    ends_by = turn.held_since + spec.max_runtime_s - turn.held_s if spec.max_runtime_s and turn.held_since else None
    known = [at for at in (begins_by, ends_by) if at is not None]
    return instant(min(known)) if known else None


def _reason(record: JobRecord, line: Waiting | None) -> str:
    if line is not None and isinstance(record.state, Queued) and line.reason not in (PLANNING, INFEASIBLE):
        return f"{line.message} (number {line.position} in the queue)"
    return aside_of(record) or reason_of(record.state)


def plans(record: JobRecord, entries: Iterable[HistoryEntry]) -> list[views.PlanView]:
    """Of every generation that has trained, as the history has them; the current one with its processes."""
    found: dict[Generation, Plan] = {}
    for entry in entries:
        if entry.type == "running" and "plan" in entry.data:
            found[entry.generation] = decode(Plan, entry.data["plan"])
    current = current_plan(record)
    if current is not None:
        found[current[0]] = current[1]
    known = {current[0]: record.pids} if current is not None else {}
    return [_plan(generation, plan, known.get(generation, {})) for generation, plan in sorted(found.items())]


def _plan(generation: Generation, plan: Plan, pids: Mapping[Device, int]) -> views.PlanView:
    return views.PlanView(
        generation=generation,
        tp=plan.tp,
        pp=plan.pp,
        dp=plan.dp,
        summary=plan.describe(),
        reason=plan.reason,
        micro_batches=tuple(pipeline.micro_batches for pipeline in plan.pipelines),
        seats=tuple(
            views.SeatView(
                rank=seat.rank,
                device=str(seat.device),
                pipeline=seat.pipeline,
                stage=seat.stage,
                tp=seat.tp,
                layers=(plan.stage_at(seat).first, plan.stage_at(seat).last),
                pid=pids.get(seat.device),
            )
            for seat in plan.seats
        ),
    )


def _incident(item: Incident) -> views.IncidentView:
    return views.IncidentView(
        number=item.number,
        cause=item.fault.cause.value,
        is_resize=item.fault.cause in RESIZES,
        message=item.fault.message,
        at=instant(item.fault.at),
        devices=tuple(str(device) for device in item.fault.devices),
        generation=item.generation,
        next_generation=item.next_generation,
        decision=item.decision,
        source=item.source,
        committed=item.committed,
        rolled_back=item.rolled_back,
        moved_elements=item.moved_elements,
        attempts=item.attempts,
        phases=dict(item.phases),
        pause_s=item.pause_s,
        rung=item.rung.value if item.rung else None,
        predicted_pause_s=item.predicted_pause_s,
        predicted=dict(item.predicted),
        options=tuple(
            views.OptionView(rung=one.rung.value, why=one.why, price_s=one.price_s, pause_s=one.pause_s)
            for one in item.options
        ),
        stack=item.stack,
    )


def _copy(one: Copying) -> views.CopyView:
    return views.CopyView(
        device=str(one.device),
        what=one.what,
        step=one.step,
        done_bytes=one.done_bytes,
        total_bytes=one.total_bytes,
        seconds=one.seconds,
        bytes_per_s=one.bytes_per_s,
    )


def checkpoints(record: JobRecord) -> list[views.CheckpointView]:
    """Newest first."""
    known = (record.checkpoint, *record.older) if record.checkpoint else ()
    found: list[views.CheckpointView] = []
    read: int | None = 0
    before: CheckpointRef | None = None
    for one in reversed(known):  # an entry comes after what it is read through
        goes_on = before is not None and (one.generation, one.step - 1) == (before.generation, before.step)
        base = read if one.depth and goes_on else (None if one.depth else 0)
        read = base + one.total_bytes if base is not None and one.total_bytes is not None else None
        found.append(_checkpoint(one, read))
        before = one
    return found[::-1]


def _checkpoint(one: CheckpointRef, total_bytes: int | None) -> views.CheckpointView:
    return views.CheckpointView(
        step=one.step,
        generation=one.generation,
        path=one.path,
        kind="entry" if one.depth else "base",
        depth=one.depth,
        new_bytes=one.new_bytes,
        total_bytes=total_bytes,
        seconds=one.seconds or None,
        at=instant(one.at) if one.at else None,
        verified=one.is_proven,
        tier="local+shared" if one.local else "shared",
        local=one.local,
    )


def _failure(record: JobRecord) -> views.FailureView | None:
    if not isinstance(record.state, Failed):
        return None
    failed = record.state
    return views.FailureView(
        message=failed.message,
        device=str(failed.device) if failed.device else None,
        rank=rank_of(record, failed.device),
        exit_code=failed.exit_code,
        log_tail=failed.log_tail,
        verdict=failed.verdict,
    )


def _attempts(record: JobRecord) -> tuple[views.AttemptsView, ...]:
    budget = record.spec.recovery
    used = Counter((f.fault.cause, f.fault.is_external) for f in record.failures if f.counts)
    return tuple(
        views.AttemptsView(
            cause=cause.value,
            is_external=is_external,
            used=count,
            limit=budget.max_external_attempts if is_external else budget.max_attempts,
        )
        for (cause, is_external), count in sorted(used.items())
    )


def goodput(record: JobRecord, now: float) -> views.GoodputView:
    ended = record.state.at if isinstance(record.state, Succeeded | Failed | Cancelled) else now
    wall = max(0.0, ended - record.created_at)
    start = min(wall, (record.started_at or ended) - record.created_at)
    causes: dict[str, float] = defaultdict(float)
    for item in record.incidents:
        # One that is open has paused training until now.
        causes[item.fault.cause] += item.pause_s if item.pause_s is not None else max(0.0, ended - item.fault.at)
        causes["run_again"] += item.rolled_back * (record.typical_step_s or 0.0)
    paused = min(wall - start, record.paused_until(ended))
    queued = min(wall - start - paused, record.queued_until(ended))
    left = max(0.0, wall - start - paused - queued)
    total = sum(causes.values())
    lost = min(left, total)
    scale = lost / total if total > 0 else 0.0  # pauses of incidents that ran into each other are counted in both
    spent = {cause: seconds * scale for cause, seconds in sorted(causes.items()) if seconds > 0}
    spent |= {"paused": paused} if paused else {}
    spent |= {"queue": queued} if queued else {}
    return views.GoodputView(
        wall_s=wall,
        causes={"training": left - lost, "start": start, **spent},
        share=(left - lost) / left if record.started_at is not None and left > 0 else None,
    )


def rank_of(record: JobRecord, device: Device | None) -> int | None:
    plan = current_plan(record)
    if device is None or plan is None or device not in plan[1].seat_of:
        return None
    return plan[1].seat_of[device].rank


def _finite(value: float) -> float | None:
    """JSON has no NaN: a loss that is none is null."""
    return value if math.isfinite(value) else None
