"""Building the next generation: hosts open, seats are prepared, then all are told to form and where state comes from."""

from __future__ import annotations

from dataclasses import replace

from orchestrator.domain.codec import encode
from orchestrator.domain.generation import Settlement
from orchestrator.domain.host_events import SeatsPrepared
from orchestrator.domain.ids import Device, Generation, NodeId, Step
from orchestrator.domain.incident import Incident
from orchestrator.domain.kinds import speed_of, table
from orchestrator.domain.layout import layout
from orchestrator.domain.origin import FromMemory
from orchestrator.domain.plan import Plan
from orchestrator.domain.requests import FormGeneration, OpenHost, PrepareSeats
from orchestrator.domain.rungs import Rung
from orchestrator.domain.state import Forming, Queued, Reforming, Running, Starting
from orchestrator.recovery.breaker import rest_s
from orchestrator.recovery.restore import Disks, RestorePlan, choose_restore, cold_restore
from orchestrator.recovery.risk import risk

from .believing import restored_from
from .draft import Draft
from .pacing import paced

RANK_PHASES = ("form", "build", "transfer", "gather")
"""One after another in every rank between being told to form and being ready; a fork happens while others settle."""
MAX_TOLD_RANKS = 4096
"""A plan for more is not kept in the history, for people to compare with the one before."""


def begin_forming(draft: Draft, plan: Plan) -> None:
    """Take `plan` as the next generation's: open the hosts it lacks, prepare seats where hosts are warm."""
    generation = draft.next_generation()
    ready = {node for node, spare in draft.record.spares.items() if spare.is_ready and node in plan.nodes}
    known = {device: at for device, at in draft.record.listeners.items() if device.node in ready}
    forming = Forming(
        generation=generation, plan=plan, addresses={device: known[device] for device in plan.devices if device in known}
    )
    state = draft.state
    draft.set(
        generation=generation,
        plans={**draft.record.plans, generation: plan},
        target=None,
        spares={node: spare for node, spare in draft.record.spares.items() if node not in plan.nodes},
    )
    if isinstance(state, Queued):
        draft.become(Starting(forming=forming))
    else:
        assert isinstance(state, Reforming)
        draft.become(replace(state, forming=forming, waiting=None, is_stuck=False))
        draft.update_incident(next_generation=generation, decision=plan.reason or plan.describe())
    _note_exactness(draft, plan)
    for node in plan.nodes:
        open_host(draft, node)
        if node in draft.record.warm and node not in ready:
            _prepare(draft, forming, node)
    try_form(draft)


def open_host(draft: Draft, node: NodeId) -> None:
    """Ask for a host on a node, once."""
    record = draft.record
    if node in record.hosts:
        return
    assert record.profile is not None
    draft.set(hosts=record.hosts | {node})
    draft.call(
        node,
        OpenHost(
            job=record.id,
            node=node,
            num_devices=draft.num_devices.get(node, 1),
            spec=record.spec,
            profile=record.profile,
            checkpoint_dir=draft.checkpoint_folder,
            log_dir=f"{draft.root}/jobs/{record.id}/logs",
            kind=draft.kinds.get(node, ""),
            speed=speed_of(draft.kinds.get(node, ""), table(draft.rows)),
            secrets_dir=f"{draft.root}/secrets",
        ),
    )


def host_opened(draft: Draft, node: NodeId) -> None:
    if node in draft.record.warm:
        return  # told again
    draft.set(warm=draft.record.warm | {node})
    forming = current_forming(draft)
    if forming and node in forming.plan.nodes:
        _prepare(draft, forming, node)


def seats_prepared(draft: Draft, said: SeatsPrepared) -> None:
    forming = current_forming(draft)
    if forming is None or said.generation != forming.generation or forming.formed:
        return  # told late or again: by now these processes may have ended, and that may have been told already
    draft.set(
        pids={**draft.record.pids, **said.pids},
        listeners={**draft.record.listeners, **said.addresses},
    )
    _set_forming(draft, replace(forming, addresses={**forming.addresses, **said.addresses}))
    try_form(draft)


def prepare_again(draft: Draft, device: Device) -> None:
    """The rank on `device` died before its generation was formed; its host is fine."""
    forming = current_forming(draft)
    if forming and not forming.formed and device in forming.plan.seat_of:
        left = {d: a for d, a in forming.addresses.items() if d != device}
        _set_forming(draft, replace(forming, addresses=left))
        if device.node in draft.record.warm:
            _prepare(draft, forming, device.node)


def try_form(draft: Draft) -> None:
    """Send the form once every seat has an address and the generation before it is settled."""
    state = draft.state
    forming = current_forming(draft)
    if forming is None or forming.formed:
        return
    settlement = state.closing.settlement if isinstance(state, Reforming) else None
    if isinstance(state, Reforming):
        if settlement is None:
            return
        forming = replace(forming, addresses={**_waiting(draft, state, forming.plan), **forming.addresses})
    if any(device not in forming.addresses for device in forming.plan.devices):
        return
    if isinstance(state, Reforming) and not state.is_rested and rest_s(draft.record.failures):
        return  # see end_rest
    restore = _restore(draft, forming, settlement)
    donors: tuple[Device, ...] = ()
    if isinstance(restore.restore, FromMemory):
        senders = {move.source for move in restore.restore.moves}
        donors = tuple(sorted(senders - set(forming.plan.devices)))
    addresses = {**{donor: draft.record.listeners[donor] for donor in donors}, **forming.addresses}
    _set_forming(draft, replace(forming, addresses=addresses, formed=True))
    _note(draft, restore)
    # Everybody who has a process is told, so that those without a seat let go of their memory and device; spares keep
    # what they have.
    pacing = paced(draft, forming.generation)
    told = {*forming.plan.nodes, *(device.node for device in draft.record.pids)} - set(draft.record.spares)
    for node in sorted(told):
        draft.call(
            node,
            FormGeneration(
                generation=forming.generation,
                plan=forming.plan,
                addresses=addresses,
                restore=restore.restore,
                committed=restore.step,
                donors=donors,
                pacing=pacing,
            ),
        )


def end_rest(draft: Draft) -> None:
    """Connections broke, or storage was away, again and again, and has been left alone for a while: try again."""
    state = draft.state
    assert isinstance(state, Reforming)
    draft.become(replace(state, is_rested=True))
    try_form(draft)


def loses_steps(draft: Draft, settlement: Settlement) -> bool:
    """Whether committed steps would have to be run again if the next generation had to start from what is at hand."""
    plan = draft.record.plans.get(settlement.generation)
    if settlement.is_distrusted:
        return False  # whatever the silent ones hold could not be used
    return plan is not None and _choose(draft, plan, settlement).step < settlement.step


def rank_ready(draft: Draft, device: Device, generation: Generation, phases: dict[str, float]) -> None:
    forming = current_forming(draft)
    if forming is None or generation != forming.generation or not forming.formed:
        return
    incident = draft.incident
    if incident and incident.next_generation == generation:
        slowest = {name: max(seconds, incident.phases.get(name, 0.0)) for name, seconds in phases.items()}
        if any(incident.phases.get(name) != seconds for name, seconds in slowest.items()):
            draft.update_incident(phases=slowest)
    ready = forming.ready | {device}
    _set_forming(draft, replace(forming, ready=ready))
    if len(ready) >= forming.plan.world_size and ready >= set(forming.plan.devices):
        now_running(draft)


def now_running(draft: Draft) -> None:
    """Everybody is ready, or a step of the new generation has passed, which proves it."""
    forming = current_forming(draft)
    assert forming is not None
    incident = draft.incident
    if incident and incident.next_generation == forming.generation and incident.formed_at:
        # What ranks do not account for themselves: the form's way to them and their answers' way back.
        inside = sum(incident.phases.get(name, 0.0) for name in RANK_PHASES)
        draft.update_incident(phases={"deliver": max(0.0, draft.now - incident.formed_at - inside)})
    plans = {**plan_of_copies(draft), **_of_idle_donors(draft, forming.plan), forming.generation: forming.plan}
    draft.become(Running(generation=forming.generation, plan=forming.plan))
    draft.risk(risk(forming.plan, mirrors=draft.record.spec.recovery.mirrors))
    draft.set(
        plans=plans,
        doubted=Generation(0),
        started_at=draft.record.started_at or draft.now,
        paused_s=draft.record.paused_until(draft.now),
        paused_since=None,
        last_step_at=None,
    )
    draft.leave_queue()
    plan = {"plan": encode(forming.plan)} if forming.plan.world_size <= MAX_TOLD_RANKS else {}
    draft.say("running", f"generation {forming.generation} trains: {forming.plan.describe()}", **plan)


def plan_of_copies(draft: Draft) -> dict[Generation, Plan]:
    """The plan that the newest checkpoint was written under, where it says on whose own disk which part of it is."""
    checkpoint = draft.record.checkpoint
    by = draft.record.plans.get(checkpoint.generation) if checkpoint and checkpoint.local else None
    return {checkpoint.generation: by} if checkpoint and by else {}


def _of_idle_donors(draft: Draft, plan: Plan) -> dict[Generation, Plan]:
    """Plans by which processes without a seat hold what they gave: until a step is committed it may be needed again."""
    state = draft.state
    settlement = state.closing.settlement if isinstance(state, Reforming) else None
    holders = settlement.holders if settlement else ()
    held = {g for device, g in holders if device in draft.record.pids and device not in plan.seat_of}
    return {g: found for g, found in draft.record.plans.items() if g in held}


def current_forming(draft: Draft) -> Forming | None:
    state = draft.state
    return state.forming if isinstance(state, Starting | Reforming) else None


def at_work(draft: Draft) -> tuple[Generation, Plan] | None:
    """The generation that trains, or was told to form: its ranks may train before all have said that they are ready."""
    state = draft.state
    if isinstance(state, Running):
        return state.generation, state.plan
    forming = current_forming(draft)
    return (forming.generation, forming.plan) if forming and forming.formed else None


def _waiting(draft: Draft, state: Reforming, plan: Plan) -> dict[Device, str]:
    """Where survivors listen: who has reported lives and waits, and need not be asked whether it does."""
    here = draft.record.listeners
    reported = set(state.closing.reports) - state.lost
    return {device: here[device] for device in plan.devices if device in reported and device in here}


def _set_forming(draft: Draft, forming: Forming) -> None:
    state = draft.state
    assert isinstance(state, Starting | Reforming)
    draft.become(replace(state, forming=forming))


def _prepare(draft: Draft, forming: Forming, node: NodeId) -> None:
    draft.call(node, PrepareSeats(generation=forming.generation, devices=forming.plan.by_node.get(node, ())))


def _restore(draft: Draft, forming: Forming, settlement: Settlement | None) -> RestorePlan:
    if settlement is None:
        return _cold(draft, forming.plan)
    return _choose(draft, forming.plan, settlement)


def _cold(draft: Draft, target: Plan) -> RestorePlan:
    record = draft.record
    assert record.profile is not None
    checkpoint = record.checkpoint
    if checkpoint is None or not checkpoint.local:
        return cold_restore(checkpoint)
    wanted = layout(target, record.profile, mirrors=record.spec.recovery.mirrors)
    return cold_restore(
        checkpoint, wanted=wanted, disks=Disks.of(checkpoint, record.plans.get(checkpoint.generation), record.profile)
    )


def _choose(draft: Draft, target: Plan, settlement: Settlement) -> RestorePlan:
    record = draft.record
    assert record.profile is not None
    living = frozenset(record.pids) - (draft.state.lost if isinstance(draft.state, Reforming) else frozenset())
    return choose_restore(
        settlement=settlement,
        plans=record.plans,
        usable=living,
        target=target,
        profile=record.profile,
        mirrors=record.spec.recovery.mirrors,
        checkpoint=record.checkpoint,
    )


def _note_exactness(draft: Draft, plan: Plan) -> None:
    """An exact job has the same bits under every plan of one tp on one kind of device; another is said."""
    kinds = {draft.kinds.get(node) for node in plan.nodes}
    if not draft.record.spec.train.exact or None in kinds:
        return
    before, now = draft.record.exact_on, f"tp{plan.tp} on {' and '.join(sorted(map(str, kinds)))}"
    draft.set(exact_on=now)
    if before not in ("", now):
        draft.say(
            "exactness_changed",
            f"from the next step on weights have the bits of {now}, no longer those of {before}",
            before=before,
            now=now,
        )


def _note(draft: Draft, restore: RestorePlan) -> None:
    """Take the step training goes on from into the record, with what it cost."""
    rolled_back = max(0, draft.record.committed - restore.step)
    incident = draft.incident
    if isinstance(draft.state, Reforming) and incident:
        waited = max(0.0, draft.now - (incident.closed_at or draft.now))
        if incident.rung is not None and (rung := _rung(incident, restore)) is not incident.rung:
            draft.update_incident(rung=rung)
        draft.update_incident(
            phases={"prepare": waited},
            formed_at=draft.now,
            committed=restore.step,
            rolled_back=incident.rolled_back + rolled_back,
            source=restore.reason,
            moved_elements=restore.moved_elements,
        )
    elif rolled_back and incident:  # the one for which it had given up its devices
        draft.update_incident(rolled_back=incident.rolled_back + rolled_back)
    restored_from(draft, restore.restore)
    if restore.step != draft.record.committed:
        # Ahead, where a checkpoint was committed only after the steps up to it had been rolled back.
        # With its answer: should this generation end before it commits anything, it is what the next one is told.
        draft.set(committed=Step(restore.step), last_answer=restore.answer)
    seen = draft.record.evaluation
    if seen is not None and seen.step > restore.step:  # of a state that is made again, and then judged again
        draft.set(evaluation=None)
    if rolled_back:
        draft.say("rolled_back", f"{rolled_back} committed steps are run again: {restore.reason}", steps=rolled_back)


def _rung(incident: Incident, restore: RestorePlan) -> Rung | None:
    """What was taken in the end: only the reports say whether memory holds everything."""
    if not isinstance(restore.restore, FromMemory):
        return Rung.CHECKPOINT
    if incident.rung is not Rung.CHECKPOINT:
        return incident.rung
    return next((option.place for option in incident.options if option.place), incident.rung)
