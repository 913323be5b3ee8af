"""What the kernel makes of numbers that cannot be right: whom it accuses, what it restores from, who is let back in."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.domain.checkpoint import CheckpointRef
from orchestrator.domain.events import (
    CancelRequested,
    CheckpointCommitted,
    HostClosed,
    JobSubmitted,
    ProgramProbed,
    ReleaseRequested,
)
from orchestrator.domain.failure import Cause
from orchestrator.domain.generation import Arrived, Disagrees, Finding, NotFinite, RankReport
from orchestrator.domain.host_events import SelfTested
from orchestrator.domain.ids import Device, Generation, JobId, Rank, Step
from orchestrator.domain.layout import partners
from orchestrator.domain.origin import FromCheckpoint, FromMemory, FromSeed
from orchestrator.domain.plan import Plan
from orchestrator.domain.profile import Interval
from orchestrator.domain.quarantine import Standing
from orchestrator.domain.requests import CloseHost, OpenHost, SelfTest
from orchestrator.domain.state import Failed, Queued, Reforming, Running, Stopping
from orchestrator.recovery.quarantine import REMEMBERED_S
from tests.builders import JOB, Bench, a_profile, a_report, a_spec, an_answer


def running(nodes: int = 4, **spec: int) -> Bench:
    return Bench(nodes=nodes, spec=a_spec(tp=2, **spec)).running()


def pair(plan: Plan) -> tuple[Device, Device]:
    """An owner and its mirror."""
    return next(iter(sorted(partners(plan).items())))


def finds(bench: Bench, device: Device, found: Finding, *, passed: int, held: int | None = None) -> Bench:
    generation = bench.record.generation
    at = passed if held is None else held
    report = a_report(device, generation=generation, voted=passed, passed=passed, held=at)
    return bench.reports(replace(report, found=found, cause="what was seen"))


def corrupted(bench: Bench, step: int = 7) -> tuple[Device, Device]:
    """A mirror finds that its copy differs after `step`; the others report that they hold it."""
    owner, mirror = pair(bench.plan)
    generation = bench.record.generation
    found = Disagrees(rank=bench.plan.seat_of[owner].rank, about="state")
    finds(bench, mirror, found, passed=step)
    bench.all_report(lambda device: a_report(device, generation=generation, voted=step, passed=step, held=step))
    return owner, mirror


def verdict(bench: Bench, device: Device, passed: bool = True) -> Bench:
    return bench.said(device.node, SelfTested(device=device, passed=passed, message="5 questions"))


def out(bench: Bench) -> set[Device]:
    return {device for device, one in bench.kernel.quarantine.items() if one.is_out}


def formed(bench: Bench) -> Bench:
    return bench.planned().opened().prepared().ready()


def test_copies_that_disagree_roll_back_to_the_checkpoint_without_the_two_devices() -> None:
    bench = running().passed(1, 2, 3, 4, 5).checkpoint(5).passed(6, 7)
    owner, mirror = corrupted(bench)
    assert out(bench) == {owner, mirror}
    assert {node for node, _ in bench.calls(SelfTest)} <= {owner.node, mirror.node}
    formed(bench)
    assert isinstance(bench.state, Running)
    assert not {owner, mirror} & set(bench.plan.devices)
    restore = bench.form().restore
    assert isinstance(restore, FromCheckpoint) and restore.checkpoint.step == 5
    incident = bench.record.incidents[-1]
    assert incident.fault.cause is Cause.CORRUPTION and set(incident.fault.devices) == {owner, mirror}
    assert (incident.rolled_back, bench.record.committed) == (2, 5)
    assert "disagree about step 7; from the checkpoint of step 5" in incident.source
    assert bench.said_to_people().count("quarantined") == 2


@pytest.mark.parametrize("arrived", [False, True])
def test_memory_that_is_not_believed_is_not_believed_after_a_second_failure_either(arrived: bool) -> None:
    """The copies differ after the very step of the checkpoint, and the next generation ends before anybody was told of it:
    everybody still has what it had, and the plan by which is kept for the checkpoint's copies on nodes' own disks."""
    bench = running().passed(1, 2, 3, 4, 5)
    near = CheckpointRef(
        step=Step(5), generation=bench.record.generation, path="/5", answer=an_answer(5), local=bench.plan.nodes
    )
    bench.tell(CheckpointCommitted(job=JOB, checkpoint=near))
    corrupted(bench, 5)
    bench.planned().opened().prepared()
    assert isinstance(bench.form().restore, FromCheckpoint) and Generation(1) in bench.record.plans
    bench.exited(bench.plan.devices[0])
    pieces = tuple(Interval(line.name, 0, line.numel) for line in a_profile().lines)

    def untold(device: Device) -> RankReport:
        report = a_report(device, generation=2, voted=5, passed=5, held=None if arrived else 5, held_in=1)
        return replace(report, arrived=Arrived(step=Step(5), intervals=pieces)) if arrived else report

    bench.all_report(untold)
    formed(bench)
    assert bench.form().generation == 3 and isinstance(bench.form().restore, FromCheckpoint)
    # What that generation has restored is its own, and counts like any other memory.
    bench.exited(bench.plan.devices[0])
    bench.all_report(lambda device: a_report(device, generation=3, voted=5, held=5))
    assert isinstance(formed(bench).form().restore, FromMemory)


def test_without_a_checkpoint_it_starts_again_from_the_seed() -> None:
    bench = running().passed(1, 2)
    corrupted(bench, 2)
    formed(bench)
    assert bench.form().restore == FromSeed()
    assert bench.record.committed == 0


def test_each_device_is_tested_once_and_let_back_in_when_it_passes() -> None:
    bench = running().passed(1, 2)
    owner, mirror = corrupted(bench, 2)
    asked = [e.request for e in bench.effects.values() if isinstance(getattr(e, "request", None), SelfTest)]
    assert {request.device for request in asked} == {owner, mirror} and len(asked) == 2
    formed(bench)
    smaller = bench.plan.world_size
    verdict(bench, owner)
    verdict(bench, mirror)
    assert out(bench) == set()
    assert bench.kernel.quarantine[owner].standing is Standing.RELEASED
    assert bench.said_to_people().count("released") == 2
    bench.passed(3).planned().opened()
    larger = bench.record.target
    assert larger is not None and larger.world_size > smaller and {owner, mirror} <= set(larger.devices)


def test_a_device_that_fails_its_test_stays_out_until_an_operator_releases_it() -> None:
    bench = running().passed(1, 2)
    owner, mirror = corrupted(bench, 2)
    formed(bench)
    verdict(bench, owner)
    verdict(bench, mirror, passed=False)
    assert out(bench) == {mirror} and bench.kernel.quarantine[mirror].standing is Standing.HELD
    bench.tell(ReleaseRequested(node=mirror.node))
    assert out(bench) == set() and mirror not in bench.kernel.quarantine


def test_a_second_strike_within_a_day_is_not_tested_away() -> None:
    bench = running(nodes=2, dp=2).passed(1, 2)
    accused = set(corrupted(bench, 2))
    for device in accused:
        verdict(bench, device)
    formed(bench).passed(1)
    corrupted(bench, 1)
    assert {bench.kernel.quarantine[device].strikes for device in accused} == {2}
    assert out(bench) == accused
    assert all(bench.kernel.quarantine[device].standing is Standing.HELD for device in accused)


def test_a_strike_is_forgotten_after_a_day() -> None:
    bench = running(nodes=2, dp=2).passed(1, 2)
    accused = set(corrupted(bench, 2))
    for device in accused:
        verdict(bench, device)
    bench.now += REMEMBERED_S + 1
    bench.tell()
    assert not bench.kernel.quarantine


def test_a_job_that_has_no_other_devices_waits_for_the_tests_and_goes_on_by_itself() -> None:
    bench = running(nodes=2, dp=2).passed(1, 2)
    owner, mirror = corrupted(bench, 2)
    bench.planned()
    assert isinstance(bench.state, Reforming) and bench.state.forming is None
    assert bench.state.waiting
    verdict(bench, owner)
    verdict(bench, mirror)
    formed(bench)
    assert isinstance(bench.state, Running) and bench.plan.world_size == 4


def test_different_gradients_run_the_step_again_from_memory() -> None:
    bench = running().passed(1, 2)
    one, other = bench.device(0), bench.device(4)
    generation = bench.record.generation
    finds(bench, other, Disagrees(rank=Rank(0), about="gradient"), passed=2)
    bench.all_report(lambda device: a_report(device, generation=generation, voted=2, passed=2, held=2))
    assert out(bench) == {one, other}
    formed(bench)
    restore = bench.form().restore
    assert isinstance(restore, FromMemory) and restore.step == 2
    assert bench.record.incidents[-1].rolled_back == 0
    assert bench.record.incidents[-1].fault.cause is Cause.CORRUPTION


def test_memory_that_changed_by_itself_is_replaced_from_its_mirror() -> None:
    """It comes out only because something else closes the generation; then the plan that keeps every seat is off."""
    bench = running().passed(1, 2)
    lost, changed = bench.device(0), bench.device(3)
    generation = bench.record.generation
    bench.exited(lost)
    assert isinstance(bench.state, Reforming) and bench.state.forming is not None
    memory = Disagrees(rank=bench.record.plans[generation].seat_of[changed].rank, about="memory")
    report = a_report(changed, generation=generation, voted=2, passed=2, held=None)
    bench.reports(replace(report, found=memory))
    assert out(bench) == {changed}
    bench.all_report(lambda device: a_report(device, generation=generation, voted=2, passed=2, held=2))
    formed(bench)
    assert changed not in bench.plan.devices
    restore = bench.form().restore
    assert isinstance(restore, FromMemory) and changed not in {move.source for move in restore.moves}


def test_evidence_that_comes_after_another_fault_still_counts() -> None:
    bench = running().passed(1, 2, 3, 4, 5).checkpoint(5).passed(6)
    owner, mirror = pair(bench.plan)
    generation, lost = bench.record.generation, next(d for d in bench.plan.devices if d not in pair(bench.plan))
    found = Disagrees(rank=bench.plan.seat_of[owner].rank, about="state")
    bench.exited(lost)
    report = a_report(mirror, generation=generation, voted=6, passed=6, held=6)
    bench.reports(replace(report, found=found))
    bench.all_report(lambda device: a_report(device, generation=generation, voted=6, passed=6, held=6))
    formed(bench)
    assert isinstance(bench.form().restore, FromCheckpoint)
    assert bench.record.incidents[-1].fault.cause is Cause.CORRUPTION


def test_evidence_outlives_the_rank_that_found_it() -> None:
    bench = running().passed(1, 2, 3, 4, 5).checkpoint(5).passed(6)
    owner, mirror = pair(bench.plan)
    generation = bench.record.generation
    found = Disagrees(rank=bench.plan.seat_of[owner].rank, about="state")
    page = replace(a_report(mirror, generation=generation, voted=6, passed=6, held=None), found=found)
    bench.exited(mirror, report=page)
    bench.all_report(lambda device: a_report(device, generation=generation, voted=6, passed=6, held=6))
    assert out(bench) == {owner, mirror}
    formed(bench)
    assert isinstance(bench.form().restore, FromCheckpoint)


def test_a_loss_that_is_not_finite_is_computed_again_and_fails_the_job_the_second_time() -> None:
    bench = running(dp=2).passed(1, 2)
    for attempt in (1, 2):
        generation = bench.record.generation
        step = Step(3)
        report = a_report(bench.device(0), generation=generation, voted=3, passed=2 if attempt == 1 else 0, held=2)
        found = NotFinite(step=step, micro_batches=(1,))
        bench.reports(replace(report, found=found, cause="step 3 gave micro-batch 1: loss nan"))
        if attempt == 2:
            break
        assert isinstance(bench.state, Reforming) and bench.state.fault.cause is Cause.NOT_FINITE
        bench.all_report(lambda device: a_report(device, generation=generation, voted=3, passed=2, held=2))  # noqa: B023
        bench.prepared().ready()
        restore = bench.form().restore
        assert isinstance(restore, FromMemory) and restore.step == 2
    assert isinstance(bench.state, Stopping) and isinstance(bench.state.outcome, Failed)
    assert "micro-batch 1: loss nan" in bench.state.outcome.message and "twice" in bench.state.outcome.message
    assert out(bench) == set()


# --- who tests -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("waits", [False, True], ids=["the job trains on", "the job waits"])
def test_a_test_that_went_with_its_host_is_asked_for_again(waits: bool) -> None:
    bench = (running(nodes=2, dp=2) if waits else running()).passed(1, 2)
    owner, _ = corrupted(bench, 2)
    if waits:
        bench.planned()
    else:
        formed(bench)
    bench.host_gone(owner.node)
    assert owner.node in {node for node, _ in bench.calls(OpenHost)}
    assert (owner.node, SelfTest(device=owner)) in bench.calls(SelfTest)
    assert bench.kernel.quarantine[owner].tester == JOB


def test_a_queued_job_has_devices_tested_that_an_ended_one_left_behind() -> None:
    bench = running(nodes=2, dp=2).passed(1, 2)
    owner, mirror = corrupted(bench, 2)
    bench.tell(CancelRequested(job=JOB))
    for node, _ in bench.calls(CloseHost):
        bench.tell(HostClosed(job=JOB, node=node))
    assert out(bench) == {owner, mirror}
    assert {one.tester for one in bench.kernel.quarantine.values()} == {None}
    other = JobId("other")
    bench.tell(JobSubmitted(job=other, spec=bench.spec, at=bench.now))
    bench.tell(ProgramProbed(job=other, profile=a_profile()))
    assert isinstance(bench.kernel.jobs[other].state, Queued)
    assert {node for node, _ in bench.calls(SelfTest)} == {owner.node, mirror.node}
    assert {one.tester for one in bench.kernel.quarantine.values()} == {other}


@pytest.mark.parametrize("passed", [True, False])
def test_a_verdict_that_nobody_waits_for_changes_nothing(passed: bool) -> None:
    bench = running().passed(1)
    device = bench.device(0)
    verdict(bench, device, passed)
    assert not bench.kernel.quarantine and isinstance(bench.state, Running)


def test_quarantine_is_committed_only_when_it_changes() -> None:
    bench = running().passed(1, 2)
    assert not bench.last.quarantine_changed
    owner, mirror = pair(bench.plan)
    finds(bench, mirror, Disagrees(rank=bench.plan.seat_of[owner].rank, about="state"), passed=2)
    assert bench.last.quarantine_changed
    bench.tell()
    assert not bench.last.quarantine_changed
