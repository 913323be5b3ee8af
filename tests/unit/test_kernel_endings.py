"""A rank's end is told as soon as it begins: peers leave and a successor is forked before anybody knows how it ended."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.domain.events import DeadlinePassed
from orchestrator.domain.failure import Cause
from orchestrator.domain.generation import RankReport
from orchestrator.domain.host_events import RankEnding, RankExited
from orchestrator.domain.ids import Device, Generation
from orchestrator.domain.requests import CloseGeneration
from orchestrator.domain.state import Failed, Reforming, Running, Stopping
from orchestrator.supervisor.deadlines import deadlines
from tests.builders import JOB, Bench, a_report, a_spec


@pytest.fixture
def bench() -> Bench:
    return Bench(spec=a_spec(tp=2, pp=2, dp=2)).running().passed(1, 2, 3)


def holding(device: Device) -> RankReport:
    return a_report(device, voted=3, passed=3, held=3)


def ending(bench: Bench, device: Device, report: RankReport | None = None) -> Bench:
    """Its exit is remembered, to be told later."""
    pid = bench.record.pids[device]
    at = report or a_report(device, generation=bench.record.generation, voted=3, passed=3, held=None)
    return bench.said(device.node, RankEnding(device=device, pid=pid, report=at))


def exited(bench: Bench, device: Device, pid: int, generation: int = 1, **how: Any) -> Bench:
    report = a_report(device, generation=generation, voted=3, passed=3, held=None)
    event = RankExited(device=device, pid=pid, report=report, **({"exit_code": -9} | how))
    return bench.said(device.node, event)


def test_everybody_leaves_and_a_successor_is_forked_at_the_first_sign(bench: Bench) -> None:
    victim = bench.device(5)
    ending(bench, victim)
    assert {node for node, _ in bench.calls(CloseGeneration)} == set(bench.nodes) == bench.preparing()
    assert isinstance(bench.state, Reforming) and bench.state.closing.awaited == set(bench.plan.devices) - {victim}


def test_what_only_the_victim_knew_is_settled_by_its_page_before_it_is_known_how_it_ended(bench: Bench) -> None:
    victim = bench.device(0)
    pid = bench.record.pids[victim]
    ending(bench, victim, a_report(victim, voted=4, passed=4, held=None))
    bench.all_report(lambda device: a_report(device, voted=4, passed=3, held=3)).prepared()
    assert bench.record.committed == 4 and bench.form().committed == 4
    exited(bench, victim, pid)
    assert bench.record.ending == {} and bench.record.pids[victim] != pid, "its successor lives on"
    assert isinstance(bench.ready().passed(5).state, Running)


def test_ends_that_nobody_has_explained_yet_are_no_fault_of_the_jobs_own(bench: Bench) -> None:
    """Three generations that commit nothing would end it, and a moment later it may be told that they were killed."""
    for generation in range(1, 5):
        ending(bench, bench.device(5))
        assert isinstance(bench.state, Reforming), bench.state
        bench.all_report(lambda device: a_report(device, generation=generation, voted=3, held=3))  # noqa: B023
        bench.prepared()
        if not bench.state.forming or not bench.state.forming.formed:  # the network rests before it is tried again
            bench.tell(DeadlinePassed(job=JOB, key=next(key for key in deadlines(bench.record) if key.startswith("rest:"))))
        bench.ready()
    assert isinstance(bench.state, Running)


@pytest.mark.parametrize("late", [False, True], ids=["while it settles", "after the recovery"])
def test_how_it_ended_explains_the_incident_and_is_charged_once(bench: Bench, late: bool) -> None:
    victim = bench.device(5)
    pid = bench.record.pids[victim]
    ending(bench, victim)
    if not late:
        exited(bench, victim, pid)
    bench.all_report(holding).prepared().ready()
    assert [failure.generation for failure in bench.record.failures] == [1]
    if late:
        bench.passed(4)
        exited(bench, victim, pid)
    assert isinstance(bench.state, Running)
    assert [incident.fault.cause for incident in bench.record.incidents] == [Cause.RANK_LOST]
    assert "SIGKILL" in bench.record.incidents[0].fault.message


def test_a_program_that_ends_itself_twice_still_fails_its_job(bench: Bench) -> None:
    for generation in (1, 2):
        victim = bench.device(5)
        pid = bench.record.pids[victim]
        ending(bench, victim)
        exited(bench, victim, pid, generation, exit_code=3, message="exit code 3", user_error=True)
        if generation == 1:
            bench.all_report(holding).prepared().ready()
    assert isinstance(bench.state, Stopping) and isinstance(bench.state.outcome, Failed)
    assert "exit code 3" in bench.state.outcome.message


def test_a_successor_that_ends_before_it_is_formed_is_prepared_again(bench: Bench) -> None:
    victim = bench.device(0)
    ending(bench, victim).prepared(victim.node)
    ending(bench, victim, a_report(victim, generation=2, held=None))
    assert bench.preparing() == {victim.node}
    assert isinstance(bench.prepared().all_report(holding).ready().state, Running)


def test_an_end_that_is_told_late_or_of_another_process_changes_nothing(bench: Bench) -> None:
    victim = bench.device(5)
    report = a_report(victim, voted=3, passed=3, held=None)
    bench.said(victim.node, RankEnding(device=victim, pid=1, report=report))
    assert isinstance(bench.state, Running)
    pid = bench.record.pids[victim]
    bench.exited(victim).all_report(holding)
    before = bench.record
    bench.said(victim.node, RankEnding(device=victim, pid=pid, report=report))
    assert bench.record == before and bench.record.generation == Generation(2)
