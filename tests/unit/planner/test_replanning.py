"""After a loss: what still runs takes over, lost places are filled, or everything is cut anew, and the least moves."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.domain.kinds import KINDS
from orchestrator.planner.ask import Ask, NoPlan, Planned
from orchestrator.planner.compose import Limits
from orchestrator.planner.machines import Machines, NodeGroup, machines
from orchestrator.planner.placement import place
from orchestrator.planner.replan import Change, Current, Index, Outlook, Rung, placed, replan
from orchestrator.planner.search import Benches, search
from orchestrator.planner.transport import busiest_sender, least_moves
from tests.planning import a_cluster, a_model, an_ask


def running(cluster: Machines, ids: int = 48, *, limits: Limits = Limits()) -> tuple[Current, Outlook]:
    ask: Ask = an_ask(a_model(8, 4096, sequence=2048), cluster, ids, limits=limits)
    benches = Benches()
    found = search(ask, benches)
    assert isinstance(found, Planned)
    plan = place(found.best, cluster)
    return Current(proposal=found.best, plan=plan, machines=cluster), Outlook(ask=ask, benches=benches)


def changed(found: Change | NoPlan) -> Change:
    assert isinstance(found, Change), found
    return found


def test_soon_changed_again_the_others_take_the_ids_and_what_the_lost_one_owned() -> None:
    current, outlook = running(a_cluster(("A100", 4, 2)), limits=Limits(least_depth=2, most_depth=2))
    lost = current.plan.nodes[0]
    found = changed(replan(current, outlook, nodes=(lost,), horizon=0.01))
    assert found.rung is Rung.ABSORB
    whole = sum(layer.params(1) for layer in outlook.ask.model.layers) * outlook.ask.rules.owned_bytes
    assert 0.0 < found.moved_bytes < whole, "shares of the state are cut anew; copies stay where they are"
    plan = placed(found, current, nodes=(lost,))
    assert lost not in plan.nodes
    assert sorted(i for p in plan.pipelines for i in p.micro_batches) == list(range(48))
    before = {p.stages for p in current.plan.pipelines}
    assert all(p.stages in before for p in plan.pipelines), "who goes on keeps its places"
    assert "the others take their ids and" in found.reason and "of their state" in found.reason


def test_an_idle_node_takes_a_lost_one_s_place_and_only_its_layers_move() -> None:
    current, outlook = running(a_cluster(("A100", 5, 1)), limits=Limits(least_depth=2, most_depth=2, replicas=2))
    lost = current.plan.pipelines[0].stages[0].devices[0].node
    found = changed(replan(current, outlook, nodes=(lost,), horizon=10_000))
    assert found.rung is Rung.REPAIR and found.moved_bytes > 0
    plan = placed(found, current, nodes=(lost,))
    assert lost not in plan.nodes and plan.world_size == 4
    kept = {device for device in plan.devices} & set(current.plan.devices)
    assert len(kept) == 3


def test_a_node_that_fills_a_place_brings_its_failure_domain() -> None:
    """Mirrors keep out of it as of any other's."""
    racks = {"a": 2, "b": 2, "c": 1}
    cluster = machines(
        [NodeGroup(kind=KINDS["A100"], nodes=nodes, devices=1, domain=f"rack={rack}") for rack, nodes in racks.items()]
    )
    current, outlook = running(cluster, limits=Limits(least_depth=2, most_depth=2, replicas=2))
    (idle,) = (machine for machine in cluster.nodes if machine.node not in current.plan.nodes)
    lost = next(node for node in current.plan.nodes if current.plan.domains[node] != idle.domain)
    found = changed(replan(current, outlook, nodes=(lost,), horizon=10_000))
    plan = placed(found, current, nodes=(lost,))
    assert found.rung is Rung.REPAIR and idle.node in plan.nodes
    assert plan.domains == {one.node: one.domain for one in cluster.nodes if one.node in plan.nodes}


def test_where_no_pipeline_is_whole_everything_is_cut_anew() -> None:
    current, outlook = running(a_cluster(("A100", 4, 1)), limits=Limits(least_depth=3, most_depth=4, replicas=1))
    lost = current.plan.nodes[0]
    found = changed(replan(current, outlook, nodes=(lost,), horizon=1000))
    plan = placed(found, current, nodes=(lost,))
    assert lost not in plan.nodes and found.rung in (Rung.RESHAPE, Rung.REPAIR)
    stages = plan.pipelines[0].stages
    assert (stages[0].first, stages[-1].last) == (0, 10)


def test_what_nothing_was_lost_of_moves_nothing() -> None:
    current, outlook = running(a_cluster(("A100", 5, 1)), limits=Limits(least_depth=2, most_depth=2, replicas=2))
    (idle,) = {machine.node for machine in current.machines.nodes} - set(current.plan.nodes)
    found = changed(replan(current, outlook, nodes=(idle,)))
    assert (found.rung, found.moved_bytes) == (Rung.ABSORB, 0.0)
    assert placed(found, current, nodes=(idle,)).pipelines == current.plan.pipelines


def test_a_far_horizon_takes_the_plan_that_steps_fastest() -> None:
    current, outlook = running(a_cluster(("A100", 3, 2), ("H100", 2, 2)))
    for node in current.plan.nodes:
        near = changed(replan(current, outlook, nodes=(node,), horizon=1))
        far = changed(replan(current, outlook, nodes=(node,), horizon=1_000_000))
        assert far.proposal.seconds <= near.proposal.seconds * (1 + 1e-9)
        assert near.move_s <= far.move_s


def test_the_answer_that_was_ready_is_the_one_that_would_be_found() -> None:
    current, outlook = running(a_cluster(("A100", 4, 2), ("H100", 2, 2)))
    cold = [replan(current, outlook, nodes=(node,)) for node in current.plan.nodes]
    device = current.plan.devices[0]
    cold.append(replan(current, outlook, devices=(device,)))
    outlook.prepare()
    assert len(outlook.ready) == 4
    index = Index.of(current)
    warm = [replan(current, outlook, nodes=(node,), index=index) for node in current.plan.nodes]
    warm.append(replan(current, outlook, devices=(device,), index=index))
    assert warm == cold


def test_nothing_left_says_what_is_missing() -> None:
    current, outlook = running(a_cluster(("A100", 1, 2)))
    found = replan(current, outlook, nodes=current.plan.nodes)
    assert isinstance(found, NoPlan) and ";" in found.reason


spans = st.tuples(st.integers(0, 5), st.integers(1, 3)).map(lambda one: (one[0], min(6, one[0] + one[1])))
roles = st.lists(spans, min_size=1, max_size=5)


@settings(max_examples=100, deadline=None)
@given(roles, roles)
def test_no_assignment_of_roles_moves_less(old: list[tuple[int, int]], new: list[tuple[int, int]]) -> None:
    weight = [0.0, 1.0, 3.0, 4.0, 8.0, 9.0, 11.0]
    size = max(len(old), len(new))

    def kept(a: tuple[int, int] | None, b: tuple[int, int] | None) -> float:
        if a is None or b is None:
            return 0.0
        first, last = max(a[0], b[0]), min(a[1], b[1])
        return weight[last] - weight[first] if last > first else 0.0

    def everybody() -> Iterator[float]:
        padded = [*new, *[None] * (size - len(new))]
        for order in permutations([*old, *[None] * (size - len(old))]):
            yield sum(kept(a, b) for a, b in zip(order, padded, strict=True))

    total = sum(weight[b] - weight[a] for a, b in new)
    moves = least_moves([(span, 1) for span in old], [(span, 1) for span in new], weight)
    assert abs(moves.moved - (total - max(everybody()))) < 1e-9
    given_out = [count for (_, j), count in moves.pairs.items() for _ in range(1) if j >= 0]
    assert sum(given_out) == len(new)


@pytest.mark.timeout(20)
def test_ways_round_that_gain_nothing_but_rounding_are_not_walked_for_ever() -> None:
    """Sums of bytes that should be equal are not: 50 layers on six pipelines of four stages, after thirteen others."""
    params = accumulate([2**24, *[50_364_416] * 48, 2**24 + 2048], initial=0)
    weight = [number * (3.0 + 24.0 / 13) for number in params]
    old = [(0, 8), (0, 17), (8, 15), (15, 22), (17, 33), (22, 29), (29, 36), (33, 50), (36, 43), (43, 50)]
    new = [(0, 13), (13, 25), (25, 37), (37, 50)]
    moves = least_moves([(span, 1 if span[1] - span[0] > 8 else 3) for span in old], [(span, 6) for span in new], weight)
    assert sum(count for (_, j), count in moves.pairs.items() if j >= 0) == 24
    assert 0.0 < moves.moved < 6 * weight[-1]


def test_of_many_alike_only_the_difference_moves() -> None:
    weight = [float(layer) for layer in range(81)]
    old = [((2 * i, 2 * i + 2), 77) for i in range(40)]
    new = [((round(80 * i / 38), round(80 * (i + 1) / 38)), 81) for i in range(38)]
    moves = least_moves(old, new, weight)
    in_order = sum(
        81 * max(0, (b[1] - b[0]) - max(0, min(a[1], b[1]) - max(a[0], b[0])))
        for (a, _), (b, _) in zip(old, new, strict=False)
    )
    assert moves.moved < in_order / 1.3


def test_holders_share_what_is_asked_of_them() -> None:
    assert busiest_sender([((0, 2), 4), ((2, 4), 1)], [4.0, 4.0, 3.0, 0.0]) == 3.0
