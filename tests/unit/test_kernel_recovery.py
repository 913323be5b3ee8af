"""Ranks, nodes and links that fail, in every order and twice: what is closed, settled, planned, restored and told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from orchestrator.domain.cluster import NodeStatus
from orchestrator.domain.effects import CallHost, ChoosePlan
from orchestrator.domain.events import DeadlinePassed, HostClosed, PlanChosen
from orchestrator.domain.generation import RankReport
from orchestrator.domain.ids import Device, Generation, NodeId
from orchestrator.domain.job import Cause, Reforming, Running, Stopping
from orchestrator.domain.layout import layout, partners
from orchestrator.domain.protocol import (
    CloseGeneration,
    CloseHost,
    FormGeneration,
    FromCheckpoint,
    FromMemory,
    FromSeed,
    HostFailed,
    HostOpened,
    KillRank,
    OpenHost,
    PrepareSeats,
    RankExited,
    StopAfter,
)
from orchestrator.domain.status import contact_of
from orchestrator.planner.choose import choose
from orchestrator.supervisor.deadlines import deadlines
from tests.builders import JOB, Bench, a_device, a_profile, a_report, a_spec, an_answer

Report = Callable[[Device], RankReport]
N0, N1, N2, N3 = (NodeId(f"n{number}") for number in range(4))


def trained(steps: int = 3, **degrees: int) -> Bench:
    return Bench(spec=a_spec(**(degrees or {"tp": 2, "pp": 2, "dp": 2}))).running().passed(*range(1, steps + 1))


def holding(step: int, generation: int = 1) -> Report:
    """A report of who has applied `step` and voted for nothing since."""
    return lambda device: a_report(device, generation=generation, voted=step, passed=step, held=step)


def waiting_to_apply(step: int) -> Report:
    return lambda device: a_report(device, voted=step, passed=step - 1, held=step - 1)


def reforming(bench: Bench) -> Reforming:
    assert isinstance(bench.state, Reforming)
    return bench.state


# --- one rank ------------------------------------------------------------------------------------------------------------


def test_a_killed_rank_is_forked_again_in_the_same_plan_and_filled_from_memory() -> None:
    bench = trained()
    victim, before = bench.device(5), bench.plan
    bench.exited(victim)
    assert {node for node, _ in bench.calls(CloseGeneration)} == set(bench.nodes)
    assert bench.preparing() == set(bench.nodes), "nobody waits for the settlement to fork"
    assert reforming(bench).forming.generation == 2 and bench.plan.pipelines == before.pipelines  # type: ignore[union-attr]
    assert not any(isinstance(effect, ChoosePlan) for effect in bench.last.effects.values())

    bench.prepared()
    assert not bench.calls(FormGeneration), "nothing is formed before the answer is recorded"
    bench.all_report(holding(3))
    form = bench.form()
    assert form.generation == 2 and form.committed == 3 and form.donors == ()
    assert isinstance(form.restore, FromMemory) and form.restore.step == 3 and form.restore.answer == an_answer(3)
    moved = [move for move in form.restore.moves if move.source != move.target]
    assert moved and {move.target for move in moved} == {victim} and victim not in {move.source for move in moved}

    bench.ready().passed(4)
    assert isinstance(bench.state, Running) and bench.record.committed == 4 and bench.record.failures_in_a_row == 0
    incident = bench.record.incidents[-1]
    assert incident.fault.cause is Cause.RANK_LOST and incident.rolled_back == 0 and incident.pause_s is not None
    assert {"detect", "settle", "prepare", "deliver", "first_step", "form"} <= set(incident.phases)


@pytest.mark.parametrize("ahead_s", [-90.0, 0.0, 90.0])
def test_a_pause_is_not_the_difference_between_two_clocks(ahead_s: float) -> None:
    bench = trained()
    bench.exited(bench.device(0)).all_report(lambda device: a_report(device, voted=3, passed=3, held=3)).prepared()
    bench.now += 0.2
    bench.ready().passed(4, ahead_s=ahead_s)
    pause_s = bench.record.incidents[-1].pause_s
    assert pause_s is not None and 0.1 < pause_s < 0.5


def test_a_vote_that_only_one_survivor_saw_pass_is_committed_and_carried_to_the_others() -> None:
    bench = trained()
    first, victim = bench.device(0), bench.device(7)
    bench.exited(victim)
    bench.reports(a_report(first, voted=4, passed=4, held=4)).all_report(waiting_to_apply(4)).prepared()
    assert bench.record.committed == 4 and [one.answer.step for one in bench.steps] == [1, 2, 3, 4]
    form = bench.form()
    assert isinstance(form.restore, FromMemory) and form.restore.answer == an_answer(4) and form.committed == 4


def test_a_vote_that_only_the_victim_saw_pass_is_committed_by_its_page() -> None:
    bench = trained()
    bench.exited(bench.device(0), report=a_report(bench.device(0), voted=4, passed=4, held=None))
    bench.all_report(waiting_to_apply(4)).prepared()
    assert bench.record.committed == 4 and bench.form().committed == 4


def test_steps_told_while_the_generation_closes_are_commits_until_it_is_settled() -> None:
    bench = trained().exited(trained().device(0))
    bench.passed(4, generation=1, node=N1)
    assert bench.record.committed == 4
    bench.all_report(waiting_to_apply(4))
    assert bench.record.committed == 4
    bench.passed(5, generation=1, node=N1)
    assert bench.record.committed == 4, "settled: late news changes nothing"


def test_a_rank_that_dies_before_its_seat_is_formed_is_prepared_again() -> None:
    bench = trained().exited(trained().device(0)).prepared(N0)
    again = bench.device(0)
    bench.exited(again, report=a_report(again, generation=2, held=None))
    assert bench.preparing() == {N0} and reforming(bench).forming.generation == 2  # type: ignore[union-attr]
    bench.prepared().all_report(holding(3))
    assert bench.form().addresses[again] == f"n0:{bench.record.pids[again]}"


def test_a_reporter_that_dies_afterwards_is_no_source() -> None:
    bench = trained()
    first, second = bench.device(0), bench.device(3)
    bench.exited(first)
    bench.reports(a_report(second, voted=3, passed=3, held=3))
    bench.exited(second, report=a_report(second, generation=1, held=None))
    bench.prepared().all_report(holding(3))
    restore = bench.form().restore
    if isinstance(restore, FromMemory):
        assert not {first, second} & {move.source for move in restore.moves}


# --- whole nodes ---------------------------------------------------------------------------------------------------------


def test_a_killed_node_means_fewer_pipelines_and_survivors_give_what_members_lack() -> None:
    bench = trained(tp=2, pp=2)
    assert bench.plan.dp == 2
    bench.host_gone(N3)
    assert not bench.preparing(), "the same plan cannot be formed"
    asked = bench.asked()
    assert {device.node for device, _ in asked.devices} == {N0, N1, N2} and asked.generation == 2
    bench.planned()
    assert bench.plan.dp == 1 and bench.plan.world_size == 4
    bench.all_report(holding(3)).prepared()
    form = bench.form()
    assert isinstance(form.restore, FromMemory) and form.committed == 3
    outside = set(form.addresses) - set(form.plan.devices)
    assert set(form.donors) == outside and outside, "donors have no seat, and their addresses are told"
    assert {node for node, _ in bench.calls(FormGeneration)} == {N0, N1, N2}, "survivors without a seat are told, too"
    bench.ready().passed(4)
    assert isinstance(bench.state, Running)


def test_a_donor_that_dies_while_it_gives_closes_the_generation() -> None:
    bench = trained(tp=2, pp=2).host_gone(N3).planned().all_report(holding(3)).prepared()
    donor = bench.form().donors[0]
    bench.exited(donor, report=a_report(donor, generation=2, held=None))
    assert reforming(bench).closing.generation == 2


def test_a_spare_node_takes_the_place_of_a_killed_one() -> None:
    bench = trained()
    bench.add_node(4).host_gone(N2).lose_node(N2)
    bench.planned()
    assert [node for node, _ in bench.calls(OpenHost)] == ["n4"] and bench.plan.dp == 2
    bench.all_report(holding(3))
    assert list(deadlines(bench.record)) == [f"prepare:{bench.record.generation}"]
    bench.opened().prepared()
    assert isinstance(bench.form().restore, FromMemory)


def test_nothing_fits_so_survivors_wait_and_keep_what_they_hold() -> None:
    bench = trained().host_gone(N2).lose_node(N2).planned()
    bench.all_report(holding(3))
    assert reforming(bench).waiting == "needs 8 devices, 6 usable; lower dp or wait for a node"
    bench.add_node(5).planned().opened().prepared()
    form = bench.form()
    assert isinstance(form.restore, FromMemory) and form.restore.step == 3


def test_owner_and_mirror_lost_roll_back_to_the_checkpoint_and_count_it() -> None:
    bench = trained(7).saved(5).checkpoint(5)
    bench.host_gone(N0).host_gone(N2)
    bench.add_node(6).add_node(7).lose_node(N0).lose_node(N2)
    bench.all_report(holding(7)).planned().opened().prepared()
    form = bench.form()
    assert isinstance(form.restore, FromCheckpoint) and form.committed == 5 and bench.record.committed == 5
    assert bench.record.incidents[-1].rolled_back == 2 and "rolled_back" in bench.said_to_people()
    bench.ready().passed(6)
    assert bench.record.committed == 6 and [one.answer.step for one in bench.steps][-2:] == [7, 6]


def test_without_a_checkpoint_the_seed_is_left() -> None:
    bench = trained(2)
    for node in (N0, N1, N2, N3):
        bench.host_gone(node)
    bench.planned().opened().prepared()
    assert isinstance(bench.form().restore, FromSeed) and bench.record.committed == 0


def test_a_checkpoint_committed_after_its_steps_were_rolled_back_is_where_the_next_restore_goes() -> None:
    bench = trained(12).saved(10)
    for node in (N0, N1, N2, N3):
        bench.host_gone(node)
    bench.planned().opened().prepared().ready()
    assert bench.record.committed == 0
    bench.checkpoint(10).passed(1)
    for node in (N0, N1, N2, N3):
        bench.host_gone(node)
    bench.planned().opened().prepared()
    assert bench.form().committed == 10 and bench.record.committed == 10
    assert bench.ready().passed(11).record.committed == 11


# --- links ---------------------------------------------------------------------------------------------------------------


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


# --- unreachable is not failed -------------------------------------------------------------------------------------------


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


def test_a_resize_is_not_settled_before_a_rank_has_left() -> None:
    bench = trained(tp=2, pp=2)
    grown = grow(bench)
    (key,) = deadlines(grown.record)
    assert key.startswith("join_stop:"), "they are to stop by themselves, between two steps"
    grown.tell(DeadlinePassed(job=JOB, key=key))
    assert reforming(grown).fault.cause is Cause.GROW
    assert list(deadlines(grown.record)) == ["isolated:2"], "no rank is known to have left, so steps may still pass"
    grown.tell(DeadlinePassed(job=JOB, key="settle:2"))
    assert reforming(grown).closing.settlement is None
    newcomers = reforming(grown).closing.awaited - set(grown.record.plans[Generation(2)].devices)
    grown.reports(*(a_report(device, generation=2, held=None) for device in newcomers))
    assert newcomers and list(deadlines(grown.record)) == ["isolated:2"], "who has no vote in it proves nothing"
    grown.reports(a_report(grown.device(0), generation=2, voted=4, passed=4, held=4))
    assert "settle:2" in deadlines(grown.record)


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


def test_patience_ends() -> None:
    bench = trained()
    bench.exited(bench.device(0))
    bench.reports(*(holding(3)(d) for d in sorted(reforming(bench).closing.awaited) if d.node in (N0, N1)))
    bench.tell(DeadlinePassed(job=JOB, key="settle:1")).tell(DeadlinePassed(job=JOB, key="patience:1"))
    assert reforming(bench).closing.settlement is not None


# --- a second failure ----------------------------------------------------------------------------------------------------


def test_a_node_lost_while_the_next_generation_is_prepared_replans_without_it() -> None:
    bench = trained(tp=2, pp=2)
    bench.exited(bench.device(0)).prepared(N0, N1)
    bench.host_gone(N2)
    assert reforming(bench).forming is None and reforming(bench).closing.generation == 1
    bench.planned()
    assert N2 not in bench.plan.nodes and bench.record.generation == 3
    bench.all_report(holding(3)).prepared().ready().passed(4)
    assert isinstance(bench.state, Running) and bench.record.committed == 4 and len(bench.record.incidents) == 1


def restoring() -> Bench:
    bench = trained()
    bench.exited(bench.device(0)).prepared().all_report(holding(3))
    assert bench.form().generation == 2
    return bench


def test_a_rank_lost_while_restoring_closes_that_generation_too() -> None:
    bench = restoring()
    second = bench.device(3)
    bench.exited(second, report=a_report(second, generation=2, held=None))
    state = reforming(bench)
    assert state.closing.generation == 2 and state.attempt == 2 and bench.plan and bench.record.generation == 3
    assert set(state.closing.awaited) == set(bench.record.pids), "everybody who has a process is asked"
    assert len(bench.record.incidents) == 1 and bench.record.incidents[0].attempts == 2
    fresh = bench.device(0)

    def report(device: Device) -> RankReport:
        held = None if device == fresh else 3
        return a_report(device, generation=2, voted=3, passed=3 if held else 0, held=held, held_in=1)

    bench.all_report(report).prepared()
    form = bench.form()
    assert form.generation == 3 and form.committed == bench.record.committed
    if isinstance(form.restore, FromMemory):
        assert not {fresh, second} & {move.source for move in form.restore.moves}
    bench.ready()
    assert isinstance(bench.state, Running)


def test_survivors_that_had_not_restored_yet_are_sources_under_their_old_plan() -> None:
    bench = restoring()
    second = bench.device(0)
    bench.exited(second, report=a_report(second, generation=2, held=None))
    bench.all_report(
        lambda device: a_report(device, generation=2, voted=3, passed=3, held=3, held_in=1 if device.index else 2)
    ).prepared()
    restore = bench.form().restore
    assert isinstance(restore, FromMemory) and restore.step == 3


def test_a_generation_that_does_not_become_ready_is_closed() -> None:
    bench = restoring().tell(DeadlinePassed(job=JOB, key="form:2"))
    assert reforming(bench).fault.cause is Cause.HANG and reforming(bench).closing.generation == 2
    assert "settle:2" not in deadlines(bench.record), "nobody of generation 2 is known to have left"


# --- everything late or twice --------------------------------------------------------------------------------------------


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


# --- growing -------------------------------------------------------------------------------------------------------------


def grow(bench: Bench) -> Bench:
    """One pipeline more once two nodes have come."""
    bench.host_gone(N3).lose_node(N3).planned().all_report(holding(3)).prepared().ready()
    assert bench.plan.dp == 1
    bench.add_node(4).planned()
    assert isinstance(bench.state, Running) and [node for node, _ in bench.calls(OpenHost)] == ["n4"]
    bench.passed(4)
    assert bench.record.committed == 4, "training goes on meanwhile"
    return bench.said(NodeId("n4"), HostOpened(seconds=1.0)).copying().caught_up()


def test_donors_that_have_given_are_asked_again_while_no_step_is_committed() -> None:
    bench = trained(tp=2, pp=2).host_gone(N3).lose_node(N3).planned().all_report(holding(3)).prepared()
    donors = set(bench.form().donors)
    bench.ready().add_node(4).planned().said(NodeId("n4"), HostOpened(seconds=1.0)).copying().caught_up()
    (key,) = deadlines(bench.record)
    bench.tell(DeadlinePassed(job=JOB, key=key))
    assert reforming(bench).closing.awaited >= donors, "nobody has a newer state than they"
    used = donors & set(bench.plan.devices)
    assert used, "their devices are used again"
    bench.all_report(lambda device: holding(3, 1 if device in donors else 2)(device)).prepared()
    restore = bench.form().restore
    assert isinstance(restore, FromMemory)
    held = layout(bench.record.plans[Generation(1)], a_profile(), mirrors=1)
    for device in used:
        moved = [move.interval for move in restore.moves if move.target == device]
        assert not any(have.intersect(one) for have in held.held(device) for one in moved), "what it holds is not sent"


def test_a_new_node_is_warmed_and_filled_first_and_then_the_generation_changes() -> None:
    bench = grow(trained(tp=2, pp=2))
    assert {node for node, _ in bench.calls(StopAfter)} == set(bench.plan.nodes)
    bench.reports(replace(holding(4, 2)(bench.device(0)), stopped=True))
    assert reforming(bench).fault.cause is Cause.GROW and bench.plan.dp == 2
    assert {node for node, _ in bench.calls(PrepareSeats)} == set(bench.plan.nodes)
    bench.all_report(holding(4, reforming(bench).closing.generation)).prepared().ready().passed(5)
    assert isinstance(bench.state, Running) and bench.record.committed == 5
    assert bench.record.incidents[-1].rolled_back == 0


def test_what_trains_is_not_closed_for_a_larger_plan_while_a_host_is_silent() -> None:
    bench = trained(tp=2, pp=2)
    bench.host_gone(N3).lose_node(N3).planned().all_report(holding(3)).prepared().ready()
    bench.add_node(4).planned().host_silent(bench.plan.nodes[0]).said(NodeId("n4"), HostOpened(seconds=1.0))
    assert isinstance(bench.state, Running) and bench.record.target is not None
    assert bench.record.join is None
    bench.passed(4)
    assert bench.record.join is not None, "it answers again"
    (silent, *_), newcomer = bench.plan.nodes, bench.newcomers[0]
    bench.copying().host_silent(silent).caught_up()
    assert not bench.record.join.stopping and newcomer in bench.record.join.done
    bench.passed(5, node=silent)
    assert bench.record.join.stopping and isinstance(bench.state, Running)


def test_a_warm_host_that_was_silent_for_a_moment_and_has_nothing_to_tell_is_used() -> None:
    bench = trained(tp=2, pp=2)
    bench.host_gone(N3).lose_node(N3).planned().all_report(holding(3)).prepared().ready()
    bench.add_node(4).planned().host_silent(NodeId("n4")).host_heard(NodeId("n4"))
    assert not bench.record.unreachable, "an empty answer is an answer"
    bench.host_silent(N0).said(NodeId("n4"), HostOpened(seconds=1.0))
    assert isinstance(bench.state, Running) and contact_of(bench.record) != ""
    assert bench.record.join is None
    bench.host_heard(N0)
    assert bench.record.join is not None and NodeId("n4") in bench.record.join.plan.nodes


def test_silent_nodes_are_left_alone_where_they_train_and_not_planned_with() -> None:
    bench = trained(tp=2, pp=2).silence_node(N3)
    assert isinstance(bench.state, Running) and not bench.record.planning
    bench.exited(a_device(0)).planned()
    assert N3 not in bench.plan.nodes


def test_a_larger_plan_waits_for_a_silent_node_and_is_not_forgotten() -> None:
    bench = trained(tp=2, pp=2)
    bench.host_gone(N3).lose_node(N3).planned().all_report(holding(3)).prepared().ready()
    bench.add_node(4).planned().silence_node(N0).said(NodeId("n4"), HostOpened(seconds=1.0))
    assert isinstance(bench.state, Running) and bench.record.target is not None
    assert bench.record.join is None
    bench.silence_node(N0, speaks=True)
    assert bench.record.join is not None and NodeId("n4") in bench.record.join.plan.nodes


def test_a_node_that_comes_while_another_is_silent_is_used_once_that_speaks() -> None:
    bench = trained(tp=2, pp=2)
    bench.host_gone(N3).lose_node(N3).planned().all_report(holding(3)).prepared().ready()
    bench.silence_node(N0).add_node(4)
    assert not bench.record.planning, "a plan without what trains there would be no larger"
    bench.silence_node(N0, speaks=True).planned()
    assert bench.record.target is not None and NodeId("n4") in bench.record.target.nodes


def test_hosts_that_do_not_warm_up_are_given_up_and_training_goes_on() -> None:
    bench = trained(tp=2, pp=2)
    bench.host_gone(N3).lose_node(N3).planned().all_report(holding(3)).prepared().ready()
    bench.add_node(4).planned()
    bench.tell(DeadlinePassed(job=JOB, key=f"grow:{bench.record.generation}"))
    assert isinstance(bench.state, Running) and bench.record.target is None and bench.record.avoided == {"n4"}
    bench.planned()
    assert bench.record.target is None and "n4" not in {device.node for device, _ in bench.asked().devices}


# --- hosts that fail -----------------------------------------------------------------------------------------------------


def test_a_host_whose_zygote_ended_is_closed_and_replaced() -> None:
    bench = trained(tp=2, pp=2).said(N2, HostFailed(message="the zygote ended"))
    assert bench.calls(CloseHost) == [(N2, CloseHost())] and reforming(bench).fault.cause is Cause.NODE_LOST
    bench.planned()
    assert N2 not in bench.plan.nodes
    bench.tell(HostClosed(job=JOB, node=N2))
    assert not bench.record.avoided


def test_a_node_where_no_host_starts_is_left_alone_for_a_while() -> None:
    """The cluster may be slow to see that a node is dead; asking again at once would go on for ever."""
    bench = trained().host_gone(N3)
    assert bench.nodes[N3].status is NodeStatus.UP
    bench.planned()
    assert [node for node, _ in bench.calls(OpenHost)] == [N3], "its host ended, and the node seems to be fine"
    bench.host_gone(N3).planned()
    assert bench.record.avoided == {N3}
    assert not bench.calls(OpenHost) and "retry:1" in deadlines(bench.record)
    bench.all_report(holding(3))
    bench.tell(DeadlinePassed(job=JOB, key="retry:1"))
    assert not bench.record.avoided
    bench.planned()
    assert [node for node, _ in bench.calls(OpenHost)] == [N3]


@pytest.mark.parametrize("rank", range(8))
def test_any_rank_may_be_the_one_that_is_killed(rank: int) -> None:
    bench = trained()
    bench.exited(bench.device(rank)).prepared().all_report(holding(3))
    assert isinstance(bench.form().restore, FromMemory)
    assert isinstance(bench.ready().state, Running)


def test_incidents_keep_their_numbers_when_old_ones_are_forgotten() -> None:
    bench = trained()
    for number in range(2, 105):
        bench.exited(bench.device(0)).recovered()
        bench.passed(bench.record.committed + 1)
        assert bench.record.incidents[-1].number == number - 1
    assert len(bench.record.incidents) == 100


def test_a_job_that_has_all_its_steps_and_no_checkpoints_needs_no_recovery() -> None:
    bench = Bench(spec=a_spec(tp=2, pp=2, dp=2, steps=3, every=0)).running().passed(1, 2)
    bench.exited(bench.device(0))
    bench.reports(a_report(bench.device(1), voted=3, passed=3, held=3)).all_report(waiting_to_apply(3))
    assert isinstance(bench.state, Stopping) and bench.record.committed == 3


def test_the_lost_node_is_a_device_of_nobody() -> None:
    bench = trained().host_gone(N3)
    assert a_device(3) not in bench.record.pids and a_device(3) not in bench.record.listeners


# --- exact jobs ----------------------------------------------------------------------------------------------------------


def test_a_generation_that_ends_before_it_committed_passes_the_checkpoints_answer_on() -> None:
    """An exact job's next scale is made of it: without it, the first step after a second failure would have other bits."""
    answer = replace(an_answer(2), maxima=(0.5, 0.25))
    bench = trained().checkpoint(2, answer)
    # Both nodes of an interval: nothing but the checkpoint has it.
    owner, mirror = next(iter(partners(bench.plan).items()))
    for node in {owner.node, mirror.node}:
        bench.host_gone(node)
    for node in {owner.node, mirror.node}:
        bench.add_node(int(node[1:]))
    bench.all_report(holding(3)).planned().opened().prepared()
    first = bench.form()
    assert isinstance(first.restore, FromCheckpoint) and first.restore.checkpoint.answer == answer
    bench.ready()
    bench.exited(bench.device(0))
    bench.all_report(lambda d: a_report(d, generation=first.generation, voted=2, held=2)).prepared()
    second = bench.form()
    assert second.generation > first.generation
    assert isinstance(second.restore, FromMemory) and second.restore.answer == answer


def test_an_exact_job_says_when_its_bits_are_no_longer_the_same() -> None:
    spec = a_spec(pp=2, micro_batches=2)
    bench = Bench(nodes=2, spec=replace(spec, train=replace(spec.train, exact="best_effort"))).running().passed(1)
    before = bench.record.exact_on
    assert before == f"tp{bench.plan.tp} on cpu" and "exactness_changed" not in bench.said_to_people()
    bench.exited(bench.device(0)).all_report(holding(1)).planned().opened().prepared().ready()
    assert bench.record.exact_on == before and "exactness_changed" not in bench.said_to_people()
    node = bench.plan.nodes[0]
    bench.nodes[node] = replace(bench.nodes[node], kind="H100")
    bench.see_nodes().exited(bench.device(0))
    (said,) = [entry for entry in bench.history if entry.type == "exactness_changed"]
    assert said.message == (
        f"from the next step on weights have the bits of tp{bench.plan.tp} on H100 and cpu, no longer those of {before}"
    )
