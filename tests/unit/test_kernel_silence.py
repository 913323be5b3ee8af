"""Broken connections and hosts that nobody reaches: what is taken for a loss, when, and what is left alone."""

from __future__ import annotations

from dataclasses import replace

from orchestrator.domain.effects import CallHost
from orchestrator.domain.events import DeadlinePassed, HostClosed
from orchestrator.domain.failure import Cause
from orchestrator.domain.host_events import HostOpened
from orchestrator.domain.ids import Device, NodeId
from orchestrator.domain.layout import partners
from orchestrator.domain.origin import FromMemory
from orchestrator.domain.requests import CloseHost, FormGeneration, KillRank
from orchestrator.domain.state import Closing, Running
from orchestrator.supervisor.deadlines import deadlines, has_left
from tests.builders import JOB, Bench, a_report, a_spec
from tests.recovering import N0, N1, N2, N3, Report, holding, reforming, trained

# --- links -------------------------------------------------------------------------------------------------------------


def test_a_broken_connection_before_the_death_notice() -> None:
    bench = trained()
    reporter, victim = bench.device(2), bench.device(6)
    bench.reports(a_report(reporter, voted=3, passed=3, held=3, lost_peer=6))
    assert reforming(bench).fault.cause is Cause.LINK_LOST and reforming(bench).fault.devices == (victim,)
    assert reporter not in reforming(bench).closing.awaited
    bench.exited(victim)
    assert reforming(bench).fault.cause is Cause.RANK_LOST, "now it is known why"
    assert len(bench.record.incidents) == 1 and bench.record.incidents[0].fault.cause is Cause.RANK_LOST
    bench.prepared().all_report(holding(3))
    assert isinstance(bench.form().restore, FromMemory) and bench.record.generation == 2


def test_a_broken_connection_after_the_death_notice() -> None:
    bench = trained()
    bench.exited(bench.device(6))
    bench.reports(a_report(bench.device(2), voted=3, passed=3, held=3, lost_peer=6))
    assert reforming(bench).fault.cause is Cause.RANK_LOST and bench.record.generation == 2


def test_the_end_of_another_rank_does_not_explain_a_broken_connection() -> None:
    bench = trained()
    bench.reports(a_report(bench.device(2), voted=3, passed=3, held=3, lost_peer=6))
    bench.exited(bench.device(1), report=a_report(bench.device(1), held=None))
    assert reforming(bench).fault.cause is Cause.LINK_LOST


def survivors_miss(bench: Bench, silent: NodeId, *, but: tuple[Device, ...] = ()) -> Bench:
    """Every rank elsewhere reports that its connection to rank 7 broke."""
    others = [d for d in bench.plan.devices if d.node != silent and d not in but]
    return bench.reports(*(a_report(device, voted=3, passed=3, held=3, lost_peer=7) for device in others))


def test_a_silent_host_whose_ranks_are_missed_is_given_up_once_all_others_have_reported() -> None:
    bench = trained().host_silent(N3)
    last = bench.device(2)
    survivors_miss(bench, N3, but=(last,))
    assert not bench.record.avoided, "what the last one holds decides whether that costs anything"
    bench.reports(a_report(last, voted=3, passed=3, held=3))
    assert bench.record.avoided == {N3} and reforming(bench).closing.settlement


def test_a_host_that_goes_silent_after_its_ranks_were_missed_is_given_up() -> None:
    bench = survivors_miss(trained(), N3)
    assert not bench.record.avoided and reforming(bench).closing.settlement is None
    assert bench.host_silent(N3).record.avoided == {N3}


def test_a_silent_host_that_may_hold_the_only_copy_is_waited_for_although_its_ranks_are_missed() -> None:
    """Giving it up would make training run committed steps again, and it may answer in a moment."""
    bench = Bench(spec=a_spec(tp=2, pp=2, dp=2, mirrors=0)).running().passed(1, 2, 3).host_silent(N3)
    survivors_miss(bench, N3)
    assert not bench.record.avoided and reforming(bench).closing.settlement is None
    bench.tell(DeadlinePassed(job=JOB, key="settle:1"))
    assert reforming(bench).is_patient
    bench.host_heard(N3).reports(
        *(a_report(device, voted=3, passed=3, held=3) for device in bench.plan.devices if device.node == N3)
    )
    assert reforming(bench).closing.settlement and bench.record.committed == 3
    assert isinstance(bench.prepared().form().restore, FromMemory)


def test_a_silent_host_whose_ranks_nobody_misses_is_waited_for() -> None:
    """Everybody's connection to another rank broke: that says nothing about the silent one."""
    bench = trained().host_silent(N3)
    others = [device for device in bench.plan.devices if device.node != N3]
    bench.reports(*(a_report(device, voted=3, passed=3, held=3, lost_peer=0) for device in others))
    assert not bench.record.avoided and reforming(bench).closing.settlement is None
    assert any(key.startswith("settle:") for key in deadlines(bench.record))


def test_a_seat_on_a_host_that_goes_silent_with_the_only_copy_of_something_is_waited_for() -> None:
    bench = Bench(spec=a_spec(tp=2, pp=2)).running().passed(1, 2, 3)
    keeper, victim = bench.device(6), bench.device(7)
    assert keeper.node == victim.node
    bench.exited(victim).exited(partners(bench.plan)[keeper], report=a_report(partners(bench.plan)[keeper], held=None))
    bench.all_report(holding(3)).host_silent(victim.node)
    (key,) = [key for key in deadlines(bench.record) if key.startswith("silent:")]
    bench.tell(DeadlinePassed(job=JOB, key=key))
    assert not bench.record.avoided, "what its other rank holds nobody else does"


def test_a_seat_on_a_host_that_goes_silent_while_it_is_prepared_is_given_to_another() -> None:
    bench = Bench(spec=a_spec(tp=2, pp=2)).running().passed(1, 2, 3)
    victim = bench.device(7)
    assert victim.node in bench.exited(victim).preparing()
    bench.all_report(holding(3)).host_silent(victim.node)
    (key,) = [key for key in deadlines(bench.record) if key.startswith("silent:")]
    assert not bench.calls(FormGeneration)
    bench.tell(DeadlinePassed(job=JOB, key=key))
    assert bench.record.avoided == {victim.node}
    bench.planned().prepared()
    assert victim.node not in bench.form().plan.nodes and isinstance(bench.form().restore, FromMemory)


# --- unreachable is not failed -----------------------------------------------------------------------------------------


def test_silence_without_evidence_changes_nothing_that_runs() -> None:
    bench = trained()
    before = bench.state
    for node in (N0, N1, N2, N3):
        bench.host_silent(node).host_silent(node)
    assert bench.state == before and not any(isinstance(e, CallHost) for e in bench.last.effects.values())
    assert bench.record.unreachable == {N0, N1, N2, N3} and bench.said_to_people().count("contact_lost") == 4
    bench.passed(4)
    assert (
        bench.record.committed == 4 and N0 not in bench.record.unreachable and "contact_restored" in bench.said_to_people()
    )


def test_when_nobody_can_be_reached_only_max_isolation_ends_the_wait() -> None:
    bench = trained()
    for node in (N0, N1, N2, N3):
        bench.host_silent(node)
    assert deadlines(bench.record) == {"isolated:1": 660.0}
    bench.tell(DeadlinePassed(job=JOB, key="isolated:1"))
    assert reforming(bench).closing.settlement and bench.record.avoided == {N0, N1, N2, N3}


def test_while_anybody_answers_or_where_the_owner_never_wants_that_no_time_ends_it() -> None:
    bench = trained().host_silent(N0).host_silent(N1).host_silent(N2)
    assert not [key for key in deadlines(bench.record) if key.startswith("isolated:")]
    patient = replace(a_spec(tp=2, pp=2, dp=2), recovery=replace(a_spec().recovery, max_isolation_s=0.0))
    alone = Bench(spec=patient).running().passed(1)
    for node in (N0, N1, N2, N3):
        alone.host_silent(node)
    assert alone.record.unreachable == {N0, N1, N2, N3} and not deadlines(alone.record)


def test_the_time_for_reports_begins_when_one_rank_of_the_generation_has_left() -> None:
    """From then on no later step of it can pass; what newcomers and idle donors say is no evidence of that."""
    record = trained().record
    member, other = record.plans[record.generation].devices[0], Device(NodeId("n9"), 0)
    nobody = Closing(generation=record.generation, awaited=frozenset(record.pids), reports={})
    assert not has_left(record, nobody, frozenset()) and not has_left(record, nobody, frozenset({other}))
    assert has_left(record, nobody, frozenset({member}))
    assert not has_left(record, replace(nobody, reports={other: a_report(other)}), frozenset())
    assert has_left(record, replace(nobody, reports={member: a_report(member)}), frozenset())


def wearing(stuck: dict[Device, int]) -> Report:
    return lambda device: replace(a_report(device, voted=3, passed=3, held=3), stuck=stuck.get(device, 0))


def test_a_process_with_many_stuck_threads_is_replaced_where_others_hold_its_state() -> None:
    bench = trained()
    victim, mirror_of = bench.device(0), partners(bench.plan)
    worn, few = [d for d in bench.plan.devices[1:] if victim != mirror_of[d] and d != mirror_of[victim]][:2]
    bench.exited(victim).prepared().all_report(wearing({worn: 3, few: 2}))
    assert bench.calls(KillRank) == [(worn.node, KillRank(device=worn))] and not bench.calls(FormGeneration)
    bench.exited(worn, report=a_report(worn, generation=2, held=None))
    assert bench.preparing() == {worn.node}
    bench.prepared(worn.node)
    form = bench.form()
    assert isinstance(form.restore, FromMemory) and form.committed == 3
    assert not {victim, worn} & {move.source for move in form.restore.moves}
    assert isinstance(bench.ready().passed(4).state, Running) and bench.record.generation == 2


def test_a_process_that_holds_the_only_copy_of_something_is_kept_however_worn_it_is() -> None:
    bench = trained()
    partner = partners(bench.plan)[bench.device(0)]
    bench.exited(bench.device(0)).prepared().all_report(wearing({partner: 9}))
    assert not bench.calls(KillRank) and isinstance(bench.form().restore, FromMemory)


def test_who_does_not_report_in_time_is_given_up_closed_and_not_planned_with() -> None:
    bench = trained()
    bench.exited(bench.device(0))
    silent = [device for device in bench.plan.devices if device.node == N1]
    bench.reports(*(holding(3)(d) for d in sorted(reforming(bench).closing.awaited) if d not in silent))
    bench.tell(DeadlinePassed(job=JOB, key="settle:1"))
    assert reforming(bench).closing.settlement is not None
    assert bench.calls(CloseHost) == [(N1, CloseHost())] and bench.record.avoided == {N1}
    assert {device.node for device, _ in bench.asked().devices} == {N0, N2, N3}
    bench.said(N1, HostOpened(seconds=1.0))
    assert N1 not in bench.record.warm, "it was given up: what it says counts no more"
    bench.tell(HostClosed(job=JOB, node=N1))
    assert not bench.record.avoided and N1 not in bench.record.hosts, "closed: another host may be opened there"


def test_silent_hosts_that_may_hold_the_only_copy_are_waited_for_longer() -> None:
    bench = trained()
    bench.exited(bench.device(0))
    silent = {N2, N3}
    bench.reports(*(holding(3)(d) for d in sorted(reforming(bench).closing.awaited) if d.node not in silent))
    bench.tell(DeadlinePassed(job=JOB, key="settle:1"))
    assert reforming(bench).closing.settlement is None and list(deadlines(bench.record)) == ["patience:1"]
    bench.all_report(holding(3)).prepared()
    assert isinstance(bench.form().restore, FromMemory)


def test_a_host_goes_with_all_its_ranks_so_what_those_hold_that_have_reported_counts_too() -> None:
    """One of two ranks on it is late; giving up the host would lose what the other holds alone (seed 2570)."""
    bench = trained()
    late, keeper = bench.device(7), bench.device(6)
    partner = partners(bench.plan)[keeper]
    assert late.node == keeper.node != partner.node
    bench.exited(partner, report=a_report(partner, held=None))
    bench.reports(*(holding(3)(d) for d in sorted(reforming(bench).closing.awaited) if d != late))
    bench.tell(DeadlinePassed(job=JOB, key="settle:1"))
    assert reforming(bench).is_patient and not bench.record.avoided
    bench.reports(holding(3)(late)).prepared()
    restore = bench.form().restore
    assert isinstance(restore, FromMemory) and restore.step == 3


def test_patience_ends() -> None:
    bench = trained()
    bench.exited(bench.device(0))
    bench.reports(*(holding(3)(d) for d in sorted(reforming(bench).closing.awaited) if d.node in (N0, N1)))
    bench.tell(DeadlinePassed(job=JOB, key="settle:1")).tell(DeadlinePassed(job=JOB, key="patience:1"))
    assert reforming(bench).closing.settlement is not None
