"""What users call a state: one table from the kernel's states to the status words of the API, and a sentence for each.

| state                          | status     |
|--------------------------------|------------|
| Probing, Queued                | PENDING    |
| Starting                       | STARTING   |
| Running                        | RUNNING    |
| Reforming (a fault)            | RECOVERING |
| Reforming (grow, shrink)       | RESIZING   |
| Stopping                       | STOPPING   |
| Stopping (to pause), Paused    | PAUSING, PAUSED |
| Succeeded / Failed / Cancelled | the same   |
"""

from __future__ import annotations

from typing import assert_never

from .failure import Cause
from .job import JobRecord
from .state import (
    Cancelled,
    Failed,
    JobState,
    JobStatus,
    Paused,
    Probing,
    Queued,
    Reforming,
    Running,
    Starting,
    Stopping,
    Succeeded,
)

TERMINAL_STATUSES = frozenset({JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.CANCELLED})
RESIZES = frozenset({Cause.GROW, Cause.SHRINK, Cause.BALANCE, Cause.PAUSE})
"""What was wanted, and is no recovery."""


def status_of(state: JobState) -> JobStatus:
    match state:
        case Probing() | Queued():
            return JobStatus.PENDING
        case Starting():
            return JobStatus.STARTING
        case Running():
            return JobStatus.RUNNING
        case Reforming(fault=fault):
            return JobStatus.RESIZING if fault.cause in RESIZES else JobStatus.RECOVERING
        case Stopping(outcome=Paused()):
            return JobStatus.PAUSING
        case Stopping():
            return JobStatus.STOPPING
        case Paused():
            return JobStatus.PAUSED
        case Succeeded():
            return JobStatus.SUCCEEDED
        case Failed():
            return JobStatus.FAILED
        case Cancelled():
            return JobStatus.CANCELLED
        case _:
            assert_never(state)


def aside_of(record: JobRecord) -> str:
    """What its state does not say: that it is to pause, or which hosts of a running job are silent; empty where neither."""
    if record.pause is not None and not isinstance(record.state, Stopping):
        if record.pause.ends:
            return f"{record.pause.ends}; it ends as soon as its state is saved"
        if record.pause.preempted:
            return f"{record.pause.preempted}; it waits in the queue as soon as its state is saved"
        return "it pauses as soon as its state is saved"
    silent = record.unreachable & frozenset(record.state.plan.nodes) if isinstance(record.state, Running) else frozenset()
    return f"contact with {', '.join(sorted(silent))} is lost; training goes on while steps commit" if silent else ""


def reason_of(state: JobState) -> str:
    """Why the job is in this state, or what it is doing there, in one sentence; empty where the status says it all."""
    match state:
        case Probing():
            return "checking the program before any device is held"
        case Queued(reason=reason):
            return reason
        case Starting(forming=forming):
            return f"forming generation {forming.generation}: {forming.plan.describe()}"
        case Running(plan=plan):
            return plan.describe()
        case Reforming(fault=fault):
            return fault.message
        case Stopping(outcome=outcome):
            if isinstance(outcome, Paused):
                return "its hosts are being closed; it goes on from its newest checkpoint"
            after = status_of(outcome).value
            return (
                f"closing hosts, then {after}: {outcome.message}"
                if isinstance(outcome, Failed)
                else f"closing hosts, then {after}"
            )
        case Failed(message=message):
            return message
        case Paused():
            return "it was paused and holds no device; resume it to go on"
        case Cancelled(by=by):
            return f"cancelled by {by}" if by else ""
        case Succeeded():
            return ""
        case _:
            assert_never(state)
