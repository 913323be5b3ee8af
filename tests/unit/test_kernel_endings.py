"""A rank's end is told as soon as it begins: peers leave and a successor is forked before anybody knows how it ended."""

from __future__ import annotations

import pytest

from orchestrator.domain.generation import RankReport
from orchestrator.domain.ids import Device, Generation
from orchestrator.domain.job import Cause, Failed, Reforming, Running
from orchestrator.domain.protocol import CloseGeneration, FormGeneration, RankEnding
from tests.builders import Bench, a_report, a_spec


@pytest.fixture
def bench() -> Bench:
    return Bench(spec=a_spec(tp=2, pp=2, dp=2)).running().passed(1, 2, 3)


def holding(device: Device) -> RankReport:
    return a_report(device, voted=3, passed=3, held=3)


def ending(bench: Bench, device: Device) -> Bench:
    return bench.said(device.node, RankEnding(device=device, pid=bench.record.pids[device]))


def test_everybody_leaves_and_a_successor_is_forked_at_the_first_sign(bench: Bench) -> None:
    victim = bench.device(5)
    ending(bench, victim)
    assert {node for node, _ in bench.calls(CloseGeneration)} == set(bench.nodes) == bench.preparing()
    assert isinstance(bench.state, Reforming) and bench.state.closing.awaited == set(bench.plan.devices)


def test_nothing_is_settled_before_the_page_of_who_ended_has_been_read(bench: Bench) -> None:
    victim = bench.device(0)
    ending(bench, victim)
    for device in set(bench.plan.devices) - {victim}:
        bench.reports(a_report(device, voted=4, passed=3, held=3))
    assert isinstance(bench.state, Reforming) and bench.state.closing.settlement is None
    bench.exited(victim, report=a_report(victim, voted=4, passed=4, held=None))
    assert bench.record.committed == 4, "only the victim saw the vote pass"
    assert not bench.preparing(), "its successor has been asked for"
    bench.prepared()
    form = bench.calls(FormGeneration)[0][1]
    assert form.generation == 2 and form.committed == 4


def test_how_it_ended_explains_the_incident_and_is_charged_once(bench: Bench) -> None:
    victim = bench.device(5)
    ending(bench, victim).exited(victim).all_report(holding).prepared().ready()
    assert isinstance(bench.state, Running)
    assert [incident.fault.cause for incident in bench.record.incidents] == [Cause.RANK_LOST]
    assert "SIGKILL" in bench.record.incidents[0].fault.message
    assert [failure.fault.cause for failure in bench.record.failures] == [Cause.RANK_LOST]


def test_a_program_that_ends_itself_twice_still_fails_its_job(bench: Bench) -> None:
    for generation in (1, 2):
        victim = bench.device(5)
        ending(bench, victim)
        report = a_report(victim, generation=generation, voted=3, passed=3, held=None)
        bench.exited(victim, report=report, exit_code=3, message="ValueError: no", user_error=True)
        if generation == 1:
            bench.all_report(holding).prepared().ready()
    outcome = bench.state.outcome if hasattr(bench.state, "outcome") else bench.state
    assert isinstance(outcome, Failed) and "ValueError: no" in outcome.message


def test_an_end_that_is_told_late_or_of_another_process_changes_nothing(bench: Bench) -> None:
    victim = bench.device(5)
    bench.said(victim.node, RankEnding(device=victim, pid=1))
    assert isinstance(bench.state, Running)
    pid = bench.record.pids[victim]
    bench.exited(victim).all_report(holding)
    before = bench.record
    bench.said(victim.node, RankEnding(device=victim, pid=pid))
    assert bench.record == before and bench.record.generation == Generation(2)
