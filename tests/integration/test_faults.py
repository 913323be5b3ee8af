"""Every kind of fault that one machine can have, on real processes: carried out, told, judged, and survived."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from orchestrator.domain.events import CancelRequested
from orchestrator.domain.faults import FaultKind, FaultRequested, Injected, Verdict
from orchestrator.domain.job import JobRecord
from orchestrator.domain.state import Cancelled, Running
from tests.jobs import ENDLESS, a_job, largest_gap
from tests.rig import JOB, a_rig

pytestmark = pytest.mark.timeout(240)

FAULTS = (
    FaultRequested(fault=FaultKind.SLOW, job=JOB, rank=1, duration_s=0.5, factor=3.0),
    FaultRequested(fault=FaultKind.STOP, job=JOB, rank=2, duration_s=0.3),
    FaultRequested(fault=FaultKind.STOP, job=JOB, rank=3, duration_s=0.3, at="in_gather"),
    FaultRequested(fault=FaultKind.GIL_HANG, job=JOB, rank=2, duration_s=1.0),
    FaultRequested(fault=FaultKind.SLOW_LINK, job=JOB, rank=5, duration_s=0.5, factor=1e6),
    FaultRequested(fault=FaultKind.CUT_LINK, job=JOB, rank=3, duration_s=0.5),
    FaultRequested(fault=FaultKind.CLOCK_JUMP, job=JOB, jump_s=3600.0),
    FaultRequested(fault=FaultKind.CLOCK_JUMP, job=JOB, jump_s=-3600.0),
    FaultRequested(fault=FaultKind.RAISE, job=JOB, rank=7, at="in_compute"),
    FaultRequested(fault=FaultKind.EXIT, job=JOB, rank=6, exit_code=3, at="after_gather"),
    FaultRequested(fault=FaultKind.ZYGOTE_KILL, job=JOB, rank=6),
    FaultRequested(fault=FaultKind.HOST_KILL, job=JOB, rank=2),
)
MESSAGES = {
    FaultKind.SLOW: "3 times slower",
    FaultKind.GIL_HANG: "holds the interpreter's lock",
    FaultKind.SLOW_LINK: "at most 1e+06 bytes/s",
    FaultKind.CUT_LINK: "to 6 ranks of other nodes nothing gets through for 0.5 s",
    FaultKind.RAISE: "raises at in_compute",
    FaultKind.EXIT: "exits with code 3 at after_gather",
}
STEPS_AFTER = 5
AGAIN_S = 0.5
"""From what was refused to the same once more."""
ENDS_A_GENERATION = {FaultKind.RAISE, FaultKind.EXIT, FaultKind.ZYGOTE_KILL, FaultKind.HOST_KILL}


def test_every_kind_is_carried_out_judged_and_survived(tmp_path: Path) -> None:
    """One after another, each once the one before has been judged or its victims are in use again; what came while the job
    was growing again, and was refused, is asked for once more."""
    spec = a_job(steps=ENDLESS)
    num_asked, asked_at = 0, 0.0

    async def scenario() -> None:
        async with a_rig(tmp_path, num_nodes=4, num_devices=2) as rig:

            async def disturb(step: int) -> None:
                nonlocal num_asked, asked_at
                record = await rig.store.get(JOB)
                if step < 3 or not isinstance(record.state, Running) or len(record.injected) != num_asked:
                    return
                taken = _taken(record)
                if taken and not _is_through(taken[-1]):
                    return
                is_refused = bool(record.injected) and record.injected[-1].verdict is Verdict.REFUSED
                if is_refused and time.monotonic() < asked_at + AGAIN_S:
                    return  # a record keeps so many only, and a quick machine makes many steps while a job grows
                if len(taken) < len(FAULTS):
                    num_asked, asked_at = num_asked + 1, time.monotonic()
                    await rig.store.command(FAULTS[len(taken)])
                elif step > record.incidents[-1].committed + STEPS_AFTER:
                    await rig.store.command(CancelRequested(job=JOB))

            job = await rig.run(spec, disturb)
            assert isinstance(job.state, Cancelled), job.state
            assert [one.asked.fault for one in _taken(job)] == [asked.fault for asked in FAULTS]
            for one in _taken(job):
                print(one.asked.fault, one.message, one.cause, one.detected_s, one.pause_s, one.verdict, one.why)
                assert one.carried_out_at is not None, one
                assert MESSAGES.get(one.asked.fault, "") in one.message, one
                ended = one.asked.fault in ENDS_A_GENERATION
                assert one.verdict is Verdict.RECOVERED or (one.verdict is Verdict.HARMLESS and not ended), one
            assert sum(incident.rolled_back for incident in job.incidents) == 0
            assert largest_gap(rig.losses, spec, len(rig.losses)) <= 1e-5

    asyncio.run(scenario())


def _taken(record: JobRecord) -> list[Injected]:
    return [one for one in record.injected if one.verdict is not Verdict.REFUSED]


def _is_through(one: Injected) -> bool:
    if one.asked.fault in ENDS_A_GENERATION:
        return one.verdict is not Verdict.OPEN
    return one.carried_out_at is not None
