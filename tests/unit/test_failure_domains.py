"""From a node's labels to the failure domains that a plan carries."""

from __future__ import annotations

import pytest

from orchestrator.adapters.local_nodes import NodeSpec, parse_nodes
from orchestrator.domain.cluster import Node
from orchestrator.domain.errors import EverstepError
from orchestrator.domain.ids import NodeId
from orchestrator.domain.layout import partners
from tests.builders import Bench


@pytest.mark.parametrize(
    ("text", "labels"),
    [
        ("A100:2", {}),
        ("A100:2@r1", {"rack": "r1"}),
        ("A100:2@rack=r1+switch=s-2", {"rack": "r1", "switch": "s-2"}),
    ],
)
def test_nodes_are_written_with_their_labels(text: str, labels: dict[str, str]) -> None:
    assert parse_nodes(f"{text}, cpu:1") == (NodeSpec("A100", 2, labels), NodeSpec("cpu", 1))


@pytest.mark.parametrize("text", ["A100:2@", "A100@rack=", "A100:2@a b", "@r1", "A100:2@r1+"])
def test_what_is_no_label_is_refused(text: str) -> None:
    with pytest.raises(EverstepError, match="write A100:2"):
        parse_nodes(text)


@pytest.mark.parametrize(
    ("labels", "domain"),
    [({}, None), ({"zone": "z"}, None), ({"switch": "s"}, "switch=s"), ({"switch": "s", "rack": "r"}, "rack=r")],
)
def test_a_rack_counts_before_a_switch(labels: dict[str, str], domain: str | None) -> None:
    assert Node(id=NodeId("n"), kind="cpu", num_devices=1, labels=labels).domain == domain


def test_a_plan_knows_the_racks_of_its_nodes_and_mirrors_leave_them() -> None:
    bench = Bench()
    for number, name in enumerate(bench.nodes):
        bench.label(name, rack=f"r{number // 2}")
    plan = bench.running().plan
    assert plan.domains == {"n0": "rack=r0", "n1": "rack=r0", "n2": "rack=r1", "n3": "rack=r1"}
    assert all(plan.domains[owner.node] != plan.domains[mirror.node] for owner, mirror in partners(plan).items())
