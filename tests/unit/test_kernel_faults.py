"""Faults on purpose as the kernel sees them: whom they hit, what is refused, and the verdict of each."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.domain.effects import Effect, KillNode, Sabotage, StrikeNode
from orchestrator.domain.events import NodeStruck
from orchestrator.domain.failure import Cause
from orchestrator.domain.faults import FaultKind, FaultRequested, Injected, Verdict
from orchestrator.domain.generation import NotFinite
from orchestrator.domain.host_events import FaultCarriedOut
from orchestrator.domain.ids import Device, JobId, NodeId, Step
from orchestrator.domain.layout import partners
from orchestrator.domain.plan import Plan, Stage
from orchestrator.domain.requests import InjectFault
from orchestrator.domain.state import Reforming
from orchestrator.supervisor.faulting import MAX_INJECTED, QUIET_S, QUIET_STEPS
from tests.builders import JOB, Bench, a_report


def asked(kind: FaultKind = FaultKind.KILL, **fields: object) -> FaultRequested:
    return FaultRequested(fault=kind, job=JOB, **fields)  # type: ignore[arg-type]


def last(bench: Bench) -> Injected:
    return bench.record.injected[-1]


def hit(bench: Bench) -> list[Device | None]:
    return [request.device for _, request in bench.calls(InjectFault)]


def trained() -> Bench:
    """Step 3 is committed: there is something to lose."""
    return Bench().running().passed(1, 2, 3)


def struck(bench: Bench, step: int = 4) -> Bench:
    one = last(bench)
    node = one.node or one.devices[0].node
    return bench.said(node, FaultCarriedOut(id=one.id, message="done", at=bench.now, step=Step(step)))


def strikes(bench: Bench) -> list[Effect]:
    return [effect for effect in bench.record.outbox.values() if isinstance(effect, StrikeNode)]


def recovered(bench: Bench) -> Bench:
    bench.all_report(lambda device: a_report(device, generation=1, voted=3, passed=3, held=3))
    return bench.prepared().ready().passed(4)


def on_one_node(plan: Plan, node: NodeId) -> Plan:
    def moved(stage: Stage) -> Stage:
        return replace(stage, devices=tuple(Device(node, plan.seat_of[device].rank) for device in stage.devices))

    return replace(plan, pipelines=tuple(replace(p, stages=tuple(map(moved, p.stages))) for p in plan.pipelines))


def test_selectors_narrow_it_down_and_the_seed_picks_among_the_rest() -> None:
    bench = trained()
    seats = {seat.device: seat for seat in bench.plan.seats}
    drawn = {hit(bench.tell(asked(stage=1, tp=0, seed=seed, beyond_mirrors=True)))[0] for seed in range(20)}
    assert {(seats[device].stage, seats[device].tp) for device in drawn if device} == {(1, 0)}
    assert drawn == {device for device, seat in seats.items() if (seat.stage, seat.tp) == (1, 0)}
    again = [hit(trained().tell(asked(seed=7))) for _ in range(2)]
    assert again[0] == again[1] != [None]


def test_a_killed_rank_is_detected_recovered_and_judged() -> None:
    bench = trained().tell(asked(rank=2))
    victim = bench.device(2)
    assert hit(bench) == [victim] and last(bench).carried_out_at is None
    struck(bench).exited(victim)
    one = last(bench)
    assert (one.cause, one.incident, one.verdict) == ("rank_lost", 1, Verdict.OPEN)
    assert one.detected_s is not None and one.detected_s >= 0
    recovered(bench)
    one = last(bench)
    assert one.verdict is Verdict.RECOVERED and one.pause_s is not None and "SIGKILL" in one.seen
    assert {"fault_asked", "fault_carried_out", "fault_judged"} <= set(bench.said_to_people())


def test_what_mirrors_do_not_cover_is_refused_unless_asked_for() -> None:
    bench = trained()
    owner = bench.device(0)
    mirror = partners(bench.plan)[owner]
    bench.tell(asked(device=owner))
    bench.tell(asked(device=mirror))
    assert not hit(bench) and last(bench).verdict is Verdict.REFUSED
    assert "would destroy the only copies of" in last(bench).why and "ask beyond mirrors" in last(bench).why
    assert hit(bench.tell(asked(device=mirror, beyond_mirrors=True))) == [mirror]


def test_ranks_that_were_told_to_form_may_have_let_go_of_what_they_held_before() -> None:
    bench = trained().exited(trained().device(2))
    bench.all_report(lambda device: a_report(device, generation=1, voted=3, passed=3, held=3)).prepared()
    state = bench.record.state
    assert isinstance(state, Reforming) and state.forming is not None and state.forming.formed
    plan = on_one_node(state.forming.plan, NodeId("n9"))
    crowded = replace(state, forming=replace(state.forming, plan=plan))
    bench.kernel = replace(bench.kernel, jobs={JOB: replace(bench.record, state=crowded)})
    bench.tell(asked(FaultKind.NODE_KILL, node=NodeId("n9")))
    assert last(bench).verdict is Verdict.REFUSED and "would destroy the only copies of" in last(bench).why


def test_a_flipped_bit_is_not_copied_before_copies_were_compared() -> None:
    bench = trained()
    owner = bench.device(0)
    mirror = partners(bench.plan)[owner]
    struck(bench.tell(asked(FaultKind.BIT_FLIP, device=owner)))
    for victim in (mirror, owner):
        bench.tell(asked(device=victim))
        assert last(bench).verdict is Verdict.REFUSED, "a copy is gone, and with it the evidence"
    other = trained()
    other.tell(asked(device=mirror)).tell(asked(FaultKind.BIT_FLIP, device=owner))
    assert last(other).verdict is Verdict.REFUSED


def test_a_slow_rank_may_be_the_mirror_of_one_that_is_killed() -> None:
    bench = trained().tell(asked(rank=0))
    assert hit(bench.tell(asked(FaultKind.SLOW, device=partners(bench.plan)[bench.device(0)])))


def test_a_rank_that_was_stopped_and_votes_again_is_safe_to_rely_on() -> None:
    bench = trained().tell(asked(FaultKind.STOP, rank=0, duration_s=0.5))
    mirror = partners(bench.plan)[bench.device(0)]
    struck(bench, step=4)
    assert not hit(bench.tell(asked(device=mirror)))
    assert not hit(bench.passed(4, 5).tell(asked(device=mirror)))
    bench.passed(6)
    assert hit(bench.tell(asked(device=mirror))) == [mirror]


def test_mirrors_count_again_once_the_job_has_recovered() -> None:
    bench = trained().tell(asked(rank=0))
    struck(bench).exited(bench.device(0))
    recovered(bench)
    assert hit(bench.tell(asked(device=partners(bench.plan)[bench.device(0)])))


def test_survivors_of_a_recovery_are_spared_where_they_hold_the_last_copy() -> None:
    bench = trained()
    owner = bench.device(0)
    mirror = partners(bench.plan)[owner]
    bench.exited(owner)
    bench.tell(asked(device=mirror))
    assert last(bench).verdict is Verdict.REFUSED and "no ranks at the moment" in last(bench).why
    bench.prepared().all_report(lambda device: a_report(device, voted=3, passed=3, held=3))
    bench.tell(asked(device=mirror))
    assert last(bench).verdict is Verdict.REFUSED and "the only copies" in last(bench).why, "its successor is being filled"
    assert hit(bench.tell(asked(device=owner))) == [owner]


@pytest.mark.parametrize(
    ("kind", "verdict"), [(FaultKind.SLOW, Verdict.HARMLESS), (FaultKind.BIT_FLIP, Verdict.UNDETECTED)]
)
def test_a_fault_that_nobody_minds_is_judged_by_its_kind(kind: FaultKind, verdict: Verdict) -> None:
    bench = Bench(spec=replace(Bench().spec, train=replace(Bench().spec.train, steps=100))).running().passed(1, 2, 3)
    struck(bench.tell(asked(kind, rank=1)), step=3)
    bench.now += QUIET_S + 1
    bench.passed(*range(4, 3 + QUIET_STEPS))
    assert last(bench).verdict is Verdict.OPEN
    bench.passed(3 + QUIET_STEPS)
    assert last(bench).verdict is verdict


@pytest.mark.parametrize("ahead_s", [-90.0, 0.0, 90.0])
def test_numbers_that_are_not_finite_are_what_a_nan_looks_like_though_nobody_is_named(ahead_s: float) -> None:
    """Also where the host's clock is another one than the supervisor's."""
    bench = Bench(spec=replace(Bench().spec, train=replace(Bench().spec.train, steps=100))).running().passed(1, 2, 3)
    bench.tell(asked(FaultKind.NAN, rank=1))
    one = last(bench)
    said = FaultCarriedOut(id=one.id, message="done", at=bench.now + ahead_s, step=Step(3))
    bench.said(one.devices[0].node, said)
    seen = replace(
        a_report(bench.device(0), generation=1, voted=3, passed=3, held=3),
        found=NotFinite(step=Step(4), micro_batches=(1,)),
    )
    bench.reports(seen)
    assert last(bench).verdict is Verdict.OPEN and last(bench).cause is Cause.NOT_FINITE


@pytest.mark.parametrize(("exact", "verdict"), [(False, Verdict.UNDETECTED), (True, Verdict.HARMLESS)])
def test_an_exact_job_makes_a_step_with_a_nan_again_and_needs_no_recovery(exact: bool, verdict: Verdict) -> None:
    bench = Bench(spec=replace(Bench().spec, train=replace(Bench().spec.train, steps=100, exact=exact)))
    bench.running().passed(1, 2, 3)
    struck(bench.tell(asked(FaultKind.NAN, rank=1)), step=3)
    bench.now += QUIET_S + 1
    bench.passed(*range(4, 4 + QUIET_STEPS))
    assert last(bench).verdict is verdict


@pytest.mark.parametrize(("kind", "verdict"), [(FaultKind.SLOW, Verdict.HARMLESS), (FaultKind.HOST_KILL, Verdict.OPEN)])
def test_a_clock_that_jumps_back_holds_up_only_the_verdict_that_nobody_noticed(kind: FaultKind, verdict: Verdict) -> None:
    bench = trained()
    struck(bench.tell(asked(kind, rank=1)), step=3)
    bench.now -= 90
    bench.passed(*range(4, 4 + QUIET_STEPS))
    assert last(bench).verdict is verdict


def test_an_incident_that_was_over_before_explains_nothing() -> None:
    bench = trained().tell(asked(rank=2))
    recovered(struck(bench).exited(bench.device(2)))
    struck(bench.tell(asked(FaultKind.STOP, rank=2)), step=4)
    assert last(bench).after == 1 and last(bench).incident is None


def test_what_struck_before_the_first_step_of_a_recovery_ends_both_pauses_and_both_verdicts() -> None:
    bench = trained().tell(asked(rank=2))
    struck(bench).exited(bench.device(2))
    bench.all_report(lambda device: a_report(device, generation=1, voted=3, passed=3, held=3)).prepared().ready()
    bench.now += 1.0
    struck(bench.tell(asked(rank=1))).exited(bench.device(1))
    bench.all_report(lambda device: a_report(device, generation=2, voted=3, passed=3, held=3)).prepared().ready()
    assert [one.pause_s for one in bench.record.incidents] == [None, None]
    bench.passed(4)
    first, second = (one.pause_s for one in bench.record.incidents)
    assert first is not None and second is not None and first > second + 0.9
    assert [one.verdict for one in bench.record.injected] == [Verdict.RECOVERED] * 2


def test_an_armed_rank_that_dies_before_its_point_is_harmless() -> None:
    bench = trained().tell(asked(rank=2, at="in_vote"))
    bench.exited(bench.device(2))
    assert last(bench).verdict is Verdict.HARMLESS and "before it got there" in last(bench).why


def test_a_fault_in_the_next_process_survives_this_one() -> None:
    bench = trained().tell(asked(rank=2, at="in_transfer"))
    bench.exited(bench.device(2))
    assert last(bench).verdict is Verdict.OPEN


def test_a_host_that_cannot_do_it_says_so() -> None:
    bench = trained().tell(asked(rank=2))
    bench.said(bench.device(2).node, FaultCarriedOut(id=last(bench).id, message="no rank lives", at=1.0, refused=True))
    assert (last(bench).verdict, last(bench).why) == (Verdict.REFUSED, "no rank lives")


def test_a_slow_link_is_not_blamed_for_what_a_kill_did() -> None:
    bench = trained().tell(asked(FaultKind.SLOW_LINK, rank=2))
    struck(bench)
    bench.tell(asked(rank=2, beyond_mirrors=True))
    struck(bench).exited(bench.device(2))
    slow, kill = bench.record.injected
    assert (slow.incident, kill.incident) == (None, 1)


def test_a_killed_node_is_judged_by_every_job_on_it() -> None:
    bench = trained()
    node = bench.device(0).node
    bench.tell(FaultRequested(fault=FaultKind.NODE_KILL, node=node))
    assert strikes(bench) == [StrikeNode(job=JOB, node=node)], "a successor does it again"
    assert last(bench).devices == tuple(device for device in bench.plan.devices if device.node == node)
    bench.host_gone(node)
    assert (last(bench).cause, last(bench).incident) == ("node_lost", 1), (
        "its end is heard of before whoever killed it says so"
    )
    bench.tell(NodeStruck(node=node))
    assert last(bench).incident == 1


def test_a_node_that_could_not_be_killed_is_no_fault_that_nobody_noticed() -> None:
    bench = trained()
    node = bench.device(0).node
    bench.tell(asked(FaultKind.NODE_KILL, node=node))
    bench.now += QUIET_S
    bench.passed(*range(4, 4 + 2 * QUIET_STEPS))
    assert last(bench).verdict is Verdict.OPEN, "it lives still: nobody has said otherwise"
    bench.tell(NodeStruck(node=node, refused="its processes do not end"))
    assert (last(bench).verdict, last(bench).why) == (Verdict.REFUSED, "its processes do not end")


def test_a_node_that_was_killed_and_trains_on_went_undetected() -> None:
    bench = trained()
    node = bench.device(0).node
    bench.tell(asked(FaultKind.NODE_KILL, node=node)).passed(4, 5)
    bench.tell(NodeStruck(node=node))
    assert (last(bench).carried_out_at, last(bench).step) == (bench.now, 5)
    bench.now += QUIET_S
    bench.passed(*range(6, 6 + QUIET_STEPS))
    assert last(bench).verdict is Verdict.UNDETECTED


def test_a_node_is_killed_only_where_every_job_on_it_can_bear_that() -> None:
    """Found by simulated seed 1708: a kill asked for of one job took the only copies of another."""
    bench, other = trained(), JobId("other")
    node = bench.device(0).node
    mirror = partners(bench.plan)[bench.device(0)]
    bench.tell(asked(device=mirror))
    record = bench.record
    jobs = {JOB: replace(record, injected=()), other: replace(record, id=other)}
    bench.kernel = replace(bench.kernel, jobs=jobs)
    bench.tell(asked(FaultKind.NODE_KILL, node=node))
    mine, theirs = last(bench), bench.kernel.jobs[other].injected[-1]
    assert not bench.last.loose and not strikes(bench) and mine.verdict is theirs.verdict is Verdict.REFUSED
    assert mine.why.startswith(f"other has ranks on {node}: ") and "the only copies" in mine.why
    bench.tell(asked(FaultKind.NODE_KILL, node=node, beyond_mirrors=True))
    theirs = bench.kernel.jobs[other].injected[-1]
    assert strikes(bench) == [StrikeNode(job=JOB, node=node)] and last(bench).devices == theirs.devices
    bench.tell(NodeStruck(node=node))
    both = (last(bench), bench.kernel.jobs[other].injected[-1])
    assert all(one.carried_out_at == bench.now for one in both), "one blow, and both jobs' records say when"


def test_a_node_nobody_uses_is_killed_without_a_record() -> None:
    bench = trained()
    bench.tell(FaultRequested(fault=FaultKind.NODE_KILL, node=NodeId("spare")))
    assert bench.last.loose == (KillNode(node=NodeId("spare")),) and not bench.record.injected


def test_a_job_that_is_over_is_left_alone() -> None:
    bench = trained().tell(replace(asked(FaultKind.NODE_KILL), job=JobId("another")))
    assert not bench.last.loose and not bench.last.effects


def test_faults_of_the_control_plane_are_loose_and_remembered() -> None:
    bench = trained().tell(asked(FaultKind.SUPERVISOR_KILL))
    (effect,) = bench.last.loose
    assert isinstance(effect, Sabotage) and effect.fault.fault is FaultKind.SUPERVISOR_KILL
    assert last(bench).carried_out_at is not None and last(bench).verdict is Verdict.OPEN


def test_no_ranks_no_fault() -> None:
    bench = Bench().submitted().tell(asked(rank=0))
    assert last(bench).why == "the job has no ranks at the moment; wait until it runs"
    assert "it has ranks 0..7" in last(trained().tell(asked(rank=8))).why


def test_records_are_bounded_and_open_ones_are_judged_when_the_job_ends() -> None:
    bench = trained()
    for _ in range(MAX_INJECTED + 5):
        bench.tell(asked(FaultKind.CLOCK_JUMP))
    assert len(bench.record.injected) == MAX_INJECTED
    assert last(bench).id == f"f{MAX_INJECTED + 5}"
