"""Schedules of faults and their reports: what is drawn, what a run adds up to, what a replay asks for."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from random import Random
from typing import Any

import pytest

from api.chaos import DEFAULT_KINDS, Schedule
from api.client.chaos import NOT_DRAWN, Chaos, draw, ledger, make_report, replay_of
from api.schemas import read
from api.views import FaultView, JobView, NodeView, QuarantineView, StepView
from orchestrator.domain.errors import Refused
from orchestrator.domain.faults import POINTS

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def steps(*numbers: int, generation: int = 1, offset: float = 0.0) -> list[StepView]:
    return [
        StepView(
            id=str(n), step=n, loss=5.0 / n + offset, norm=1.0, tokens=1, seconds=None, generation=generation, at=NOW
        )
        for n in numbers
    ]  # fmt: skip


def a_fault(**fields: Any) -> FaultView:
    given: dict[str, Any] = {
        "id": "f1", "kind": "kill", "at": "", "seed": 0, "asked": {"fault": "kill", "job": "job-1", "rank": 2},
        "asked_at": NOW, "devices": ("n0/1",), "node": None, "carried_out_at": NOW, "step": 7, "message": "done",
        "incident": 1, "detected_as": "rank_lost", "seen": "", "detected_s": 0.01, "pause_s": 0.2, "rolled_back": 0,
        "verdict": "recovered", "why": "",
    }  # fmt: skip
    return FaultView(**{**given, **fields})


def a_job(step: int) -> JobView:
    return JobView.model_construct(id="job-1", status="SUCCEEDED", step=step, incidents=(), typical_step_s=None)


def test_one_seed_draws_one_sequence() -> None:
    schedule = read(Schedule, {"seed": 11, "at_points": 0.5})
    first, second = ([draw(random, schedule, "job-1") for _ in range(300)] for random in (Random(11), Random(11)))
    assert first == second
    assert set(Counter(fault.kind for fault in first)) == set(DEFAULT_KINDS)
    assert {fault.at for fault in first if fault.at} == {*POINTS} - NOT_DRAWN
    for fault in first:
        fault.checked()


def test_a_schedule_with_an_unknown_kind_is_refused() -> None:
    with pytest.raises(Refused, match="kinds"):
        read(Schedule, {"kinds": {"explode": 1}})


@pytest.mark.parametrize(
    ("recorded", "found"),
    [
        (steps(1, 2, 3, 4), (0, 0, 0)),
        (steps(1, 2, 4), (1, 0, 0)),
        (steps(1, 2, 2, 3, 4), (0, 1, 1)),
        (steps(1, 2, 3) + steps(2, 3, 4, generation=3), (0, 0, 2)),
        (steps(1, 2, 3) + steps(2, 3, 4), (0, 1, 2)),
    ],
)
def test_the_ledger_counts_what_is_lost_and_what_is_doubled(recorded: list[StepView], found: tuple[int, int, int]) -> None:
    assert ledger(recorded, 4) == found


def test_the_curve_is_compared_with_the_twin_or_with_itself() -> None:
    def equal(recorded: list[StepView], twin: list[StepView]) -> bool | None:
        return make_report(a_job(3), recorded, [], seed=0, twin=twin).curve_equal

    assert equal(steps(1, 2, 3), []) is None
    assert equal(steps(1, 2, 3), steps(1, 2, 3)) is True
    assert equal(steps(1, 2, 3), steps(1, 2, 3, offset=1e-3)) is False
    assert equal(steps(1, 2, 3) + steps(2, 3, generation=2), []) is True
    assert equal(steps(1, 2, 3) + steps(2, 3, generation=2, offset=1e-3), []) is False


def test_a_report_counts_what_was_carried_out() -> None:
    found = make_report(a_job(9), steps(*range(1, 10)), [a_fault(), a_fault(id="f2", verdict="refused")], seed=4)
    assert (found.num_faults, found.kinds, found.verdicts) == (1, {"kill": 1}, {"recovered": 1, "refused": 1})
    assert found.pauses_s == (0.2,)


def kept_out_of(device: str, standing: str, job: str) -> QuarantineView:
    return QuarantineView(device=device, standing=standing, reason="bits", since=NOW, strikes=2, job=job, said="")


class Over:
    """A server whose job is over, and whose nodes have devices that are kept out."""

    def __init__(self, *kept_out: tuple[str, str, str]) -> None:
        self.released: list[str] = []
        self._nodes = [
            NodeView(
                id=node, kind="A100", num_devices=1, status="UP", address="", labels={},
                quarantine=(kept_out_of(f"{node}/0", standing, job),),
            )
            for node, standing, job in kept_out
        ]  # fmt: skip

    def nodes(self) -> list[NodeView]:
        return self._nodes

    def release_node(self, node: str) -> None:
        self.released.append(node)

    def job(self, _: str) -> JobView:
        return a_job(9)

    def faults(self, _: str) -> list[FaultView]:
        return []

    def all_metrics(self, _: str) -> list[StepView]:
        return []


@pytest.mark.parametrize(("release", "released"), [(True, ["n0"]), (False, [])])
def test_devices_that_nobody_believes_any_more_are_released_by_who_made_them_wrong(
    release: bool, released: list[str]
) -> None:
    server = Over(("n0", "held", "job-1"), ("n1", "testing", "job-1"), ("n2", "held", "job-2"), ("n3", "released", "job-1"))
    Chaos(server, "job-1", Schedule(release=release, rate_per_minute=6000)).run()  # type: ignore[arg-type]
    assert server.released == released


def test_a_replay_asks_for_the_same_devices_at_the_same_steps() -> None:
    on_a_node = a_fault(kind="node_kill", node="n1", devices=("n1/0", "n1/1"), asked={"fault": "node_kill", "seed": 3})
    schedule = replay_of(make_report(a_job(9), [], [a_fault(), on_a_node], seed=4))
    assert schedule.faults == (
        {"kind": "kill", "device": "n0/1", "step": 7},
        {"kind": "node_kill", "seed": 3},
    )
