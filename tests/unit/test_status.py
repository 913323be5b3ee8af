"""The table from the kernel's states to the words of the API."""

from __future__ import annotations

from typing import get_args

import pytest

from orchestrator.domain.failure import Cause, Fault
from orchestrator.domain.ids import Device, Generation, NodeId
from orchestrator.domain.plan import Pipeline, Plan, Stage
from orchestrator.domain.state import (
    TERMINAL,
    Cancelled,
    Closing,
    Failed,
    Forming,
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
from orchestrator.domain.status import TERMINAL_STATUSES, reason_of, status_of

PLAN = Plan(pipelines=(Pipeline(stages=(Stage(first=0, last=4, devices=(Device(NodeId("n"), 0),)),), micro_batches=(0,)),))


def reforming(cause: Cause) -> Reforming:
    fault = Fault(cause=cause, message=f"{cause} seen", at=1.0)
    return Reforming(fault=fault, closing=Closing(generation=Generation(1), awaited=frozenset()), forming=None)


PLANNED = (Cause.GROW, Cause.SHRINK, Cause.BALANCE, Cause.PAUSE)
TABLE: list[tuple[JobState, JobStatus]] = [
    (Probing(), JobStatus.PENDING),
    (Queued(reason="needs 8 devices, 6 usable"), JobStatus.PENDING),
    (Starting(forming=Forming(generation=Generation(1), plan=PLAN)), JobStatus.STARTING),
    (Running(generation=Generation(1), plan=PLAN), JobStatus.RUNNING),
    *((reforming(cause), JobStatus.RECOVERING) for cause in Cause if cause not in PLANNED),
    *((reforming(cause), JobStatus.RESIZING) for cause in PLANNED),
    (Stopping(outcome=Succeeded(at=1.0), open_hosts=frozenset()), JobStatus.STOPPING),
    (Stopping(outcome=Paused(at=1.0), open_hosts=frozenset()), JobStatus.PAUSING),
    (Paused(at=1.0), JobStatus.PAUSED),
    (Succeeded(at=1.0), JobStatus.SUCCEEDED),
    (Failed(at=1.0, message="raised"), JobStatus.FAILED),
    (Cancelled(at=1.0), JobStatus.CANCELLED),
]


@pytest.mark.parametrize(("state", "status"), TABLE, ids=lambda value: getattr(value, "value", type(value).__name__))
def test_each_state_has_its_word(state: JobState, status: JobStatus) -> None:
    assert status_of(state) is status


def test_the_table_covers_every_state_and_every_word() -> None:
    assert {type(state) for state, _ in TABLE} == set(get_args(JobState))
    assert {status for _, status in TABLE} == set(JobStatus)


@pytest.mark.parametrize(("state", "status"), TABLE, ids=lambda value: getattr(value, "value", type(value).__name__))
def test_exactly_the_terminal_states_have_terminal_words(state: JobState, status: JobStatus) -> None:
    assert (status in TERMINAL_STATUSES) == isinstance(state, TERMINAL)


def test_reasons_say_why() -> None:
    assert reason_of(Queued(reason="needs 8 devices, 6 usable")) == "needs 8 devices, 6 usable"
    assert reason_of(reforming(Cause.NODE_LOST)) == "node_lost seen"
    assert reason_of(Stopping(outcome=Failed(at=1.0, message="rank 3 raised"), open_hosts=frozenset())).endswith(
        "FAILED: rank 3 raised"
    )
    assert "tp1 x pp1 x dp1" in reason_of(Running(generation=Generation(1), plan=PLAN))
