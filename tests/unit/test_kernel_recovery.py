"""Ranks and nodes that fail, in every order and twice: what is closed, settled, planned, restored and told."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.domain.cluster import NodeStatus
from orchestrator.domain.effects import ChoosePlan
from orchestrator.domain.events import DeadlinePassed, HostClosed
from orchestrator.domain.failure import Cause
from orchestrator.domain.generation import RankReport
from orchestrator.domain.host_events import HostFailed
from orchestrator.domain.ids import Device
from orchestrator.domain.layout import layout, partners
from orchestrator.domain.origin import FromCheckpoint, FromMemory, FromSeed
from orchestrator.domain.profile import joined
from orchestrator.domain.requests import CloseGeneration, CloseHost, FormGeneration, OpenHost
from orchestrator.domain.state import Running, Stopping
from orchestrator.supervisor.deadlines import deadlines
from tests.builders import JOB, Bench, a_device, a_profile, a_report, a_spec, an_answer
from tests.recovering import N0, N1, N2, N3, holding, reforming, restoring, trained, waiting_to_apply

# --- one rank ----------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("ahead_s", [-40.0, 40.0])
def test_a_step_that_only_reports_prove_says_nothing_of_how_long_steps_take(ahead_s: float) -> None:
    """Hosts' clocks said when the others passed, ours when this one was settled (seed 5277)."""
    bench = trained(2).passed(3, ahead_s=ahead_s)
    before = bench.record.recent_step_s
    first, victim = bench.device(0), bench.device(7)
    bench.exited(victim, report=a_report(victim, voted=4, held=None))
    bench.reports(a_report(first, voted=4, passed=4, held=4)).all_report(lambda d: a_report(d, voted=4, passed=3, held=3))
    assert bench.record.committed == 4 and bench.record.recent_step_s == before and bench.steps[-1].seconds is None


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
    assert isinstance(restore, FromMemory)
    wanted = layout(bench.plan, a_profile(), mirrors=1)
    for device in (first, second):  # whose successors have nothing, be it for themselves
        assert device not in {move.source for move in restore.moves}
        assert joined(m.interval for m in restore.moves if m.target == device) == joined(wanted.held(device))


def test_what_comes_in_the_name_of_a_dead_rank_makes_its_successor_no_source() -> None:
    bench = trained()
    dead = bench.device(0)
    bench.exited(dead).prepared()
    bench.reports(a_report(dead, voted=3, passed=3, held=3)).all_report(holding(3))
    settlement = reforming(bench).closing.settlement
    assert settlement is not None and dead not in dict(settlement.holders)
    restore = bench.form().restore
    assert isinstance(restore, FromMemory) and dead in {move.target for move in restore.moves}


def test_32_of_64_ranks_that_die_together_are_one_recovery_of_one_round() -> None:
    bench = Bench(nodes=8, devices=8, spec=a_spec(tp=2, pp=2, dp=16, micro_batches=32)).running().passed(1, 2, 3)
    before = bench.plan
    victims = {device for device in before.devices if device.node in (N0, N1, N2, N3)}
    assert len(victims) == 32 and not {(a, b) for a, b in partners(before).items() if {a, b} <= victims}
    preparing = {node for victim in sorted(victims) for node in bench.exited(victim).preparing()}
    assert preparing == set(bench.nodes) and reforming(bench).attempt == 1, "all in one round, each by its own host"
    bench.prepared().all_report(holding(3))
    form = bench.form()
    assert isinstance(form.restore, FromMemory) and bench.plan.pipelines == before.pipelines
    moved = [move for move in form.restore.moves if move.source != move.target]
    assert moved and {move.target for move in moved} <= victims and not victims & {move.source for move in moved}
    bench.ready().passed(4)
    (incident,) = bench.record.incidents
    assert isinstance(bench.state, Running) and incident.attempts == 1 and incident.rolled_back == 0


# --- whole nodes -------------------------------------------------------------------------------------------------------


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


# --- a second failure --------------------------------------------------------------------------------------------------


def test_a_node_lost_while_the_next_generation_is_prepared_replans_without_it() -> None:
    bench = trained(tp=2, pp=2)
    bench.exited(bench.device(0)).prepared(N0, N1)
    bench.host_gone(N2)
    assert reforming(bench).forming is None and reforming(bench).closing.generation == 1
    bench.planned()
    assert N2 not in bench.plan.nodes and bench.record.generation == 3
    bench.all_report(holding(3)).prepared().ready().passed(4)
    assert isinstance(bench.state, Running) and bench.record.committed == 4 and len(bench.record.incidents) == 1


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


# --- hosts that fail ---------------------------------------------------------------------------------------------------


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


# --- exact jobs --------------------------------------------------------------------------------------------------------


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
