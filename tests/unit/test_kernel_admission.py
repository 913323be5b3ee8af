"""Nodes are checked before anything is placed on them, and after a fault that points at them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.domain.admission import Admission, Admittance, Checked
from orchestrator.domain.cluster import NodeStatus
from orchestrator.domain.effects import CheckNode
from orchestrator.domain.events import InstantCame, NodeChecked, ReleaseRequested
from orchestrator.domain.ids import NodeId
from orchestrator.domain.state import Running
from orchestrator.recovery import admission
from orchestrator.recovery.admission import ASK_AGAIN_S, FLAPS, MAX_UNANSWERED, PAROLE_S, SLOW_X
from orchestrator.supervisor.deadlines import instants
from orchestrator.supervisor.kernel import State
from tests.builders import Bench, a_report, a_spec

N0, N1, N2, N3 = (NodeId(f"n{number}") for number in range(4))
WELL = Checked(said="all well", product_s=0.01)
BAD = Checked(wrong=("3 elements of a product of matrices are wrong",))


def a_bench(nodes: int = 2) -> Bench:
    bench = Bench(nodes=nodes, spec=a_spec(tp=2))
    bench.kernel = State(root="/shared", checks=True)
    return bench


def asked(bench: Bench) -> dict[NodeId, CheckNode]:
    return {one.node: one for one in bench.last.loose if isinstance(one, CheckNode)}


def says(bench: Bench, node: NodeId, found: Checked) -> Bench:
    return bench.tell(NodeChecked(node=node, number=bench.kernel.admissions[node].number, found=found))


def standing(bench: Bench, node: NodeId) -> Admittance:
    return bench.kernel.admissions[node].standing


def waited(bench: Bench, seconds: float) -> Bench:
    """Until every instant that comes within that time has been waited for."""
    until = bench.now + seconds
    while soon := {k: s for k, s in instants({}, (), bench.now, bench.kernel.admissions).items() if bench.now + s <= until}:
        key = min(soon, key=lambda one: soon[one])
        bench.now += soon[key]
        bench.tell(InstantCame(key=key))
    bench.now = until
    return bench


def running(nodes: int = 2) -> Bench:
    bench = a_bench(nodes).see_nodes()
    for node in bench.nodes:
        says(bench, node, WELL)
    return bench.running().passed(1, 2, 3)


def test_a_new_node_is_checked_with_another_and_used_once_it_is_well() -> None:
    bench = running().add_node(2)
    assert asked(bench) == {N2: CheckNode(node=N2, number=1, peer=N0)} and bench.record.target is None
    says(bench, N2, WELL).planned()
    assert bench.record.target is not None and N2 in bench.record.target.nodes


def test_a_job_waits_a_moment_for_nodes_that_are_being_checked() -> None:
    bench = a_bench().see_nodes().submitted().probed()
    assert not bench.record.planning
    says(bench, N0, WELL)
    assert not bench.record.planning, "it would begin on one node and grow at once"
    assert says(bench, N1, WELL).record.planning


def test_a_check_that_lasts_keeps_nobody_waiting() -> None:
    bench = says(a_bench().see_nodes().submitted().probed(), N0, WELL)
    waited(bench, admission.CHECK_S + 1.0)
    assert bench.record.planning


def test_a_node_that_is_not_fit_is_refused_and_says_why() -> None:
    bench = says(running().add_node(2), N2, BAD)
    found = bench.kernel.admissions[N2]
    assert found.standing is Admittance.REFUSED and "product of matrices" in found.why and bench.record.target is None
    waited(bench, PAROLE_S + 1.0)
    assert standing(bench, N2) is Admittance.CHECKING
    says(bench, N2, BAD)
    waited(bench, 1.5 * PAROLE_S)
    assert standing(bench, N2) is Admittance.REFUSED, "each strike doubles the time to the next parole"
    waited(bench, PAROLE_S)
    says(bench, N2, WELL).planned()
    assert bench.record.target is not None and N2 in bench.record.target.nodes


def test_an_operator_has_a_refused_node_checked_at_once() -> None:
    bench = says(running().add_node(2), N2, BAD)
    bench.tell(ReleaseRequested(node=N2))
    assert standing(bench, N2) is Admittance.CHECKING and N2 in asked(bench)
    assert bench.kernel.admissions[N2].strikes == 0


def test_a_check_that_nobody_answers_is_asked_again_and_then_refused() -> None:
    bench = running().add_node(2)
    for _ in range(MAX_UNANSWERED - 1):
        waited(bench, ASK_AGAIN_S + 0.1)
        assert standing(bench, N2) is Admittance.CHECKING and N2 in asked(bench)
    waited(bench, ASK_AGAIN_S + 0.1)
    assert standing(bench, N2) is Admittance.REFUSED


def test_a_late_answer_to_an_earlier_check_is_none() -> None:
    bench = running().add_node(2)
    waited(bench, ASK_AGAIN_S + 0.1)
    bench.tell(NodeChecked(node=N2, number=1, found=WELL))
    assert standing(bench, N2) is Admittance.CHECKING


def test_one_peer_that_it_cannot_reach_may_be_the_peers_fault() -> None:
    bench = running().add_node(2)
    says(bench, N2, replace(WELL, pair_wrong="no sum with n0"))
    assert asked(bench)[N2].peer == N1
    says(bench, N2, WELL)
    assert standing(bench, N2) is Admittance.ADMITTED and "n0" in bench.kernel.admissions[N2].why


def test_a_node_that_reaches_nobody_is_refused() -> None:
    bench = running().add_node(2)
    says(bench, N2, replace(WELL, pair_wrong="no sum with n0"))
    says(bench, N2, replace(WELL, pair_wrong="no sum with n1"))
    assert bench.kernel.admissions[N2].why == "no sum with n1"
    assert standing(bench, N2) is Admittance.REFUSED and standing(bench, N0) is standing(bench, N1) is Admittance.ADMITTED


def test_a_node_much_slower_than_others_of_its_kind_is_refused() -> None:
    bench = running().add_node(2)
    says(bench, N2, replace(WELL, product_s=2 * SLOW_X * WELL.product_s))
    assert standing(bench, N2) is Admittance.REFUSED and "as long as on other cpu nodes" in bench.kernel.admissions[N2].why


@pytest.mark.parametrize(("tflops", "fit"), [(620.0, True), (90.0, False), (0.0, True)])
def test_an_accelerator_reaches_some_of_its_kinds_peak(tflops: float, fit: bool) -> None:
    """0.0: it is emulated, and stands for a kind without being one."""
    new = Admission(node=N0, since=0.0, number=1, asked_at=0.0)
    found = admission.answered(new, Checked(tflops=tflops), "H200", (), False, 1.0)
    assert (found.standing is Admittance.ADMITTED) is fit


def test_a_fault_that_points_at_a_node_has_it_checked_once_the_job_has_recovered() -> None:
    bench = running(nodes=3)
    bench.now += admission.ACCUSED_AGAIN_S
    bench.host_gone(N1)
    assert not asked(bench)
    step = bench.record.committed
    bench.all_report(lambda device: a_report(device, voted=step, passed=step, held=step)).planned().prepared().ready()
    assert not asked(bench), "it has not recovered yet"
    bench.passed(step + 1)
    assert N1 in asked(bench) and "a fault points at it" in bench.kernel.admissions[N1].why


def test_a_node_that_was_started_again_is_checked_again() -> None:
    bench = running()
    bench.nodes[N1] = replace(bench.nodes[N1], life="another")
    bench.kernel = replace(
        bench.kernel, admissions={n: replace(one, life="one") for n, one in bench.kernel.admissions.items()}
    )
    bench.see_nodes()
    assert N1 in asked(bench) and standing(bench, N1) is Admittance.CHECKING


def test_a_node_that_comes_and_goes_is_left_and_what_trains_there_trains_on() -> None:
    bench = running()
    for _ in range(FLAPS):
        bench.silence_node(N1)
        bench.silence_node(N1, speaks=True)
    assert standing(bench, N1) is Admittance.REFUSED and f"{FLAPS} times" in bench.kernel.admissions[N1].why
    assert isinstance(bench.state, Running) and "node_refused" in bench.said_to_people()
    bench.planned()
    assert bench.record.target is not None and bench.record.target.nodes == (N0,)


def test_silence_now_and_then_is_nothing() -> None:
    bench = running()
    for _ in range(3 * FLAPS):
        bench.silence_node(N1)
        bench.silence_node(N1, speaks=True)
        bench.now += 2 * admission.FLAPS_WITHIN_S / FLAPS
    assert standing(bench, N1) is Admittance.ADMITTED


def test_where_nodes_are_not_checked_nothing_is_kept() -> None:
    bench = Bench(nodes=2, spec=a_spec(tp=2)).running()
    assert not bench.kernel.admissions and not asked(bench)


def test_nodes_that_a_job_trains_on_are_fit_for_a_supervisor_that_has_never_checked_any() -> None:
    bench = Bench(nodes=2, spec=a_spec(tp=2)).running().passed(1, 2, 3)
    bench.kernel = replace(bench.kernel, checks=True, nodes=None)
    bench.see_nodes()
    assert {standing(bench, node) for node in bench.nodes} == {Admittance.ADMITTED}


def test_a_node_whose_device_could_not_be_tried_is_refused_and_nothing_is_held_against_it() -> None:
    """It is looked at again soon, however often, and an operator may have that done at once."""
    bench = running().add_node(2)
    closed = Checked(untried=("device 0: it lets nobody in; its compute mode is exclusive",), said="two were tested")
    for _ in range(3):
        says(bench, N2, closed)
        refused = bench.kernel.admissions[N2]
        assert refused.standing is Admittance.REFUSED and "compute mode" in refused.why and not refused.strikes
        waited(bench, PAROLE_S + 1.0)
        assert standing(bench, N2) is Admittance.CHECKING
    says(bench, N2, closed)
    bench.tell(ReleaseRequested(node=N2))
    assert standing(bench, N2) is Admittance.CHECKING
    assert standing(says(bench, N2, WELL), N2) is Admittance.ADMITTED


def test_a_node_that_was_started_again_is_waited_for_like_a_new_one() -> None:
    bench = a_bench().see_nodes()
    for node in (N0, N1):
        says(bench, node, WELL)
    for status in (NodeStatus.LOST, NodeStatus.UP):
        bench.nodes[N0] = replace(bench.nodes[N0], status=status, life=f"{N0}-{status}")
        bench.see_nodes()
    assert not bench.kernel.admissions[N0].was_admitted
    bench.submitted().probed()
    assert not bench.record.planning, "it would begin on one node and grow at once"
    assert says(bench, N0, WELL).record.planning
