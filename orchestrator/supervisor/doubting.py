"""Numbers that cannot be right: what a rank's finding means for its generation, and for the devices it points at.

| finding            | generation           | state comes from | accused                       |
|--------------------|----------------------|------------------|-------------------------------|
| state disagrees    | closed               | the checkpoint   | owner and mirror              |
| gradient disagrees | closed, step not made| memory           | both who computed it          |
| memory changed     | closed, step not made| other holders    | the rank's own device         |
| not finite         | closed, step not made| memory, once     | nobody; the second time: verdict |
| unreadable         | closed               | an older checkpoint; the same where its storage is away | nobody |
"""

from __future__ import annotations

from orchestrator.domain.failure import Cause, Fault
from orchestrator.domain.generation import Disagrees, NotFinite, RankReport, Unreadable
from orchestrator.domain.ids import Device, Generation
from orchestrator.domain.quarantine import Standing

from .draft import Draft

_SAYS = {
    "state": "{owner} and its mirror {mirror} hold different bits of the same interval",
    "gradient": "{owner} and {mirror} computed different gradients from the same micro-batch",
    "memory": "{owner} no longer holds the bits that its last update made",
}


def found_fault(draft: Draft, report: RankReport, generation: Generation) -> Fault | None:
    """What a report's finding is as a fault of this generation; None where it found nothing, or speaks of another one."""
    if report.generation != generation:
        return None
    match report.found:
        case None:
            return None
        case NotFinite(step=step, micro_batches=numbers):
            return Fault(
                cause=Cause.NOT_FINITE,
                message=report.cause,
                at=draft.now,
                signature=f"not finite: step {step}, micro-batches {list(numbers)}",
            )
        case Unreadable(step=step, is_away=is_away):
            cannot = f"reached from {report.device.node}" if is_away else "restored from"
            message = f"the checkpoint of step {step} cannot be {cannot}: {report.cause}"
            return Fault(cause=Cause.CHECKPOINT, message=message, at=draft.now, is_external=True)
        case Disagrees() as found:
            accused = _accused(draft, report, found)
            if not accused:
                return None
            message = _SAYS[found.about].format(owner=accused[0], mirror=accused[-1])
            return Fault(cause=Cause.CORRUPTION, message=message, at=draft.now, devices=accused, is_external=True)


def accuse(draft: Draft, fault: Fault, generation: Generation) -> bool:
    """Keep the devices of a corruption out of every plan until they are tested; whether any was in use.

    generation: whose ranks gave the evidence; what they tell again is no second strike.
    """
    is_new = False
    for device in fault.devices if fault.cause is Cause.CORRUPTION else ():
        quarantine = draft.ward.strike(device, fault.message, draft.record.id, generation)
        if quarantine is None:
            continue
        is_new = True
        held = quarantine.standing is Standing.HELD
        until = f"accused {quarantine.strikes} times: an operator has to release it" if held else "a self-test is to tell"
        draft.say(
            "quarantined",
            f"{device} is kept out of every plan, {until}: {fault.message}",
            device=str(device),
            strikes=quarantine.strikes,
        )
    return is_new


def _accused(draft: Draft, report: RankReport, found: Disagrees) -> tuple[Device, ...]:
    if found.about == "memory":
        return (report.device,)
    plan = draft.record.plans.get(report.generation)
    if plan is None or found.rank >= plan.world_size:
        return ()
    return (plan.seats[found.rank].device, report.device)
