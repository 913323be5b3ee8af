"""Everything that is told late or twice changes nothing the second time."""

from __future__ import annotations

from orchestrator.domain.effects import CallHost
from orchestrator.domain.events import PlanChosen
from orchestrator.domain.host_events import HostOpened, RankExited
from orchestrator.domain.ids import NodeId
from orchestrator.domain.state import Running
from orchestrator.planner.choose import choose
from tests.builders import JOB, Bench, a_report
from tests.recovering import N0, N3, holding, reforming, restoring, trained


def test_news_told_twice_changes_nothing_the_second_time() -> None:
    bench = trained()
    victim = bench.device(0)
    event = RankExited(device=victim, pid=bench.record.pids[victim], exit_code=-9, report=a_report(victim, held=None))
    bench.said(N0, event)
    first = bench.record
    bench.said(N0, event)
    assert bench.record == first and not bench.last.effects
    reports = [holding(3)(device) for device in sorted(reforming(bench).closing.awaited)]
    bench.reports(*reports, *reports)
    settled = bench.record
    bench.reports(*reports)
    assert bench.record == settled
    seats = bench.seats(bench.record.generation, [d for d in bench.plan.devices if d.node == N0])
    bench.prepared()
    formed = bench.record
    bench.said(N0, seats)
    assert bench.record == formed
    bench.ready()
    running = bench.record
    bench.host_gone(NodeId("n9")).reports(*reports)
    assert bench.record == running


def test_seats_and_deaths_of_an_earlier_time_told_again_do_not_touch_living_ranks() -> None:
    """A successor is sent everything its predecessor had not acknowledged, from the beginning."""
    bench = trained()
    victim = bench.device(0)
    old_seats = bench.seats(bench.record.generation, [d for d in bench.plan.devices if d.node == N0])
    death = RankExited(device=victim, pid=bench.record.pids[victim], exit_code=-9, report=a_report(victim, held=None))
    bench.said(N0, death).prepared().all_report(holding(3)).ready()
    assert isinstance(bench.state, Running)
    before = bench.record
    bench.said(N0, old_seats, death)
    assert bench.record == before


def test_a_host_that_says_twice_that_it_is_warm_is_asked_for_seats_once() -> None:
    bench = Bench().submitted().probed().planned().opened(N0)
    assert bench.preparing() == {N0}
    bench.said(N0, HostOpened(seconds=1.0))
    assert not bench.last.effects


def test_reports_steps_and_shards_of_old_generations_are_ignored() -> None:
    bench = restoring().ready()
    before = bench.record
    bench.reports(a_report(bench.device(1), generation=1, voted=9, passed=9, held=9, lost_peer=2))
    bench.passed(4, generation=1)
    assert bench.record == before


def test_a_late_plan_for_growing_is_not_taken_for_the_recovery() -> None:
    bench = trained(tp=2, pp=2)
    bench.add_node(4).add_node(5)
    growing = bench.asked()
    bench.host_gone(N3)
    assert bench.asked().generation == growing.generation + 1
    before = bench.record
    bench.tell(PlanChosen(job=JOB, generation=growing.generation, result=choose(growing)))
    assert bench.record == before


def test_effects_for_a_host_that_is_gone_are_not_outstanding_for_ever() -> None:
    bench = trained().host_gone(N3)
    assert not [e for e in bench.record.outbox.values() if isinstance(e, CallHost) and e.node == N3]
