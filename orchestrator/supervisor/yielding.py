"""A job makes room for one of higher priority: it becomes smaller, and where that is too little it is put aside.

    Running ──yields some──> Running on less, what it left is cleared        no step is lost, nothing is charged
    Running ──yields all───> saved, Paused, Queued: it goes on by itself once there is room
    Reforming, for long without a plan ──yields all───> Paused, Queued: it goes on from its newest checkpoint

Who yields what is the arbiter's (jobs/arbitration.py). It refuses to know for what the devices are used then.
"""

from __future__ import annotations

from orchestrator.domain.job import Pause
from orchestrator.domain.queue import WaitReason
from orchestrator.domain.requests import CloseHost, KillRank
from orchestrator.domain.state import Paused, Queued, Reforming, Running
from orchestrator.jobs.arbitration import Allotment

from .draft import Draft
from .joining import drop_join
from .moving import look_again
from .pausing import rest_where_asked
from .stopping import stop


def make_room(draft: Draft, allotment: Allotment | None) -> None:
    """Do what the arbiter says this job has to give up, once; stop giving it up where nobody needs it any more."""
    if isinstance(draft.state, Queued) and draft.record.turn.yields:
        draft.turn(yields=frozenset(), yields_to="", cleared=frozenset())
    if isinstance(draft.state, Reforming) and allotment is not None and allotment.is_put_aside:
        _stand_aside(draft, allotment)
    if allotment is None or not isinstance(draft.state, Running):
        return
    if allotment.is_put_aside:
        _put_aside(draft, allotment)
    elif draft.record.pause is None and allotment.yields != draft.record.turn.yields:
        _yield(draft, allotment)
    _clear(draft)


def _put_aside(draft: Draft, allotment: Allotment) -> None:
    why = f"{allotment.yields_to} has a higher priority and cannot start otherwise"
    draft.set(pause=Pause(preempted=why), target=None)
    draft.turn(yields=frozenset(), yields_to="")
    drop_join(draft)
    draft.say(
        "preempted",
        f"{why}; it makes one more step, saves it, and goes on by itself once there is room",
        to=allotment.yields_to,
    )
    rest_where_asked(draft)


def _stand_aside(draft: Draft, allotment: Allotment) -> None:
    """It does not fit what it holds, so that it can neither train nor be saved, and another could go on with it."""
    record, incident = draft.record, draft.incident
    if record.pause is not None and record.pause.ends:
        return  # it ends: see timing.py
    if record.pause is None:
        draft.set(pause=Pause(preempted=f"{allotment.yields_to} goes on with what it held"))
    saved = record.checkpoint.step if record.checkpoint else 0
    again = f"; the {record.committed - saved} steps after it are run again" if record.committed > saved else ""
    draft.say(
        "stood_aside",
        f"{allotment.yields_to} is before it and could go on with its devices, while no plan fits them alone; it waits in "
        f"the queue and goes on from its checkpoint of step {saved}{again}",
        to=allotment.yields_to,
    )
    if incident is not None and incident.pause_s is None:  # from here on it waits in the queue
        draft.update_incident(pause_s=max(0.0, draft.now - incident.fault.at - (record.typical_step_s or 0.0)))
    stop(draft, Paused(at=draft.now))


def _yield(draft: Draft, allotment: Allotment) -> None:
    before = draft.record.turn.yields
    draft.turn(yields=allotment.yields, yields_to=allotment.yields_to or "")
    state, target = draft.state, draft.record.target
    assert isinstance(state, Running)
    if allotment.yields & {*state.plan.devices, *(target.devices if target else ())} or not allotment.yields:
        look_again(draft)
    if allotment.yields - before:
        draft.say(
            "yielding",
            f"{len(allotment.yields)} devices go to {allotment.yields_to}, which has a higher priority",
            devices=sorted(str(device) for device in allotment.yields),
            to=allotment.yields_to,
        )


def _clear(draft: Draft) -> None:
    """End what is left of the job on devices it yields, once a step was made without them."""
    record, state = draft.record, draft.state
    if not isinstance(state, Running) or (draft.incident and draft.incident.pause_s is None):
        return
    needed = {*state.plan.devices, *(record.target.devices if record.target else ())}
    left = sorted((record.turn.yields & set(record.pids)) - needed - record.turn.cleared)
    if record.turn.cleared - set(record.pids):
        draft.turn(cleared=record.turn.cleared & set(record.pids))
    busy = {device.node for device in {*needed, *(set(record.pids) - record.turn.yields)}}
    for device in left:
        if device.node not in busy:
            if device.node in draft.record.hosts - draft.record.avoided:
                draft.set(avoided=draft.record.avoided | {device.node})
                draft.forget_processes(device.node)
                draft.call(device.node, CloseHost())
        else:
            draft.turn(cleared=draft.record.turn.cleared | {device})
            draft.call(device.node, KillRank(device=device, why=f"{record.turn.yields_to} is to have its device"))


def note_wait(draft: Draft, reason: WaitReason | None, message: str) -> None:
    """Tell people why it waits, whenever that becomes something else."""
    if reason is draft.record.turn.wait:
        return
    draft.turn(wait=reason)
    if reason in (WaitReason.BUSY, WaitReason.BEHIND, WaitReason.QUOTA):
        draft.say("waiting", message, reason=reason)
