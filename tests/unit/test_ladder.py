"""The way out of a fault: each rung priced, the cheapest possible one taken, and a lost node's place taken whole."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.domain.failure import Cause, Fault
from orchestrator.domain.ids import Device, Generation, NodeId, Step
from orchestrator.domain.incident import Incident
from orchestrator.domain.plan import Infeasible, Plan
from orchestrator.domain.rungs import Option, Rung
from orchestrator.recovery.ladder import HORIZON_S, OPEN_S, Situation, options, substitute
from orchestrator.recovery.risk import risk
from tests.builders import a_device, a_plan, a_profile, a_spec

EIGHT = tuple(a_device(node, index) for node in range(4) for index in range(2))
SPARE = NodeId("n9"), (a_device(9, 0), a_device(9, 1))


def on(node: int) -> frozenset[Device]:
    return frozenset(device for device in EIGHT if device.node == f"n{node}")


def a_situation(
    *, missing: frozenset[Device] = frozenset(), lost: frozenset[Device] = frozenset(), **more: object
) -> Situation:
    plan = a_plan(EIGHT, tp=2, pp=2)
    left = frozenset(EIGHT) - missing
    seen = Situation(
        plan=plan,
        holders=plan,
        lost=lost | missing,
        missing=missing,
        usable=left,
        warm=left,
        spec=a_spec(),
        profile=a_profile(),
        step_s=0.5,
    )
    return replace(seen, **more)  # type: ignore[arg-type]


def by_rung(seen: Situation) -> dict[Rung, Option]:
    return {option.rung: option for option in options(seen)}


def taken(seen: Situation) -> Rung:
    return options(seen)[0].rung


# --- which one -----------------------------------------------------------------------------------------------------------


def test_a_dead_rank_is_forked_again_where_its_host_lives() -> None:
    assert taken(a_situation(lost=frozenset({EIGHT[3]}))) is Rung.FORK


def test_a_warm_spare_beats_a_smaller_plan() -> None:
    seen = a_situation(missing=on(1), spares=dict([SPARE]), usable=frozenset(EIGHT) - on(1) | set(SPARE[1]))
    found = by_rung(replace(seen, warm=seen.usable))
    assert taken(seen) is Rung.SPARE
    assert (found[Rung.SPARE].price_s or 0) < (found[Rung.REPLAN_WARM].price_s or 0)
    assert not found[Rung.FORK].is_possible and "n1" in found[Rung.FORK].why


def test_without_a_spare_what_is_warm_goes_on_and_says_what_that_costs() -> None:
    found = by_rung(a_situation(missing=on(1)))
    assert min(found.values(), key=lambda o: o.price_s or 1e9).rung is Rung.REPLAN_WARM
    price = found[Rung.REPLAN_WARM].price_s or 0
    assert HORIZON_S / 4 < price < HORIZON_S / 4 + 1 and "25% slower until a node comes" in found[Rung.REPLAN_WARM].why


def test_a_rung_costs_what_its_plan_is_slower_not_what_it_has_fewer_devices() -> None:
    seen = a_situation(missing=on(1), strength={Rung.REPLAN_WARM: 0.5, Rung.REPLAN_ALL: 0.5})
    found = by_rung(seen)[Rung.REPLAN_WARM]
    assert HORIZON_S / 2 < (found.price_s or 0) < HORIZON_S / 2 + 1 and "50% slower" in found.why
    gone = by_rung(replace(seen, strength={Rung.REPLAN_WARM: None}))[Rung.REPLAN_WARM]
    assert not gone.is_possible and "no plan fits the 6 warm devices" in gone.why


def test_a_spare_that_slows_the_plan_down_loses_to_going_on_without_it() -> None:
    seen = a_situation(missing=on(1), spares=dict([SPARE]))
    assert taken(seen) is Rung.SPARE
    slow = replace(seen, strength={Rung.SPARE: 0.4, Rung.REPLAN_WARM: 0.8})
    assert taken(slow) is Rung.REPLAN_WARM and "60% slower" in by_rung(slow)[Rung.SPARE].why


def test_where_an_idle_node_is_cold_the_job_trains_while_it_is_opened() -> None:
    """Waiting for the host with nothing training would cost four times as much."""
    cold = {a_device(7, 0), a_device(7, 1)}
    seen = a_situation(missing=on(1))
    found = by_rung(replace(seen, usable=seen.usable | cold))
    assert (found[Rung.REPLAN_WARM].price_s or 0) < OPEN_S < (found[Rung.REPLAN_ALL].price_s or 0)


def test_a_plan_that_needs_every_device_waits_for_a_host_to_open_or_a_node_to_come() -> None:
    fixed = a_spec(tp=2, pp=2, dp=2)
    cold = {a_device(7, 0), a_device(7, 1)}
    seen = a_situation(missing=on(1), spec=fixed)
    assert taken(seen) is Rung.WAIT
    assert by_rung(seen)[Rung.REPLAN_WARM].why == "needs 8 devices, 6 are warm"
    assert taken(replace(seen, usable=seen.usable | cold)) is Rung.REPLAN_ALL


def test_owner_and_mirror_lost_means_the_checkpoint_on_the_cheapest_place() -> None:
    seen = a_situation(missing=on(1) | on(0), spares={}, committed=Step(30), checkpoint=Step(25))
    found = options(seen)
    assert found[0].rung is Rung.CHECKPOINT and found[0].place is Rung.REPLAN_WARM
    assert "5 steps run again" in found[0].why
    assert {o.rung for o in found if o.is_possible} == {Rung.CHECKPOINT, Rung.WAIT}
    whole = replace(seen, holders=None)
    assert taken(whole) is Rung.REPLAN_WARM, "who holds what is not known: the reports will say"


def test_steps_that_would_be_run_again_are_part_of_the_price() -> None:
    lost = frozenset({EIGHT[0]})
    alone = a_situation(lost=lost, spec=a_spec(mirrors=0), committed=Step(12), checkpoint=Step(12))
    behind = replace(alone, checkpoint=Step(2))
    price, dearer = (by_rung(seen)[Rung.CHECKPOINT].price_s or 0.0 for seen in (alone, behind))
    assert dearer - price == pytest.approx(10 * 0.5)
    assert by_rung(behind)[Rung.CHECKPOINT].pause_s == by_rung(alone)[Rung.CHECKPOINT].pause_s


def test_without_mirrors_any_loss_goes_back() -> None:
    seen = a_situation(lost=frozenset({EIGHT[0]}), spec=a_spec(mirrors=0))
    assert options(seen)[0].place is Rung.FORK and "no mirrors" in options(seen)[0].why


@settings(deadline=None)
@given(st.sets(st.integers(0, 3), max_size=3), st.integers(0, 3), st.booleans())
def test_some_rung_is_always_possible_and_prices_ascend(nodes: set[int], spares: int, fixed: bool) -> None:
    missing = frozenset(device for node in nodes for device in on(node))
    stand_by = {NodeId(f"n{9 + i}"): (a_device(9 + i, 0), a_device(9 + i, 1)) for i in range(spares)}
    seen = a_situation(missing=missing, spares=stand_by, spec=a_spec(tp=2, pp=2, dp=2) if fixed else a_spec())
    found = options(seen)
    prices = [option.price_s for option in found if option.price_s is not None]
    assert len(found) == len(Rung) and {option.rung for option in found} == set(Rung)
    assert found[0].is_possible and prices == sorted(prices)
    assert all(option.why for option in found)
    for option in found:
        if option.is_possible:
            assert option.pause_s == pytest.approx(sum(option.phases.values())) and (option.price_s or 0) >= option.pause_s


# --- what is expected ----------------------------------------------------------------------------------------------------


def an_incident(rung: Rung, **phases: float) -> Incident:
    fault = Fault(cause=Cause.RANK_LOST, message="", at=0.0)
    return Incident(number=1, fault=fault, generation=Generation(1), rung=rung, phases=phases, pause_s=1.0)


def test_phases_are_expected_as_they_were_seen_and_preparing_as_on_the_same_rung() -> None:
    seen = a_situation(
        lost=frozenset({EIGHT[0]}),
        elapsed_s=0.04,
        incidents=(
            an_incident(Rung.REPLAN_WARM, form=9.0, settle=0.5, prepare=0.01),
            an_incident(Rung.FORK, form=0.1, prepare=0.2),
            an_incident(Rung.FORK, form=0.3, prepare=0.4),
        ),
    )
    phases = by_rung(seen)[Rung.FORK].phases
    assert next(iter(by_rung(seen))) is Rung.FORK, "another plan would have to fork, too"
    assert phases["form"] == pytest.approx(0.3) and phases["prepare"] == pytest.approx(0.3)
    assert phases["settle"] == 0.5 and phases["detect"] == 0.04 and phases["gather"] == 0.01


# --- taking a place ------------------------------------------------------------------------------------------------------


def test_a_spare_takes_the_place_of_a_node_and_nobody_else_moves() -> None:
    plan = a_plan(EIGHT, tp=2, pp=2)
    found = substitute(plan, on(1), dict([SPARE]))
    assert isinstance(found, Plan)
    assert found.devices == (EIGHT[0], EIGHT[1], *SPARE[1], *EIGHT[4:])
    assert "n9 takes the place of n1" in found.reason
    assert [pipeline.micro_batches for pipeline in found.pipelines] == [p.micro_batches for p in plan.pipelines]


def test_a_tp_group_moves_whole() -> None:
    found = substitute(a_plan(EIGHT, tp=2, pp=2), frozenset({EIGHT[3]}), dict([SPARE]))
    assert isinstance(found, Plan) and found.devices[2:4] == SPARE[1]


def test_a_spare_of_the_same_rack_comes_first_and_the_plan_knows_its_rack() -> None:
    plan = replace(a_plan(EIGHT, tp=2, pp=2), domains={NodeId("n1"): "rack=a", NodeId("n0"): "rack=b"})
    spares = {NodeId(f"n{n}"): (a_device(n, 0), a_device(n, 1)) for n in (7, 8)}
    found = substitute(plan, on(1), spares, {NodeId("n8"): "rack=a", NodeId("n7"): "rack=b"})
    assert isinstance(found, Plan) and NodeId("n8") in found.nodes
    assert found.domains == {"n0": "rack=b", "n8": "rack=a"}


def test_two_nodes_may_share_a_large_spare_but_none_is_cut_in_two() -> None:
    plan = a_plan(EIGHT, tp=2, pp=2)
    large = {NodeId("n9"): tuple(a_device(9, i) for i in range(4))}
    assert isinstance(substitute(plan, on(0) | on(2), large), Plan)
    small = {NodeId(f"n{n}"): (a_device(n, 0),) for n in (7, 8)}
    refused = substitute(plan, on(0), small)
    assert (
        isinstance(refused, Infeasible) and refused.reason == "n0 needs 2 devices on one node, the largest spare has 1 left"
    )


# --- at risk -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("devices", "mirrors", "why"),
    [
        (EIGHT, 1, ""),
        (EIGHT[:1], 0, ""),
        (EIGHT[:1], 1, "its one device has no other"),
        (EIGHT[:2], 1, "all mirrors are on n0 with their owners"),
        ((*EIGHT[:2], EIGHT[2]), 1, "n0 has more than half of the devices, so 1 mirrors"),
    ],
)
def test_a_job_is_at_risk_where_one_node_holds_both_copies(devices: tuple[Device, ...], mirrors: int, why: str) -> None:
    assert risk(a_plan(devices), mirrors=mirrors).startswith(why) and bool(why) == bool(
        risk(a_plan(devices), mirrors=mirrors)
    )
