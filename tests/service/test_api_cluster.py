"""The API over a real port: nodes, the size of jobs, devices that are kept out, and faults on purpose."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from api.client import ApiError, Client
from orchestrator.domain.admission import Admission, Admittance
from orchestrator.domain.cluster import Node, NodeStatus
from orchestrator.domain.cordon import Cordon
from orchestrator.domain.events import (
    CordonRequested,
    NodeRequested,
    ReleaseRequested,
    ResizeRequested,
    UncordonRequested,
)
from orchestrator.domain.faults import FaultKind, FaultRequested, Injected, Verdict
from orchestrator.domain.ids import Device, JobId, NodeId, Step
from orchestrator.domain.kinds import GIB, DeviceKind
from orchestrator.domain.quarantine import Quarantine, Standing
from orchestrator.domain.size import Size
from tests.desk import NOW
from tests.served import JOB, Served, running, serve

pytestmark = pytest.mark.timeout(120)


def test_nodes_are_listed_and_added(served: Served, client: Client) -> None:
    served.desk.set_nodes(Node(id=NodeId("node-1"), kind="H100", num_devices=2))
    assert [(node.id, node.status) for node in client.nodes()] == [("node-1", "UP")]
    client.add_node("B200", 4, {"rack": "r1"})
    assert served.desk.asked == [NodeRequested(kind="B200", num_devices=4, labels={"rack": "r1"})]
    with pytest.raises(ApiError, match="kind is 'B300': must be one of"):
        client.add_node("B300")


def test_kinds_of_the_configuration_may_be_added_and_what_benchmarks_correct_is_said(tmp_path: Path) -> None:
    ours = DeviceKind(name="X1", memory_bytes=64 * GIB, bf16_tflops=1000, memory_gb_s=4000)
    with serve(tmp_path, kinds=(ours,)) as served, Client(served.url) as client:
        client.add_node("X1", 4)
        assert served.desk.asked == [NodeRequested(kind="X1", num_devices=4, labels={})]
        served.desk.set_nodes(Node(id=NodeId("node-1"), kind="X1", num_devices=2))
        measured = Admission(node=NodeId("node-1"), since=NOW, standing=Admittance.ADMITTED, said="tested", tflops=560.0)
        served.desk.write(admissions=(measured,))
        (node,) = client.nodes()
        assert node.checked == "tested; X1 counts as 700 TFLOP/s, by its nodes' own benchmark"


def test_nodes_are_kept_free_of_new_work_emptied_and_taken_away(served: Served, client: Client) -> None:
    served.desk.set_nodes(*(Node(id=NodeId(f"node-{number}"), kind="H100", num_devices=2) for number in (1, 2, 3, 4)))
    asked = [client.cordon_node("node-1"), client.drain_node("node-1"), client.remove_node("node-1", 2.5)]
    assert [one.message.count("node-1") for one in asked] == [1, 1, 1]
    cordon = CordonRequested(node=NodeId("node-1"))
    drain = replace(cordon, drain=True)
    assert served.desk.asked == [cordon, drain, replace(drain, remove=True, deadline_s=2.5)]
    found = Cordon(node=NodeId("node-1"), since=NOW), Cordon(node=NodeId("node-2"), since=NOW, drains=True)
    served.desk.write(cordons=(*found, Cordon(node=NodeId("node-3"), since=NOW, drains=True, is_empty=True)))
    assert [node.scheduling for node in client.nodes()] == ["cordoned", "draining", "drained", "open"]
    client.uncordon_node("node-1")
    assert served.desk.asked[3:] == [UncordonRequested(node=NodeId("node-1"))]
    with pytest.raises(ApiError, match="node-4 is not cordoned") as caught:
        client.uncordon_node("node-4")
    assert caught.value.status == 409
    for ask in (client.cordon_node, client.uncordon_node, client.drain_node, client.remove_node):
        with pytest.raises(ApiError, match="nodes: node-1, node-2, node-3, node-4") as caught:
            ask("node-9")
        assert caught.value.status == 404


def test_a_job_is_resized_within_bounds_that_make_sense(served: Served, client: Client) -> None:
    running(served)
    client.resize(JOB, target=4, max_devices=8)
    assert served.desk.asked == [ResizeRequested(job=JobId(JOB), size=Size(max_devices=8, target=4))]
    served.desk.change(served.desk.record(JOB), size=Size(min_devices=2, max_devices=8, target=4))
    assert client.job(JOB).size.target == 4
    for wanted, words in (
        ({"target": 9}, "target is 9, the job may have 2 to 8"),
        ({"target": 1}, "target is 1"),
        ({"target": 0, "min_devices": 9}, "max_devices is 8, below min_devices 9"),
        ({}, "nothing is to be changed"),
        ({"min_devices": 0}, "min_devices"),
    ):
        with pytest.raises(ApiError, match=words) as caught:
            client.resize(JOB, **wanted)
        assert caught.value.status == 422
    assert len(served.desk.asked) == 1


def test_devices_that_are_kept_out_are_shown_and_released(served: Served, client: Client) -> None:
    served.desk.set_nodes(*(Node(id=NodeId(name), kind="H100", num_devices=2) for name in ("node-1", "node-2")))
    held = Quarantine(
        device=Device(NodeId("node-1"), 1),
        reason="it differs",
        since=NOW,
        job=JobId(JOB),
        strikes=2,
        standing=Standing.HELD,
    )
    served.desk.write(quarantine=(held,))
    first, second = client.nodes()
    assert [(one.device, one.standing, one.strikes, one.job) for one in first.quarantine] == [("node-1/1", "held", 2, JOB)]
    assert second.quarantine == ()
    assert "node-1/1" in client.release_node("node-1").message
    assert served.desk.asked == [ReleaseRequested(node=NodeId("node-1"))]
    for name, status, words in (("node-2", 409, "nothing is held against"), ("node-9", 404, "nodes: node-1, node-2")):
        with pytest.raises(ApiError, match=words) as caught:
            client.release_node(name)
        assert caught.value.status == status


def test_faults_name_what_they_kill(served: Served, client: Client) -> None:
    running(served)
    up, lost = (Node(id=NodeId(name), kind="H100", num_devices=2) for name in ("node-1", "node-2"))
    served.desk.set_nodes(up, replace(lost, status=NodeStatus.LOST))
    client.kill_rank(JOB, 7)
    client.kill_node("node-1")
    asked = [item for item in served.desk.asked if isinstance(item, FaultRequested)]
    assert [(item.fault, item.rank, item.node, item.beyond_mirrors) for item in asked] == [
        (FaultKind.KILL, 7, None, True),
        (FaultKind.NODE_KILL, None, "node-1", True),
    ]
    for call, status, words in (
        (lambda: client.kill_rank(JOB, 8), 422, "must be 0..7 in generation 1"),
        (lambda: client.kill_rank("job-x", 0), 404, "there is no job job-x"),
        (lambda: client.kill_node("node-9"), 404, "nodes: node-1, node-2"),
        (lambda: client.kill_node("node-2"), 409, "is LOST already"),
    ):
        with pytest.raises(ApiError, match=words) as caught:
            call()
        assert caught.value.status == status


def test_a_fault_has_an_id_by_which_its_verdict_is_found(served: Served, client: Client) -> None:
    running(served)
    accepted = client.inject({"kind": "kill", "job": JOB, "stage": 1, "at": "after_vote", "step": 9, "seed": 4})
    (asked,) = [item for item in served.desk.asked if isinstance(item, FaultRequested)]
    assert asked == FaultRequested(
        fault=FaultKind.KILL, job=JobId(JOB), stage=1, at="after_vote", step=Step(9), seed=4, id=accepted.fault
    )
    assert client.faults(JOB) == []
    injected = Injected(id=accepted.fault, asked=asked, asked_at=NOW, verdict=Verdict.RECOVERED, pause_s=0.2)
    served.desk.change(served.desk.record(JOB), injected=(injected,))
    (shown,) = client.faults(JOB)
    assert (shown.id, shown.kind, shown.at, shown.verdict, shown.pause_s) == (
        accepted.fault, "kill", "after_vote", "recovered", 0.2
    )  # fmt: skip
    assert shown.asked == {
        "fault": "kill",
        "job": JOB,
        "stage": 1,
        "at": "after_vote",
        "step": 9,
        "exit_code": 1,
        "seed": 4,
    }
    with pytest.raises(ApiError, match="there is no job job-x"):
        client.faults("job-x")


def test_faults_are_refused_unless_enabled_and_the_refusal_says_how(tmp_path: Path) -> None:
    with serve(tmp_path, chaos=False) as served, Client(served.url) as client:
        running(served)
        with pytest.raises(ApiError, match="everstep up --chaos") as caught:
            client.kill_rank(JOB, 0)
        assert caught.value.status == 403 and not served.desk.asked
