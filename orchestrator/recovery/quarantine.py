"""What is held against a device, as its strikes and self-tests come in: pure functions from one value to the next.

strike ──> testing ──passed──> released, the strike remembered ──strike within REMEMBERED_S──> held
              `────failed────> held ──an operator releases it──> forgotten
"""

from __future__ import annotations

from dataclasses import replace

from orchestrator.domain.ids import Device, Generation, JobId
from orchestrator.domain.quarantine import Quarantine, Standing

REMEMBERED_S = 24 * 3600.0
"""A device that passes its self-test and is accused again within this time is not believed a second time."""


def struck(
    known: Quarantine | None, device: Device, reason: str, now: float, job: JobId, generation: Generation
) -> Quarantine:
    """One more accusation. Where the device is out already, or that generation's ranks had said so, it is the same one."""
    if known is not None and (known.is_out or (known.job, known.generation) == (job, generation)):
        return known
    strikes = 1 if known is None or is_forgotten(known, now) else known.strikes + 1
    standing = Standing.TESTING if strikes == 1 else Standing.HELD
    return Quarantine(
        device=device, reason=reason, since=now, job=job, generation=generation, strikes=strikes, standing=standing
    )


def tested(known: Quarantine, passed: bool, message: str) -> Quarantine:
    """The self-test's verdict; nothing changes for a device that was not waiting for one."""
    if known.standing is not Standing.TESTING:
        return known
    return replace(known, standing=Standing.RELEASED if passed else Standing.HELD, said=message, tester=None)


def is_forgotten(known: Quarantine, now: float) -> bool:
    return not known.is_out and now - known.since > REMEMBERED_S
