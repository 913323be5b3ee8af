"""Nodes that come: hosts are warmed while the job trains on, donors that have given, silence meanwhile."""

from __future__ import annotations

from dataclasses import replace

from orchestrator.domain.events import DeadlinePassed
from orchestrator.domain.failure import Cause
from orchestrator.domain.host_events import HostOpened
from orchestrator.domain.ids import Generation, NodeId
from orchestrator.domain.layout import layout
from orchestrator.domain.origin import FromMemory
from orchestrator.domain.requests import OpenHost, PrepareSeats, StopAfter
from orchestrator.domain.state import Running
from orchestrator.domain.status import aside_of
from orchestrator.supervisor.deadlines import deadlines
from tests.builders import JOB, Bench, a_device, a_profile, a_report, a_spec
from tests.recovering import N0, N3, holding, reforming, trained


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
    assert isinstance(bench.state, Running) and aside_of(bench.record) != ""
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


def on_a100s() -> Bench:
    """One micro-batch each for four of them, paced as they compute."""
    spec = a_spec(tp=1, pp=1, micro_batches=4)
    spec = replace(spec, train=replace(spec.train, emulated_layer_s=0.01))
    return Bench(nodes=4, devices=1, spec=spec, kind="A100").running().passed(1, 2, 3)


def test_a_faster_node_that_makes_fewer_devices_the_faster_plan_is_used() -> None:
    bench = on_a100s().add_node(4, devices=1, kind="B200").planned()
    target = bench.record.target
    assert target is not None and target.nodes == ("n4",) and bench.plan.world_size == 4
    assert "less on other devices" in bench.history[-1].message
    bench.said(NodeId("n4"), HostOpened(seconds=1.0)).passed(4).copying().caught_up()
    assert {node for node, _ in bench.calls(StopAfter)} == set(bench.plan.nodes)
    bench.reports(replace(holding(4)(bench.device(0)), stopped=True))
    bench.all_report(holding(4)).prepared().ready().passed(5)
    assert isinstance(bench.state, Running) and bench.plan.nodes == ("n4",)
    assert bench.record.incidents[-1].rolled_back == 0


def test_another_node_of_the_same_kind_that_nobody_has_work_for_changes_nothing() -> None:
    bench = on_a100s().add_node(4, devices=1, kind="A100").planned()
    assert bench.record.target is None and isinstance(bench.state, Running)


def test_nodes_that_come_while_the_first_is_warmed_are_one_change_together() -> None:
    bench = Bench(nodes=2, devices=1, spec=a_spec(tp=1, pp=1, micro_batches=8)).running().passed(1, 2, 3)
    bench.add_node(2, devices=1).planned().passed(4).add_node(3, devices=1).planned().add_node(4, devices=1).planned()
    assert isinstance(bench.state, Running) and bench.plan.world_size == 2, "nothing stops meanwhile"
    bench.said(NodeId("n2"), HostOpened(seconds=1.0)).passed(5)
    assert bench.record.join is None, "the first is warm, and the others are waited for"
    bench.said(NodeId("n3"), HostOpened(seconds=1.0)).said(NodeId("n4"), HostOpened(seconds=1.0)).passed(6)
    assert {device.node for device in bench.newcomers} == {"n2", "n3", "n4"}
    bench.copying().caught_up().reports(replace(holding(6)(bench.device(0)), stopped=True))
    bench.all_report(holding(6)).prepared().ready().passed(7)
    assert bench.plan.world_size == 5
    assert [one.fault.cause for one in bench.record.incidents] == [Cause.GROW], "one change for all three"
