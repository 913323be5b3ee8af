"""Newcomers of a larger plan: who gives them what, when training stops for them, and what goes wrong meanwhile."""

from __future__ import annotations

from dataclasses import replace

from orchestrator.domain.events import DeadlinePassed
from orchestrator.domain.failure import Cause
from orchestrator.domain.generation import Arrived, RankReport
from orchestrator.domain.host_events import HostOpened, JoinFailed
from orchestrator.domain.ids import Device, NodeId, Step
from orchestrator.domain.layout import layout
from orchestrator.domain.origin import FromMemory
from orchestrator.domain.profile import Interval, joined
from orchestrator.domain.requests import BeginJoin, CloseGeneration, CloseHost, EndJoin, KillRank, PrepareSeats, StopAfter
from orchestrator.domain.state import Reforming, Running
from orchestrator.supervisor.deadlines import deadlines
from tests.builders import JOB, Bench, a_profile, a_report, a_spec

N2 = NodeId("n2")


def joining() -> Bench:
    """A job on two nodes of two devices whose two newcomers are being given their state; step 3 is committed."""
    bench = Bench(nodes=2, spec=a_spec(tp=2, pp=2)).running().passed(1, 2, 3)
    bench.add_node(2).add_node(3).planned()
    for node in ("n2", "n3"):
        bench.said(NodeId(node), HostOpened(seconds=1.0))
    assert bench.record.join is not None and isinstance(bench.state, Running)
    return bench.copying()


def begun(bench: Bench) -> BeginJoin:
    orders = {repr(order): order for _, order in bench.calls(BeginJoin)}
    (order,) = orders.values()
    return order


def stopped(device: Device, step: int) -> RankReport:
    return replace(a_report(device, voted=step, passed=step, held=step), stopped=True)


def with_all(bench: Bench, device: Device, step: int) -> RankReport:
    """A newcomer's report: everything the next plan gives it."""
    held = layout(bench.plan, a_profile(), mirrors=1).held(device)
    return replace(a_report(device, generation=1, held=None), arrived=Arrived(step=Step(step), intervals=joined(held)))


def test_newcomers_are_given_exactly_what_the_next_plan_gives_them_by_members() -> None:
    bench = joining()
    order, join = begun(bench), bench.record.join
    assert join is not None and order.plan == join.plan and order.of == 1 and order.generation == join.generation
    wanted = layout(join.plan, a_profile(), mirrors=1)
    for device in bench.newcomers:
        given = [move.interval for move in order.moves if move.target == device]
        assert joined(given) == joined(wanted.held(device)) and sum(map(len, given)) == sum(map(len, wanted.held(device)))
    assert {move.source for move in order.moves} <= set(bench.plan.devices)
    assert set(order.addresses) == set(bench.newcomers)
    told = {node for node, _ in bench.calls(BeginJoin)}
    assert told == {device.node for move in order.moves for device in (move.source, move.target)}
    bench.passed(4)
    assert isinstance(bench.state, Running) and bench.record.committed == 4


def test_training_stops_between_two_steps_when_the_last_newcomer_has_caught_up_and_nothing_moves_to_it() -> None:
    bench = joining()
    members, (first, *others) = bench.plan.devices, bench.newcomers
    bench.caught_up(first)
    assert not bench.calls(StopAfter)
    bench.caught_up(*others)
    assert bench.said_to_people().count("pausing") == 1
    bench.passed(4).reports(stopped(members[0], 4))
    state = bench.state
    assert isinstance(state, Reforming) and state.fault.cause is Cause.GROW and bench.record.join is None
    assert {node for node, _ in bench.calls(EndJoin)} == {device.node for device in (first, *others)}
    assert state.closing.awaited == {*members[1:], first, *others}
    bench.reports(*(stopped(device, 4) for device in members[1:]))
    bench.reports(*(with_all(bench, device, 4) for device in (first, *others))).prepared()
    form = bench.form()
    assert isinstance(form.restore, FromMemory) and form.restore.step == 4
    assert not {move.target for move in form.restore.moves} & {first, *others}
    assert not {move.source for move in form.restore.moves} & {first, *others}, "they may be far from everybody"
    bench.ready().passed(5)
    assert bench.record.incidents[-1].rolled_back == 0 and bench.record.joins_failed == 0


def test_newcomer_that_reports_before_any_member_begins_the_same_pause() -> None:
    bench = joining().caught_up()
    newcomer = bench.newcomers[0]
    bench.reports(replace(a_report(newcomer, generation=1, held=None), stopped=True))
    assert isinstance(bench.state, Reforming) and bench.state.fault.cause is Cause.GROW


def test_what_a_newcomer_lacks_at_the_end_is_moved_in_the_pause() -> None:
    bench = joining().caught_up()
    members, newcomers = bench.plan.devices, bench.newcomers
    bench.passed(4).reports(*(stopped(device, 4) for device in members))
    bench.reports(*(with_all(bench, device, 3) for device in newcomers)).prepared()
    form = bench.form()
    assert isinstance(form.restore, FromMemory) and form.restore.step == 4, (
        "step 3 is torn from the others: it is no source"
    )
    assert set(newcomers) <= {move.target for move in form.restore.moves}


def test_lost_newcomer_is_trained_without_and_tried_again_a_few_times() -> None:
    bench = joining()
    for attempt in (1, 2, 3):
        victim, other = bench.newcomers[0], bench.newcomers[1]
        bench.exited(victim)
        assert isinstance(bench.state, Running) and bench.record.join is None and not bench.calls(CloseGeneration)
        assert (other.node, other) in [(node, order.device) for node, order in bench.calls(KillRank)]
        assert bench.record.joins_failed == attempt
        bench.planned()
        if attempt < 3:
            assert bench.record.join is not None
            bench.copying()
    assert bench.record.join is None and bench.record.target is None, "until the cluster changes, or a minute has passed"
    bench.tell(DeadlinePassed(job=JOB, key="join_again:3")).planned()
    assert bench.record.join is not None


def test_lost_host_of_a_newcomer_ends_the_join() -> None:
    bench = joining().host_gone(N2)
    assert isinstance(bench.state, Running) and bench.record.join is None
    assert all(device.node != N2 for device in bench.record.pids)


def test_member_lost_in_the_copy_is_recovered_as_ever_and_newcomers_begin_again() -> None:
    bench = joining()
    before = bench.plan
    bench.exited(bench.plan.devices[0])
    assert isinstance(bench.state, Reforming) and bench.record.join is None and bench.plan.pipelines == before.pipelines
    assert not bench.state.closing.awaited - set(before.devices)
    bench.all_report(lambda d: a_report(d, voted=3, passed=3, held=3)).prepared().ready().passed(4).planned()
    assert bench.record.join is not None and [type(r) for _, r in bench.calls(PrepareSeats)]


def test_node_of_a_newcomer_that_is_late_is_waited_for_where_the_only_copy_is_on_it() -> None:
    """All members have reported, and they would be given up with it."""
    bench = Bench(nodes=1, devices=2, spec=a_spec()).running().passed(1, 2, 3)
    bench.add_node(0, devices=4).planned().copying().caught_up()
    members, (first, last) = bench.plan.devices, bench.newcomers
    bench.passed(4).reports(*(stopped(device, 4) for device in members), with_all(bench, first, 4))
    state = bench.state
    assert isinstance(state, Reforming) and state.closing.awaited == {last}
    bench.tell(DeadlinePassed(job=JOB, key="settle:1"))
    assert isinstance(bench.state, Reforming) and bench.state.is_patient and not bench.calls(CloseHost)
    bench.reports(with_all(bench, last, 4)).prepared().ready().passed(5)
    assert bench.record.incidents[-1].rolled_back == 0


def test_newcomers_of_a_job_at_risk_are_asked_though_nobody_has_heard_how_far_they_have_come() -> None:
    """The only member is lost before that is heard: what it held is where it was copied to, and nowhere else."""
    bench = Bench(nodes=1, devices=1, spec=a_spec()).running().passed(1, 2, 3)
    assert bench.record.at_risk
    bench.add_node(2, devices=1).planned()
    bench.said(N2, HostOpened(seconds=1.0)).copying()
    (newcomer,), held = bench.newcomers, [Interval(line.name, 0, line.numel) for line in a_profile().lines]
    bench.passed(4).host_gone(bench.plan.nodes[0])
    state = bench.state
    assert isinstance(state, Reforming) and state.closing.awaited == {newcomer}
    assert [node for node, _ in bench.calls(EndJoin)] == [N2]
    report = a_report(newcomer, generation=1, held=None)
    bench.reports(replace(report, arrived=Arrived(step=Step(4), intervals=joined(held)))).planned().prepared()
    form = bench.form()
    assert isinstance(form.restore, FromMemory) and form.restore.step == 4
    bench.ready().passed(5)
    assert bench.record.incidents[-1].rolled_back == 0


def test_source_that_breaks_off_is_replaced_by_another_holder_and_in_the_end_by_the_pause() -> None:
    bench = joining()
    newcomer, join = bench.newcomers[0], bench.record.join
    assert join is not None
    asked: set[Device] = set()
    for attempt in range(4):
        join = bench.record.join
        assert join is not None
        if newcomer in join.done:
            break
        moves = [move for move in join.moves if move.target == newcomer]
        source = moves[-1].source
        lacking = joined(move.interval for move in moves if move.source == source)
        asked.add(source)
        failed = JoinFailed(device=newcomer, generation=join.generation, source=source, attempt=attempt, message="gone")
        bench.said(newcomer.node, failed)
        if bench.calls(BeginJoin):
            again = begun(bench)
            assert again.attempt == attempt + 1 and joined(move.interval for move in again.moves) == lacking
            assert not {move.source for move in again.moves} & asked
            bench.said(newcomer.node, failed)
            assert not bench.calls(BeginJoin), "told again"
    assert newcomer in bench.record.join.done and bench.said_to_people().count("copy_given_up") == 1  # type: ignore[union-attr]
    bench.caught_up(*(device for device in bench.newcomers if device != newcomer))
    assert bench.record.join.stopping  # type: ignore[union-attr]


def test_copy_that_takes_too_long_is_given_up() -> None:
    bench = joining()
    join = bench.record.join
    assert join is not None and f"join_copy:{join.generation}" in deadlines(bench.record)
    newcomers = bench.newcomers
    bench.tell(DeadlinePassed(job=JOB, key=f"join_copy:{join.generation}"))
    assert isinstance(bench.state, Running) and bench.record.join is None and bench.record.target is None
    assert [(node, order.device) for node, order in bench.calls(KillRank)] == [(d.node, d) for d in newcomers]


def test_ranks_that_stopped_for_a_plan_that_is_gone_go_on_with_the_old_one() -> None:
    bench = joining().caught_up()
    before = bench.plan
    bench.host_gone(N2)
    assert isinstance(bench.state, Running)
    bench.reports(stopped(before.devices[0], 3))
    assert isinstance(bench.state, Reforming) and bench.plan.pipelines == before.pipelines
    assert bench.record.failures_in_a_row == 0


def test_end_of_a_newcomer_that_was_let_go_is_no_loss_of_the_next_join() -> None:
    bench = joining()
    first, *others = bench.newcomers
    bench.exited(first)
    bench.planned()
    assert bench.record.join is not None and bench.record.joins_failed == 1
    for device in others:  # killed with the join before, and told when their places are being prepared again
        bench.exited(device)
    assert bench.record.join is not None and bench.record.joins_failed == 1
    bench.copying().caught_up()
    assert bench.record.join.stopping and bench.record.joins_failed == 0, "in a row"


def test_a_process_that_took_the_place_of_one_let_go_is_not_asked_what_it_holds() -> None:
    """It was there when the next join was planned, and had ended when its seat was prepared (seed 16892)."""
    bench = joining()
    first, *others = bench.newcomers
    bench.exited(first).planned()
    for device in others:
        bench.exited(device)
    bench.copying()
    victim = bench.device(0)
    bench.exited(victim)
    assert isinstance(bench.state, Reforming) and not bench.state.closing.awaited & {first, *others}


def test_what_a_newcomer_says_by_itself_ends_no_generation_that_trains() -> None:
    bench = joining()
    newcomer = bench.newcomers[0]
    bench.reports(a_report(newcomer, generation=1, held=None))
    assert isinstance(bench.state, Running) and bench.record.join is not None
    bench.caught_up().reports(a_report(newcomer, generation=1, held=None))
    assert isinstance(bench.state, Reforming) and bench.state.fault.cause is Cause.GROW, "it was told by all that they stop"


def test_machines_that_come_one_after_another_are_all_used() -> None:
    bench = Bench(nodes=2, spec=a_spec(tp=1, pp=1, micro_batches=8)).running().passed(1, 2, 3)
    bench.add_node(2).planned().said(N2, HostOpened(seconds=1.0)).copying()
    bench.add_node(3).caught_up()
    members, newcomers = bench.plan.devices, bench.newcomers
    bench.passed(4).reports(*(stopped(device, 4) for device in members))
    bench.reports(*(with_all(bench, device, 4) for device in newcomers)).prepared().ready().passed(5)
    assert bench.plan.nodes == (NodeId("n0"), NodeId("n1"), N2)
    bench.planned()
    assert bench.record.target is not None and NodeId("n3") in bench.record.target.nodes


def test_machine_that_comes_while_another_is_warmed_is_joined_with_it() -> None:
    bench = Bench(nodes=2, spec=a_spec(tp=1, pp=1, micro_batches=8)).running().passed(1, 2, 3)
    bench.add_node(2).planned().add_node(3)
    bench.said(N2, HostOpened(seconds=1.0))
    assert bench.record.join is None, "a larger plan is on its way"
    bench.planned()
    assert bench.record.join is None and bench.record.target is not None and bench.record.target.world_size == 8
    bench.said(NodeId("n3"), HostOpened(seconds=1.0))
    assert bench.record.join is not None and len(bench.newcomers) == 4


def test_machine_is_used_though_the_one_that_came_with_it_is_gone_again() -> None:
    bench = Bench(nodes=2, spec=a_spec(tp=1, pp=1, micro_batches=8)).running().passed(1, 2, 3)
    bench.nodes[N2] = replace(bench.nodes[NodeId("n0")], id=N2)
    bench.add_node(3).planned()
    assert bench.record.target is not None and bench.record.target.world_size == 8
    bench.host_gone(N2).planned()
    assert bench.record.target is not None and bench.record.target.nodes == (NodeId("n0"), NodeId("n1"), NodeId("n3"))


def test_machine_whose_host_could_not_be_started_is_tried_again() -> None:
    bench = Bench(nodes=2, spec=a_spec(tp=1, pp=1, micro_batches=8)).running().passed(1, 2, 3)
    bench.add_node(2).planned()
    assert bench.record.target is not None
    bench.host_gone(N2)
    assert isinstance(bench.state, Running) and bench.record.target is None and N2 in bench.record.avoided
    bench.tell(DeadlinePassed(job=JOB, key="retry:1")).planned()
    assert bench.record.target is not None and N2 in bench.record.target.nodes
