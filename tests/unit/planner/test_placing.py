"""From counts to devices: tp inside a node, replicas of a stage together, and what a loss then comes to."""

from __future__ import annotations

from collections import defaultdict

from orchestrator.domain.kinds import KINDS
from orchestrator.planner.ask import Planned
from orchestrator.planner.compose import Limits
from orchestrator.planner.machines import NodeGroup, machines
from orchestrator.planner.memory import Rules
from orchestrator.planner.placement import place
from orchestrator.planner.search import search
from orchestrator.planner.survival import survival
from tests.planning import a_cluster, a_model, an_ask


def test_every_group_is_on_one_node_and_no_device_has_two_places() -> None:
    cluster = a_cluster(("A100", 4, 8), ("H100", 2, 8))
    found = search(an_ask(a_model(12, 4096), cluster, 48, tp=4))
    assert isinstance(found, Planned)
    plan = place(found.best, cluster)
    assert len(set(plan.devices)) == plan.world_size == found.best.num_devices
    assert all(len({device.node for device in stage.devices}) == 1 for p in plan.pipelines for stage in p.stages)
    assert sorted(i for p in plan.pipelines for i in p.micro_batches) == list(range(48))
    kinds = {machine.node: machine.key.name for machine in cluster.nodes}
    tracks = [member.track for member in found.best.members for _ in member.ids]
    for pipeline, track in zip(plan.pipelines, tracks, strict=True):
        placed = [kinds[stage.devices[0].node] for stage in pipeline.stages]
        assert placed == [found.best.keys[index].name for index in track.classes]


def test_replicas_of_a_stage_share_nodes_and_the_stages_of_a_pipeline_do_not() -> None:
    cluster = a_cluster(("A100", 4, 4))
    limits = Limits(least_depth=4, most_depth=4, replicas=4)
    found = search(an_ask(a_model(8), cluster, 16, tp=1, limits=limits))
    assert isinstance(found, Planned)
    plan = place(found.best, cluster)
    stages = defaultdict(set)
    for seat in plan.seats:
        stages[seat.device.node].add(seat.stage)
    assert all(len(mine) == 1 for mine in stages.values())
    assert all(len({stage.devices[0].node for stage in p.stages}) == 4 for p in plan.pipelines)


def test_mirrors_are_in_another_failure_domain() -> None:
    groups = [NodeGroup(kind=KINDS["A100"], nodes=2, devices=2, domain=f"rack={rack}") for rack in "ab"]
    cluster = machines(groups)
    found = search(an_ask(a_model(4), cluster, 16, rules=Rules(mirrors=1)))
    assert isinstance(found, Planned)
    plan = place(found.best, cluster)
    assert set(plan.domains.values()) == {"rack=a", "rack=b"}
    seen = survival(plan, mirrors=1)
    assert (seen.lost, seen.domains_lost) == (0, ()) and seen.absorbed + seen.kept == seen.nodes == 4


def test_what_is_lost_with_a_node_is_told() -> None:
    cluster = a_cluster(("A100", 1, 4))
    found = search(an_ask(a_model(4), cluster, 8, rules=Rules(mirrors=1)))
    assert isinstance(found, Planned)
    assert "both copies" in survival(place(found.best, cluster), mirrors=1).words
    assert "recovery.mirrors" in survival(place(found.best, cluster), mirrors=0).words
    alone = search(an_ask(a_model(4), a_cluster(("A100", 1, 1)), 8, rules=Rules(mirrors=1)))
    assert isinstance(alone, Planned)
    seen = survival(place(alone.best, a_cluster(("A100", 1, 1))), mirrors=1)
    assert (seen.lost, seen.kept) == (1, 0) and "nobody mirrors" in seen.words


def test_devices_that_are_preferred_are_taken_first() -> None:
    cluster = a_cluster(("A100", 4, 1))
    found = search(an_ask(a_model(4), cluster, 8, limits=Limits(least_depth=2, most_depth=2, replicas=1)))
    assert isinstance(found, Planned)
    wanted = {cluster.nodes[1].node, cluster.nodes[3].node}
    plan = place(found.best, cluster, prefer=lambda group: group[0].node not in wanted)
    assert set(plan.nodes) == wanted
